"""Root-mean-square normalisation, alone and after a residual sum. A row lies in one program."""

import triton
import triton.language as tl
from rz.kernels.numbers import narrow


@triton.jit(do_not_specialize=["rows"])
def rms_norm(
    x,  # [rows, WIDTH]
    residual,  # [rows, WIDTH] or None
    weight,  # [WIDTH]
    total,  # [rows, WIDTH] or None: residual + x, rounded
    out,  # [rows, WIDTH]
    scale,  # [rows] float32: 1 / root of the mean square
    rows,
    EPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    dtype: tl.constexpr = out.dtype.element_ty
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    mask = (i < rows)[:, None] & (e < WIDTH)[None, :]
    place = i.to(tl.int64)[:, None] * WIDTH + e[None, :]
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        rounded = narrow(value, dtype)
        tl.store(total + place, rounded, mask=mask)
        value = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + EPS)
    normed = narrow(value * inverse[:, None], dtype).to(tl.float32)
    factor = tl.load(weight + e, mask=e < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + place, narrow(normed * factor[None, :], dtype), mask=mask)
    tl.store(scale + i, inverse, mask=i < rows)


@triton.jit(do_not_specialize=["rows", "steps"])
def rms_norm_backward(
    grad,  # [rows, WIDTH]
    x,  # [rows, WIDTH], what was normalised
    weight,  # [WIDTH]
    scale,  # [rows] float32
    more,  # [rows, WIDTH] or None: the gradient that reaches x past the norm
    to_x,  # [rows, WIDTH]
    to_weight,  # [programs, WIDTH] float32, one part a program
    rows,
    steps,  # blocks of rows that a program visits
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    e = tl.arange(0, BLOCK_E)
    factor = tl.load(weight + e, mask=e < WIDTH, other=0.0).to(tl.float32)
    part = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for step in range(steps):
        i = (tl.program_id(0) * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (i < rows)[:, None] & (e < WIDTH)[None, :]
        place = i.to(tl.int64)[:, None] * WIDTH + e[None, :]
        inverse = tl.load(scale + i, mask=i < rows, other=0.0)
        above = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * inverse[:, None]
        scaled = above * factor[None, :]
        mean = tl.sum(scaled * normed, 1) / WIDTH
        value = inverse[:, None] * (scaled - normed * mean[:, None])
        if more is not None:
            value += tl.load(more + place, mask=mask, other=0.0).to(tl.float32)
        tl.store(to_x + place, narrow(value, to_x.dtype.element_ty), mask=mask)
        part += tl.sum(above * normed, 0)
    tl.store(to_weight + tl.program_id(0).to(tl.int64) * WIDTH + e, part, mask=e < WIDTH)
