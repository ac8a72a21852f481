"""Log-softmax of tempered logits: its two numbers a row, then any of its entries, and its gradient."""

import triton
import triton.language as tl
from rz.kernels.numbers import LOWEST, narrow


@triton.jit
def tempered(logits, temperature, mask):
    return tl.div_rn(tl.load(logits, mask=mask, other=float("-inf")).to(tl.float32), temperature)


@triton.jit
def row_statistics(
    logits,  # [rows, COLUMNS]
    temperatures,  # [rows] float32
    tops,  # [rows] float32
    logs,  # [rows] float32
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The maximum of a row, and the logarithm of the sum of exponents above it; blocks in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top = tl.load(temperatures + row) * 0.0 + LOWEST
    total = top * 0.0
    for start in range(0, COLUMNS, BLOCK):
        j = start + tl.arange(0, BLOCK)
        value = tempered(logits + row * COLUMNS + j, temperature, j < COLUMNS)
        new = tl.maximum(top, tl.max(value, 0))
        total = tl.fma(total, tl.exp(top - new), tl.sum(tl.exp(value - new), 0))
        top = new
    tl.store(tops + row, top)
    tl.store(logs + row, tl.log(total))


@triton.jit
def row_logprobs(
    logits,
    temperatures,
    tops,
    logs,
    out,  # [rows, COLUMNS] float32
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tempered(logits + row * COLUMNS + j, tl.load(temperatures + row), j < COLUMNS)
    tl.store(out + row * COLUMNS + j, value - tl.load(tops + row) - tl.load(logs + row), mask=j < COLUMNS)


@triton.jit(do_not_specialize=["rows"])
def target_logprobs(
    logits,
    temperatures,
    tops,
    logs,
    targets,  # [rows] int64
    out,  # [rows] float32
    rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same differences as in row_logprobs, so the same bits; -inf for a target outside [0, COLUMNS)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    target = tl.load(targets + row, mask=mask, other=0)
    inside = mask & (target >= 0) & (target < COLUMNS)
    value = tempered(logits + row * COLUMNS + target, tl.load(temperatures + row, mask=mask, other=1.0), inside)
    top, log = tl.load(tops + row, mask=mask, other=0.0), tl.load(logs + row, mask=mask, other=0.0)
    tl.store(out + row, value - top - log, mask=mask)


@triton.jit
def logits_gradient(
    logits,
    temperatures,
    tops,
    logs,
    targets,
    grad,  # [rows] float32, of the target's logprob
    out,  # like logits, or logits itself
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    value = tempered(logits + row * COLUMNS + j, temperature, j < COLUMNS)
    probability = tl.exp(value - tl.load(tops + row) - tl.load(logs + row))
    chosen = tl.where(j == tl.load(targets + row), 1.0, 0.0)
    result = (chosen - probability) * tl.div_rn(tl.load(grad + row), temperature)
    tl.store(out + row * COLUMNS + j, narrow(result, out.dtype.element_ty), mask=j < COLUMNS)
