"""The gated activation: silu(gate) * up, in float32, rounded once."""

import triton
import triton.language as tl
from rz.kernels.numbers import narrow


@triton.jit(do_not_specialize=["rows"])
def swiglu(
    gate_up,  # [rows, 2 * WIDTH]
    out,  # [rows, WIDTH]
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, mask=mask, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + i, narrow(value, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def swiglu_backward(
    grad,  # [rows, WIDTH]
    gate_up,  # [rows, 2 * WIDTH]
    out,  # [rows, 2 * WIDTH]
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < WIDTH
    above = tl.load(grad + row * WIDTH + i, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * 2 * WIDTH + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + i, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    to_gate = above * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + row * 2 * WIDTH + i, narrow(to_gate, dtype), mask=mask)
    tl.store(out + row * 2 * WIDTH + WIDTH + i, narrow(above * gate * sigmoid, dtype), mask=mask)
