"""Float formats inside kernels.

Triton's interpreter is wrong for bfloat16 arithmetic and truncates float32 to bfloat16. There products are taken of
float32 operands, which is the same product, and rounding is done on integer bits.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOWEST = tl.constexpr(-3.0e38)  # stands for the maximum of no scores


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 rounded to dtype, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def dot(a, b, accumulator):
    """accumulator + a @ b in float32, never TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def is_seen(distance, WINDOW: tl.constexpr):
    """Whether a query sees a key `distance` positions before it; WINDOW latest keys, the own included, 0 = all."""
    if WINDOW:
        return distance.to(tl.uint32, bitcast=True) < WINDOW  # one comparison: a negative distance is a large number
    return distance >= 0


@triton.jit
def fold(top, total, out, other_top, other_total, other_out):
    """Two partial softmax results in this order. The sums are written as fma, so that every caller has these bits."""
    new = tl.maximum(top, other_top)
    keep, add = tl.exp(top - new), tl.exp(other_top - new)
    total = tl.fma(other_total, add, total * keep)
    out = tl.fma(other_out, add[:, None], out * keep[:, None])
    return new, total, out
