"""Root-mean-square normalisation, alone and after a residual sum."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rz.ops import device
from rz.ops.chunks import row_chunks, scratch
from rz.ops.function import apply


def _rows(x: Tensor | None) -> Tensor | None:
    """x with an axis of rows: itself, unless it has one axis."""
    return x if x is None or x.ndim > 1 else x[None]


class _RmsNorm(torch.autograd.Function):
    """(x, residual or None, weight, eps) -> (normed, residual + x or None, 1 / root mean square)."""

    @staticmethod
    def forward(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None, Tensor]:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = None if residual is None else torch.empty_like(out)
        scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        rows, more, sums, results, roots = map(_rows, (x, residual, total, out, scale))
        for part in row_chunks(len(rows), math.prod(rows.shape[1:])):
            value, target = rows[part], results[part]
            if total is not None:
                value = torch.add(more[part], value, out=sums[part])
            wide = value.float()
            # A mean over strided memory would take another order.
            square = torch.mul(wide, wide, out=scratch(target)).contiguous()
            root = torch.mean(square, -1, keepdim=True, out=roots[part]).add_(eps).rsqrt_()
            torch.mul(wide, root, out=target).mul_(weight.to(x.dtype))
        return out, total, scale

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, _, weight, _ = inputs
        _, total, scale = output
        ctx.save_for_backward(x if total is None else total, weight, scale)
        ctx.mark_non_differentiable(scale)
        ctx.set_materialize_grads(False)
        ctx.has_residual = total is not None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, of_total: Tensor | None, _):
        if grad is None:  # only the sum was used
            return of_total, of_total, None, None
        x, weight, scale = ctx.saved_tensors
        width, wide_weight = x.shape[-1], weight.float()
        to_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        to_weight = torch.zeros_like(wide_weight)
        rows, above, more, roots, results = map(_rows, (x, grad, of_total, scale, to_x))
        for part in row_chunks(len(rows), math.prod(rows.shape[1:])):
            value, up, root, target = rows[part].float(), above[part].float(), roots[part], results[part]
            both = torch.mul(value, up, out=scratch(target)).contiguous()
            if weight.ndim == 1:
                flat = both.view(-1, width)
                to_weight.addmv_(flat.t(), root.flatten())
                pull = torch.mv(flat, wide_weight).view(root.shape)
            else:
                to_weight += (both * root).sum(0)
                pull = (both * wide_weight).sum(-1, keepdim=True)
            pull.mul_(root**3 / -width)
            torch.addcmul(torch.mul(up, wide_weight, out=both).mul_(root), value, pull, out=target)
            if more is not None:
                target.add_(more[part])
        return to_x, to_x if ctx.has_residual else None, to_weight.to(weight.dtype), None


def _check_weight(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [{x.shape[-1]}], got {list(weight.shape)}")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight must be {x.dtype}, got {weight.dtype}")


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """weight * (x / sqrt(mean(x^2) + eps)) over the last axis.

    Rounding: mean, root and division in float32; the quotient is rounded to the dtype of x before the weight multiplies
    it, as in the Llama and Qwen reference models.

    Args:
        x: [..., E] float32, bfloat16 or float16.
        weight: [E] in the dtype of x.
        eps: > 0, added to the mean square.
    Returns: [..., E] in the dtype of x.
    Gradient: to x and weight, in float32, rounded once; not differentiable again.
    Edge cases: a row of zeros gives zeros.
    Raises: ValueError if weight is not [E], TypeError if its dtype is not that of x.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    _check_weight(x, weight)
    if device.has_kernels(x):
        from rz.ops import triton_rms_norm

        return triton_rms_norm.RmsNorm.apply(x, weight, eps)[0]
    return apply(_RmsNorm, x, None, weight, eps)[0]


def head_rms_norm(x: Tensor, weights: Sequence[Tensor], counts: Sequence[int], *, eps: float) -> Tensor:
    """rms_norm of runs of heads, each run with a weight of its own, as one operation.

    Args:
        x: [N, H, D] float32, bfloat16 or float16, such as queries beside keys.
        weights: one [D] a run, in the dtype of x.
        counts: heads of each run; their sum is H.
        eps: as in rms_norm.
    Returns: [N, H, D] in the dtype of x, with the bits of rms_norm of each run.
    Gradient: to x and weights, in float32, rounded once; not differentiable again.
    Raises: ValueError if counts do not sum to H or are not one a weight; otherwise as rms_norm.
    """
    if x.ndim != 3 or sum(counts) != x.shape[1] or len(counts) != len(weights):
        rule = f"counts must be one a weight ({len(weights)}) and sum to the heads of x {list(x.shape)}"
        raise ValueError(f"{rule}, got {list(counts)}")
    for weight in weights:
        _check_weight(x, weight)
    if device.has_kernels(x):
        runs = zip(x.split(list(counts), 1), weights, strict=True)
        return torch.cat([rms_norm(run, weight, eps=eps) for run, weight in runs], 1)
    # In float32: the gradient of a weight is the sum over its heads.
    every = torch.cat([weight.float().expand(count, -1) for weight, count in zip(weights, counts, strict=True)])
    return apply(_RmsNorm, x, None, every, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """The residual form: sum = residual + x, rounded to their dtype; returns (rms_norm(sum), sum).

    Args:
        x, residual: [..., E], same dtype.
        weight, eps: as in rms_norm.
    Returns: two tensors [..., E] in the dtype of x.
    Gradient: to x, residual and weight; not differentiable again.
    Raises: ValueError if x and residual differ in shape, TypeError if in dtype; otherwise as rms_norm.
    """
    if x.shape != residual.shape:
        raise ValueError(f"residual must have the shape of x {list(x.shape)}, got {list(residual.shape)}")
    if x.dtype != residual.dtype:
        raise TypeError(f"residual must be {x.dtype}, got {residual.dtype}")
    _check_weight(x, weight)
    if device.has_kernels(x):
        from rz.ops import triton_rms_norm

        return triton_rms_norm.AddRmsNorm.apply(x, residual, weight, eps)[:2]
    return apply(_RmsNorm, x, residual, weight, eps)[:2]
