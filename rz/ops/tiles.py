"""Tile sizes by device class. A tile is chosen by sizes of the model only, never by the number of rows.

The class sm_80 also serves other NVIDIA devices, so its tiles need no more than 99 KB of shared memory.
AMD pipelines have at most two stages.
"""

import attrs
import torch

from rz.ops.device import INTERPRETER

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
SHARED_LIMIT = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDE_COLUMNS = 4096  # outputs from which the wide tile is used


@attrs.frozen
class Tile:
    """rows x columns (of scores: keys), inner elements a step, warps (on AMD waves of 64), pipeline stages."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# class: (16-bit from WIDE_COLUMNS outputs, 16-bit below, float32)
GEMM = {
    "sm_80": (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), Tile(64, 64, 32, 4, 3)),
    "sm_90": (Tile(128, 128, 64, 8, 4), Tile(64, 64, 64, 4, 4), Tile(64, 64, 32, 4, 3)),
    "sm_100": (Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 4, 4), Tile(64, 64, 32, 4, 3)),
    "gfx942": (Tile(128, 128, 64, 4, 2), Tile(64, 64, 64, 4, 2), Tile(64, 64, 32, 4, 2)),
    "gfx950": (Tile(128, 128, 64, 4, 2), Tile(64, 64, 64, 4, 2), Tile(64, 64, 32, 4, 2)),
    INTERPRETER: (Tile(32, 32, 32, 4, 1), Tile(32, 32, 32, 4, 1), Tile(16, 32, 16, 4, 1)),
}
GEMM_GROUP = 8  # row tiles that run side by side


def gemm_tile(device_class: str, columns: int, inner: int, dtype: torch.dtype) -> Tile:
    """The tile of a product with `columns` outputs over `inner` elements, of operands of dtype, one of DTYPES."""
    _require_dtype(dtype)
    wide, small, single = GEMM[device_class]
    if dtype == torch.float32:
        return single
    return wide if columns >= WIDE_COLUMNS else small


def _require_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise TypeError(f"kernels take float32, bfloat16 and float16, got {dtype}")


def row_block(width: int) -> tuple[int, int, int]:
    """(rows, padded width, warps) of a program that holds whole rows of `width` elements."""
    padded = max(16, 1 << (width - 1).bit_length())
    return max(1, 1024 // padded), padded, min(16, max(4, padded // 1024))


# class: widths up to 64, 128 and 256 of 16-bit elements, then of float32. m: query rows, n: keys; k is the width.
_SINGLE = (Tile(32, 16, 64, 4, 1), Tile(32, 32, 128, 8, 1), Tile(32, 16, 256, 8, 1))
_AMD = (
    (Tile(64, 32, 64, 4, 2), Tile(64, 32, 128, 4, 2), Tile(64, 32, 256, 8, 1)),
    (Tile(32, 32, 64, 4, 1), Tile(32, 32, 128, 4, 1), Tile(32, 16, 256, 4, 1)),
)
ATTENTION = {
    "sm_80": ((Tile(64, 64, 64, 4, 3), Tile(64, 64, 128, 8, 2), Tile(32, 32, 256, 8, 2)), _SINGLE),
    "sm_90": ((Tile(64, 64, 64, 4, 3), Tile(128, 64, 128, 8, 3), Tile(32, 32, 256, 8, 2)), _SINGLE),
    "sm_100": ((Tile(64, 64, 64, 4, 3), Tile(64, 64, 128, 8, 2), Tile(32, 32, 256, 8, 2)), _SINGLE),
    "gfx942": _AMD,
    "gfx950": _AMD,
    INTERPRETER: ((Tile(16, 16, 64, 4, 1), Tile(16, 16, 128, 4, 1), Tile(16, 16, 256, 4, 1)),) * 2,
}
SPLIT_TILES = 8  # key tiles of a split; few enough that a long decode is parallel, and no function of its length
INTERPRETER_SPLIT_TILES = 3


def attention_tile(device_class: str, width: int, dtype: torch.dtype) -> Tile:
    """The tile of attention over heads of `width` elements of dtype."""
    _require_dtype(dtype)
    return _by_width(ATTENTION[device_class][dtype == torch.float32], width)


# As ATTENTION, for the backward, whose tiles may be others.
_AMD_BACKWARD = (
    (Tile(32, 32, 64, 4, 2), Tile(32, 32, 128, 4, 1), Tile(16, 32, 256, 4, 1)),
    (Tile(16, 16, 64, 4, 1), Tile(16, 16, 128, 4, 1), Tile(16, 16, 256, 4, 1)),
)
_NVIDIA_BACKWARD = (
    (Tile(64, 64, 64, 4, 2), Tile(64, 64, 128, 8, 2), Tile(32, 32, 256, 8, 1)),
    (Tile(16, 16, 64, 4, 1), Tile(16, 16, 128, 4, 2), Tile(16, 16, 256, 8, 1)),
)
ATTENTION_BACKWARD = {
    "sm_80": (
        (Tile(32, 32, 64, 4, 2), Tile(64, 64, 128, 8, 1), Tile(32, 32, 256, 8, 1)),
        (Tile(16, 16, 64, 4, 1), Tile(16, 16, 128, 4, 1), Tile(16, 16, 256, 8, 1)),
    ),
    "sm_90": _NVIDIA_BACKWARD,
    "sm_100": _NVIDIA_BACKWARD,
    "gfx942": _AMD_BACKWARD,
    "gfx950": _AMD_BACKWARD,
    INTERPRETER: ATTENTION[INTERPRETER],
}


def attention_backward_tile(device_class: str, width: int, dtype: torch.dtype) -> Tile:
    """The tile of the gradient of attention over heads of `width` elements of dtype."""
    return _by_width(ATTENTION_BACKWARD[device_class][dtype == torch.float32], width)


def _by_width(tiles: tuple[Tile, ...], width: int) -> Tile:
    if width % 8 or not 16 <= width <= 256:  # eight 16-bit elements are 16 bytes, where values must start in a cache
        raise ValueError(f"head_dim must be a multiple of 8 in 16 to 256, got {width}")
    return next(tile for tile in tiles if width <= tile.k)


def split_keys(device_class: str, tile: Tile) -> int:
    return tile.n * (INTERPRETER_SPLIT_TILES if device_class == INTERPRETER else SPLIT_TILES)
