"""The heap of a process that learns."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed for the next tensors of this process, instead of handing it back to the system.

    By default glibc returns large blocks when they are freed, and each page of the next such tensor is a fault, which
    costs more than the arithmetic of a small op. What was freed stays resident, and peak memory grows: a freed block is
    often a few bytes short of an aligned one of its own size, so that up to some eight of each large size lie unused.

    Returns: whether the C library takes the setting; False, and nothing changes, if it is not glibc, or an old one that
        refuses to keep blocks above 32 MB.
    Source: mallopt(3) of the GNU C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # The threshold of mmap first: the other alone would end its growth by itself, from 128 kB, and hand back more.
    names = MMAP_THRESHOLD, TRIM_THRESHOLD
    return mallopt is not None and all(mallopt(name, (1 << 31) - 1) == 1 for name in names)
