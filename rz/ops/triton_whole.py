"""Attention over whole packed sequences by Triton kernels, with its gradient."""

import attrs
import torch
from torch import Tensor

from rz.kernels.attention_backward import attention_to_keys, attention_to_queries
from rz.ops.device import device_class
from rz.ops.launch import Launch, aligned, opaque
from rz.ops.tiles import attention_backward_tile
from rz.ops.triton_attention import KernelPlan, attention, whole_keys


def backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    plan: KernelPlan,
    tiles: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    outputs: tuple[Tensor, Tensor, Tensor],
    *,
    window: int | None,
    target: str,
) -> tuple[Launch, Launch]:
    """To queries, then to keys and values; tiles of query tokens and of keys, outputs like q, k and v."""
    _, heads, width = q.shape
    kv_heads = k.shape[1]
    tile = attention_backward_tile(target, width, q.dtype)
    shared = {
        "q": q,
        "k": k,
        "v": v,
        "grad": grad,
        "lse": lse,
        "delta": delta,
        "starts": plan.query_starts,
        "scale": width**-0.5,
        "sequences": plan.sequences,
    }
    constants = {
        "WINDOW": window or 0,
        "KV_HEADS": kv_heads,
        "HEAD_GROUP": heads // kv_heads,
        "WIDTH": width,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_D": max(16, 1 << (width - 1).bit_length()),
    }
    results = {"to_q": outputs[0]}, {"to_k": outputs[1], "to_v": outputs[2]}
    return tuple(
        Launch(
            kernel=kernel,
            grid=(places[0].shape[0], kv_heads),
            arguments=shared | result | {"tile_sequences": places[0], "tile_starts": places[1]},
            constants=constants,
            warps=tile.warps,
            stages=tile.stages,
        )
        for kernel, places, result in zip((attention_to_queries, attention_to_keys), tiles, results, strict=True)
    )


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    query_starts: Tensor,
    key_counts: Tensor,
    table: Tensor,
    plan: KernelPlan,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, and delta [N, H]."""
    plan = attrs.evolve(plan, query_starts=query_starts, key_counts=key_counts, table=table)
    q, k, v, grad = (aligned(x) for x in (q, k, v, grad))
    delta = (grad.float() * out.float()).sum(-1)
    outputs = tuple(torch.empty_like(x) for x in (q, k, v))
    target = device_class(q.device)
    tile = attention_backward_tile(target, q.shape[2], q.dtype)
    tiles = plan.tiles(tile.m // (q.shape[1] // k.shape[1])), plan.tiles(tile.n)
    for launch in backward_launches(q, k, v, grad, lse, delta, plan, tiles, outputs, window=window, target=target):
        launch.run()
    return *outputs, delta


class WholeAttention(torch.autograd.Function):
    """The tensors of the plan are arguments of their own: torch.func may have wrapped them."""

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        query_starts: Tensor,
        key_counts: Tensor,
        table: Tensor,
        plan: KernelPlan,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        plan = attrs.evolve(plan, query_starts=query_starts, key_counts=key_counts, table=table)
        return attention(q, whole_keys(k, v), k.shape[1], plan, window=window, sinks=sinks)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        q, k, v, sinks, *tensors, ctx.plan, ctx.window = inputs
        ctx.save_for_backward(q, k, v, sinks, *output, *tensors)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad: Tensor, _):
        q, k, v, sinks, out, lse, *tensors = ctx.saved_tensors
        *grads, delta = opaque(_backward, q, k, v, out, lse, grad, *tensors, ctx.plan, ctx.window)
        to_sinks = None if sinks is None else -((sinks - lse).exp() * delta).sum(0)
        return *grads, to_sinks, None, None, None, None, None


def whole_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: KernelPlan, *, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """rz.ops.triton_attention.attention over the packed tokens k and v [N, Hk, D], differentiable in all of them.

    Raises: as there; ValueError if k and v are not of the tokens and width of q, or a group of heads is larger than a
        tile of the gradient.
    """
    if k.shape != v.shape or (k.shape[0], k.shape[2]) != (q.shape[0], q.shape[2]):
        expected = f"[{q.shape[0]}, Hk, {q.shape[2]}]"
        raise ValueError(f"k and v must be {expected}, got {list(k.shape)} and {list(v.shape)}")
    (heads, width), kv_heads = q.shape[1:], k.shape[1]
    most = attention_backward_tile(device_class(q.device), width, q.dtype).m
    if heads > most * kv_heads > 0:
        raise ValueError(
            f"heads must be at most {most} times kv_heads {kv_heads} where a gradient is taken, got {heads}"
        )
    return WholeAttention.apply(q, k, v, sinks, plan.query_starts, plan.key_counts, plan.table, plan, window)[0]
