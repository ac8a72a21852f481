"""The gated activation of the feed-forward layer."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rz.ops import device
from rz.ops.chunks import row_chunks, scratch
from rz.ops.function import apply


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(gate_up: Tensor) -> Tensor:
        rows, width = gate_up.flatten(0, -2), gate_up.shape[-1] // 2
        out = gate_up.new_empty((len(rows), width))
        for part in row_chunks(len(rows), width):
            gate, up = rows[part].chunk(2, -1)
            wide, target = gate.float(), out[part]
            # exp over contiguous memory: a strided half would end in a scalar tail with other bits.
            denominator = torch.neg(wide, out=scratch(target)).contiguous().exp_().add_(1)
            product = torch.div(wide, denominator, out=denominator).mul_(up)
            if target.dtype != torch.float32:
                target.copy_(product)
        return out.view(*gate_up.shape[:-1], width)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (gate_up,) = ctx.saved_tensors
        out = gate_up.new_empty(gate_up.shape)
        inputs, results, above = (x.flatten(0, -2) for x in (gate_up, out, grad))
        for part in row_chunks(len(inputs), above.shape[-1]):
            (gate, up), (to_gate, to_up), of_out = inputs[part].chunk(2, -1), results[part].chunk(2, -1), above[part]
            torch.mul(of_out, up, out=to_gate)
            torch.ops.aten.silu_backward.grad_input(to_gate, gate, grad_input=to_gate)
            torch.ops.aten.silu.out(gate, out=to_up).mul_(of_out)
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last axis and up the second.

    Computed in float32 as gate / (1 + exp(-gate)) * up and rounded once.

    Args:
        gate_up: [..., 2 I] float32, bfloat16 or float16, of two axes or more.
    Returns: [..., I] in the dtype of gate_up.
    Gradient: to gate_up, in its dtype throughout; not differentiable again.
    Edge cases: gate -> -inf gives -0 (exp(-gate) overflows to inf, gate / inf is -0 for finite gate).
    Raises: ValueError if the last axis is odd.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must have an even last axis, got {list(gate_up.shape)}")
    if device.has_kernels(gate_up):
        from rz.ops import triton_swiglu

        return triton_swiglu.SwiGlu.apply(gate_up)
    return apply(_SwiGlu, gate_up)
