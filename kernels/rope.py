"""Rotary position embedding; the gradient is the rotation by the opposite angle."""

import triton
import triton.language as tl
from rz.kernels.numbers import narrow


@triton.jit(do_not_specialize=["rows"])
def rope(
    x,  # [rows, HEADS, 2 * HALF]
    cos,  # [rows, HALF] float32
    sin,  # [rows, HALF] float32
    out,  # like x
    rows,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, head, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside = d < HALF
    c = tl.load(cos + row * HALF + d, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + d, mask=inside, other=0.0)[None, :]
    if BACKWARD:
        s = -s
    place = row * (HEADS * 2 * HALF) + head[:, None] * (2 * HALF) + d[None, :]
    mask = (head < HEADS)[:, None] & inside[None, :]
    first = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + place + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, narrow(first * c - second * s, out.dtype.element_ty), mask=mask)
    tl.store(out + place + HALF, narrow(second * c + first * s, out.dtype.element_ty), mask=mask)
