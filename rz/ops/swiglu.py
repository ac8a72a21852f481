"""The gated activation of the feed-forward layer."""

import torch
from torch import Tensor

from rz.ops import device


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(gate_up: Tensor) -> Tensor:
        gate, up = (half.float() for half in gate_up.chunk(2, -1))
        # exp over contiguous memory: a strided half would end in a scalar tail with other bits.
        denominator = gate.contiguous().neg().exp_().add_(1)
        return (gate / denominator).mul_(up).to(gate_up.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (gate_up,) = ctx.saved_tensors
        gate, up = (half.float() for half in gate_up.chunk(2, -1))
        grad = grad.float()
        sigmoid = torch.sigmoid(gate)
        to_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((to_gate, grad * gate * sigmoid), -1).to(gate_up.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last axis and up the second.

    Computed in float32 as gate / (1 + exp(-gate)) * up and rounded once.

    Args:
        gate_up: [N, 2 I] float32, bfloat16 or float16.
    Returns: [N, I] in the dtype of gate_up.
    Gradient: to gate_up.
    Edge cases: gate -> -inf gives -0 (exp(-gate) overflows to inf, gate / inf is -0 for finite gate).
    Raises: ValueError if the last axis is odd.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even last axis, got {list(gate_up.shape)}")
    if device.has_kernels(gate_up):
        from rz.ops import triton_swiglu

        return triton_swiglu.SwiGlu.apply(gate_up)
    return _SwiGlu.apply(gate_up)
