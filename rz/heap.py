"""The heap of a process that learns."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
LARGEST = 32 << 20  # bytes of a block that is kept: the most that every glibc takes


def keep_freed_memory() -> bool:
    """Let malloc keep blocks of up to LARGEST bytes that are freed for the next tensors of this process.

    By default glibc hands much of them back to the system, and each page of the next such tensor is a fault, which
    costs more than the arithmetic of a small op. What was freed stays resident, and peak memory grows a little: a freed
    block is often a few bytes short of an aligned one of its size, so that up to some eight of each size lie unused.

    Returns: whether the C library takes the setting; False, and nothing changes, if it is not glibc.
    Source: mallopt(3) of the GNU C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # The threshold of mmap first: the other alone would end its growth by itself, from 128 kB, and hand back more.
    values = (MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, (1 << 31) - 1)
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in values)
