"""Runs of rows whose intermediate results stay in a core's cache: large temporaries cost more than the arithmetic."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 18


def row_chunks(rows: int, width: int) -> Iterator[slice]:
    """Consecutive slices of about CHUNK_ELEMENTS / width of the rows, 16 at least."""
    size = max(16, CHUNK_ELEMENTS // max(1, width))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def scratch(target: Tensor) -> Tensor | None:
    """Where float32 steps on the way to target may be written: target itself if float32; None, so that torch takes new
    memory, which costs more than the arithmetic on it, otherwise."""
    return target if target.dtype == torch.float32 else None
