"""Products of rows that are sorted by expert, and their sum over the experts of a token, without atomics."""

import triton
import triton.language as tl
from rz.kernels.gemm import tile_product
from rz.kernels.numbers import narrow


@triton.jit(do_not_specialize=["experts"])
def grouped_gemm(
    x,  # rows of INNER elements
    source,  # [rows] int64: which row of x each row multiplies; None = its own
    weight,  # [experts, COLUMNS, INNER], or [experts, INNER, COLUMNS] with B_COLUMN = 1
    ends,  # [experts] int32: where the rows of each expert end
    tile_experts,  # [tiles] int32: see rz.ops.segments
    tile_starts,  # [experts] int32
    out,  # [rows, COLUMNS]
    experts,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    B_COLUMN: tl.constexpr,
    B_INNER: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Row r of out = x[source[r]] @ the weight of its expert, rounded once."""
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile)
    if expert >= experts:
        return
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    i = begin + (tile - tl.load(tile_starts + expert)) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = i < tl.load(ends + expert), j < COLUMNS
    row = i.to(tl.int64)
    if source is not None:
        row = tl.load(source + i, mask=row_mask, other=0)
    total = tile_product(
        x + row * INNER,
        row_mask,
        weight + expert.to(tl.int64) * (COLUMNS * INNER) + j.to(tl.int64) * B_COLUMN,
        column_mask,
        INNER,
        1,
        B_INNER,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    place = out + i.to(tl.int64)[:, None] * COLUMNS + j[None, :]
    tl.store(place, narrow(total, out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def grouped_outer(
    grad,  # [rows, ROWS]
    x,  # [rows, COLUMNS]
    ends,  # [experts] int32
    out,  # [experts, ROWS, COLUMNS]
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out of each expert = grad.T @ x over its rows, in their order; zeros for an expert without rows."""
    expert = tl.program_id(0)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    i = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tile_product(
        grad + begin.to(tl.int64) * ROWS + i,
        i < ROWS,
        x + begin.to(tl.int64) * COLUMNS + j,
        j < COLUMNS,
        tl.load(ends + expert) - begin,
        ROWS,
        COLUMNS,
        False,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    place = out + expert.to(tl.int64) * (ROWS * COLUMNS) + i.to(tl.int64)[:, None] * COLUMNS + j[None, :]
    tl.store(place, narrow(total, out.dtype.element_ty), mask=(i < ROWS)[:, None] & (j < COLUMNS)[None, :])


@triton.jit
def combine_slots(
    y,  # rows of WIDTH elements, in expert order
    places,  # [tokens, SLOTS] int64: the row of each slot of a token
    gates,  # [tokens, SLOTS] float32, or None = 1
    out,  # [tokens, WIDTH]
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of gate * row over the slots of a token, in slot order, in float32, rounded once."""
    token = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(SLOTS):
        row = tl.load(places + token * SLOTS + slot)
        value = tl.load(y + row * WIDTH + j, mask=j < WIDTH, other=0.0).to(tl.float32)
        if gates is not None:
            value = value * tl.load(gates + token * SLOTS + slot)
        total = total + value
    tl.store(out + token * WIDTH + j, narrow(total, out.dtype.element_ty), mask=j < WIDTH)
