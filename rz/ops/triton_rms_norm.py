"""RMSNorm by Triton kernels, alone and after a residual sum."""

import torch
from torch import Tensor

from rz.kernels import rms_norm as kernels
from rz.ops.launch import Launch, aligned, cdiv, opaque
from rz.ops.tiles import row_block

PROGRAMS = 256  # of the backward at most, each with one part of the weight's gradient


def forward_launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, scale: Tensor, *, eps: float
) -> Launch:
    """All [rows, E] but weight [E] and scale [rows]."""
    rows, width = x.shape
    block, padded, warps = row_block(width)
    return Launch(
        kernel=kernels.rms_norm,
        grid=(cdiv(rows, block),),
        arguments={
            "x": x,
            "residual": residual,
            "weight": weight,
            "total": total,
            "out": out,
            "scale": scale,
            "rows": rows,
        },
        constants={"EPS": eps, "WIDTH": width, "BLOCK_M": block, "BLOCK_E": padded},
        warps=warps,
        stages=1,
    )


def backward_launch(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, more: Tensor | None, to_x: Tensor, to_weight: Tensor
) -> Launch:
    """to_weight [programs, E] float32 gets one part a program; the rest as in the forward."""
    rows, width = x.shape
    block, padded, warps = row_block(width)
    return Launch(
        kernel=kernels.rms_norm_backward,
        grid=(to_weight.shape[0],),
        arguments={
            "grad": grad,
            "x": x,
            "weight": weight,
            "scale": scale,
            "more": more,
            "to_x": to_x,
            "to_weight": to_weight,
            "rows": rows,
            "steps": cdiv(cdiv(rows, block), to_weight.shape[0]),
        },
        constants={"WIDTH": width, "BLOCK_M": block, "BLOCK_E": padded},
        warps=warps,
        stages=1,
    )


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None, Tensor]:
    shape, width = x.shape, x.shape[-1]
    x, weight = aligned(x.reshape(-1, width)), aligned(weight)
    residual = None if residual is None else aligned(residual)
    total = None if residual is None else torch.empty_like(x)
    out, scale = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    forward_launch(x, residual, weight, total, out, scale, eps=eps).run()
    return out.view(shape), None if total is None else total.view(shape), scale


def _backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
    shape, width = x.shape, x.shape[-1]
    grad, x = (aligned(value.reshape(-1, width)) for value in (grad, x))
    more = None if more is None else aligned(more.reshape(-1, width))
    to_x = torch.empty_like(x)
    programs = max(1, min(PROGRAMS, cdiv(x.shape[0], row_block(width)[0])))
    parts = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    backward_launch(grad, x, aligned(weight), scale, more, to_x, parts).run()
    return to_x.view(shape), parts.sum(0).to(weight.dtype)


class RmsNorm(torch.autograd.Function):
    """(x [..., E], weight, eps) -> (normed, 1 / root mean square of each row)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, _, scale = _forward(x, None, weight, eps)
        return out, scale

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        x, weight, scale = ctx.saved_tensors
        return *opaque(_backward, grad, x, weight, scale, None), None


class AddRmsNorm(torch.autograd.Function):
    """(x [..., E], residual, weight, eps) -> (normed, residual + x, 1 / root mean square of each row)."""

    @staticmethod
    def forward(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(x, residual, weight, eps)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        _, _, weight, _ = inputs
        ctx.save_for_backward(output[1], weight, output[2])
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx, grad: Tensor, more: Tensor, _):
        total, weight, scale = ctx.saved_tensors
        to_total, to_weight = opaque(_backward, grad, total, weight, scale, more)
        return to_total, to_total, to_weight, None
