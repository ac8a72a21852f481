"""Tiles of consecutive rows that belong to consecutive segments of any length, found without a wait for the device."""

import torch
from torch import Tensor

from rz.ops.launch import cdiv


def segment_tiles(counts: Tensor, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Cut each segment into tiles of `size` rows.

    Args:
        counts: [S] int32, rows of each segment.
        rows: at least their sum.
    Returns: ([T] int32 segment of each tile, [S] int32 first tile of each segment). T is a bound from rows and S; tiles
        past the last belong to segment S, which is none.
    """
    tiles = (counts + (size - 1)) // size
    ends = tiles.cumsum(0, dtype=torch.int32)
    tile = torch.arange(cdiv(rows, size) + len(counts), dtype=torch.int32, device=counts.device)
    return torch.searchsorted(ends, tile, right=True, out_int32=True), (ends - tiles).contiguous()
