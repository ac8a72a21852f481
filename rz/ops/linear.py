"""Matrix product with a weight, aligned over rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rz.ops import device
from rz.ops.function import apply

MIN_ROWS = 16  # float32 GEMMs of fewer rows take another kernel, whose sums run in another order
MIN_OUTPUTS = 64  # GEMMs with few outputs depend on the row count, in float32 also on where the row lies in memory


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if device.has_kernels(x):
        from rz.ops import triton_linear

        return triton_linear.product(x, weight, bias)
    rows, outputs, narrow = x.shape[0], weight.shape[0], x.dtype
    if rows < MIN_ROWS:
        x = F.pad(x, (0, 0, 0, MIN_ROWS - rows))
    if outputs < MIN_OUTPUTS:
        weight = F.pad(weight, (0, 0, 0, MIN_OUTPUTS - outputs))
        bias = None if bias is None else F.pad(bias, (0, MIN_OUTPUTS - outputs))
    # Transposed operands take another kernel.
    x, weight = x.to(weight.dtype).contiguous(), weight.contiguous()
    bias = None if bias is None else bias.to(weight.dtype)
    return F.linear(x, weight, bias)[:rows, :outputs].to(narrow)


def product_to_x(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [N, M] @ weight [M, K], deterministic."""
    if device.has_kernels(grad):
        from rz.ops import triton_linear

        return triton_linear.product_to_x(grad, weight)
    return grad @ weight


def product_to_weight(grad: Tensor, x: Tensor) -> Tensor:
    """grad [N, M].T @ x [N, K], deterministic."""
    if device.has_kernels(grad):
        from rz.ops import triton_linear

        return triton_linear.product_to_weight(grad, x)
    return grad.t() @ x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _product(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, bias = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        wide = grad.to(weight.dtype)
        to_x = product_to_x(wide, weight).to(x.dtype) if ctx.needs_input_grad[0] else None
        to_weight = product_to_weight(wide, x.to(weight.dtype)) if ctx.needs_input_grad[1] else None
        to_bias = wide.float().sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return to_x, to_weight, to_bias


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, where the bits of row i are a function of x[i], weight and bias alone.

    Shapes: N rows, K inputs, M outputs.
    Args:
        x: [N, K] float32, bfloat16 or float16, N >= 0.
        weight: [M, K] in the dtype of x; or float32 beside a narrower x, whose product is then taken in float32 and
            rounded once (for processors without bfloat16 arithmetic, see rz.models.compute).
        bias: [M] in the dtype of x or of weight, or None. It is added before the product is rounded.
    Returns: [N, M] in the dtype of x.
    Gradient: to x, weight and bias; not aligned, but the same from run to run.
    Edge cases: N = 0 gives [0, M].
    Raises: ValueError if shapes disagree, TypeError if dtypes do.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [N, K] and weight [M, K], got {list(x.shape)} and {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {list(bias.shape)}")
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"weight must be {x.dtype} or torch.float32, got {weight.dtype}")
    if bias is not None and bias.dtype not in (x.dtype, weight.dtype):
        raise TypeError(f"bias must be {x.dtype} or {weight.dtype}, got {bias.dtype}")
    return apply(_Linear, x, weight, bias)
