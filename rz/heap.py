"""The heap of a process that learns."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed for the next tensors of this process, instead of handing it back to the system.

    By default glibc returns large blocks when they are freed, and each page of the next such tensor is a fault, which
    costs more than the arithmetic of a small op. Peak memory does not grow by it, but what was freed stays resident.

    Returns: whether the C library knows the setting; False, and nothing changes, if it is not glibc.
    Source: mallopt(3) of the GNU C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, (1 << 31) - 1) == 1 for name in (TRIM_THRESHOLD, MMAP_THRESHOLD))
