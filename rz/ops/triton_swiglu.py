"""The gated activation by Triton kernels."""

import torch
from torch import Tensor

from rz.kernels import swiglu as kernels
from rz.ops.launch import Launch, aligned, cdiv, opaque

BLOCK = 1024


def forward_launch(gate_up: Tensor, out: Tensor) -> Launch:
    """gate_up [N, 2 I], out [N, I]."""
    rows, width = out.shape
    return Launch(
        kernel=kernels.swiglu,
        grid=(rows, cdiv(width, BLOCK)),
        arguments={"gate_up": gate_up, "out": out, "rows": rows},
        constants={"WIDTH": width, "BLOCK": BLOCK},
        warps=4,
        stages=1,
    )


def backward_launch(grad: Tensor, gate_up: Tensor, out: Tensor) -> Launch:
    """grad [N, I], gate_up and out [N, 2 I]."""
    rows, width = grad.shape
    return Launch(
        kernel=kernels.swiglu_backward,
        grid=(rows, cdiv(width, BLOCK)),
        arguments={"grad": grad, "gate_up": gate_up, "out": out, "rows": rows},
        constants={"WIDTH": width, "BLOCK": BLOCK},
        warps=4,
        stages=1,
    )


def _backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate_up = aligned(gate_up)
    out = torch.empty_like(gate_up)
    backward_launch(aligned(grad).flatten(0, -2), gate_up.flatten(0, -2), out.flatten(0, -2)).run()
    return out


class SwiGlu(torch.autograd.Function):
    """gate_up [..., 2 I] -> [..., I]."""

    @staticmethod
    def forward(gate_up: Tensor) -> Tensor:
        gate_up = aligned(gate_up)
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        forward_launch(gate_up.flatten(0, -2), out.flatten(0, -2)).run()
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return opaque(_backward, grad, *ctx.saved_tensors)
