"""Runs of rows whose intermediate results stay in a core's cache: large temporaries cost more than the arithmetic."""

from collections.abc import Iterator

CHUNK_ELEMENTS = 1 << 18


def row_chunks(rows: int, width: int) -> Iterator[slice]:
    """Consecutive slices of about CHUNK_ELEMENTS / width of the rows, 16 at least."""
    size = max(16, CHUNK_ELEMENTS // width)
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
