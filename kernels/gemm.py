"""Matrix product whose sum over the inner dimension runs in one order, whatever the number of rows."""

import triton
import triton.language as tl
from rz.kernels.numbers import dot, narrow


@triton.jit
def tile_place(tile, rows, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, column tile) of a program; GROUP row tiles share the weights that they read."""
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(COLUMNS, BLOCK_N)
    first = tile // (GROUP * column_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    inside = tile % (GROUP * column_tiles)
    return first + inside % size, inside // size


@triton.jit
def tile_product(
    a_rows,  # [BLOCK_M] pointers to the first element of each row
    row_mask,
    b_columns,  # [BLOCK_N] pointers to the first element of each column
    column_mask,
    inner,
    A_INNER: tl.constexpr,
    B_INNER: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] float32: inner tiles are added in ascending order."""
    k = tl.arange(0, BLOCK_K)
    a = a_rows[:, None] + k[None, :] * A_INNER
    b = b_columns[None, :] + k[:, None] * B_INNER
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        a_mask, b_mask = row_mask[:, None], column_mask[None, :]
        if not EVEN:
            a_mask = a_mask & (k[None, :] < inner - start)
            b_mask = b_mask & (k[:, None] < inner - start)
        total = dot(tl.load(a, mask=a_mask, other=0.0), tl.load(b, mask=b_mask, other=0.0), total)
        a += BLOCK_K * A_INNER
        b += BLOCK_K * B_INNER
    return total


@triton.jit(do_not_specialize=["rows", "inner"])
def gemm(
    a,  # a[i, k] at a + i * A_ROW + k * A_INNER
    b,  # b[k, j] at b + j * B_COLUMN + k * B_INNER
    bias,  # [COLUMNS] or None
    out,  # [rows, COLUMNS]
    rows,
    inner,
    ROWS: tl.constexpr,  # rows where they are a size of the model, 0 where they are a number of tokens
    INNER: tl.constexpr,  # inner likewise
    COLUMNS: tl.constexpr,
    A_ROW: tl.constexpr,
    A_INNER: tl.constexpr,
    B_COLUMN: tl.constexpr,
    B_INNER: tl.constexpr,
    EVEN: tl.constexpr,  # inner is a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out = a @ b + bias, rounded once to the dtype of out."""
    if ROWS:
        rows = ROWS
    if INNER:
        inner = INNER
    row_tile, column_tile = tile_place(tl.program_id(0), rows, COLUMNS, BLOCK_M, BLOCK_N, GROUP)
    i = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    j = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, column_mask = i < rows, j < COLUMNS
    total = tile_product(
        a + i.to(tl.int64) * A_ROW,
        row_mask,
        b + j.to(tl.int64) * B_COLUMN,
        column_mask,
        inner,
        A_INNER,
        B_INNER,
        EVEN,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if bias is not None:
        total += tl.load(bias + j, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    place = out + i.to(tl.int64)[:, None] * COLUMNS + j[None, :]
    tl.store(place, narrow(total, out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])
