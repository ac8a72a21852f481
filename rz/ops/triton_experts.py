"""The expert products of rz.ops.experts by Triton kernels."""

import torch
from torch import Tensor

from rz.kernels import experts as kernels
from rz.ops.device import device_class
from rz.ops.experts import ExpertOrder
from rz.ops.launch import Launch, aligned, cdiv, opaque
from rz.ops.segments import segment_tiles
from rz.ops.tiles import gemm_tile

BLOCK = 1024


def product_launch(
    x: Tensor,
    source: Tensor | None,
    weight: Tensor,
    ends: Tensor,
    tiles: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    transposed: bool,
    target: str,
) -> Launch:
    """out [R, M] of x [*, K] and weight [experts, M, K], transposed: [experts, K, M]. tiles from segment_tiles."""
    columns, inner = out.shape[1], x.shape[1]
    tile = gemm_tile(target, columns, inner, x.dtype)
    return Launch(
        kernel=kernels.grouped_gemm,
        grid=(tiles[0].shape[0], cdiv(columns, tile.n)),
        arguments={
            "x": x,
            "source": source,
            "weight": weight,
            "ends": ends,
            "tile_experts": tiles[0],
            "tile_starts": tiles[1],
            "out": out,
            "experts": weight.shape[0],
        },
        constants={
            "COLUMNS": columns,
            "INNER": inner,
            "B_COLUMN": 1 if transposed else inner,
            "B_INNER": columns if transposed else 1,
            "EVEN": inner % tile.k == 0,
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def outer_launch(grad: Tensor, x: Tensor, ends: Tensor, out: Tensor, *, target: str) -> Launch:
    """out [experts, M, K] of grad [R, M] and x [R, K]."""
    experts, rows, columns = out.shape
    tile = gemm_tile(target, columns, rows, x.dtype)
    return Launch(
        kernel=kernels.grouped_outer,
        grid=(experts, cdiv(rows, tile.m), cdiv(columns, tile.n)),
        arguments={"grad": grad, "x": x, "ends": ends, "out": out},
        constants={"ROWS": rows, "COLUMNS": columns, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k},
        warps=tile.warps,
        stages=tile.stages,
    )


def combine_launch(y: Tensor, places: Tensor, gates: Tensor | None, out: Tensor) -> Launch:
    """out [N, M] of y [R, M], places [N, k] and gates [N, k]."""
    tokens, width = out.shape
    return Launch(
        kernel=kernels.combine_slots,
        grid=(tokens, cdiv(width, BLOCK)),
        arguments={"y": y, "places": places, "gates": gates, "out": out},
        constants={"SLOTS": places.shape[1], "WIDTH": width, "BLOCK": BLOCK},
        warps=4,
        stages=1,
    )


def _product(x: Tensor, source: Tensor | None, weight: Tensor, ends: Tensor, rows: int, transposed: bool) -> Tensor:
    out = torch.empty(rows, weight.shape[2 if transposed else 1], dtype=x.dtype, device=x.device)
    target = device_class(x.device)
    tile = gemm_tile(target, out.shape[1], x.shape[1], x.dtype)
    tiles = segment_tiles(ends.diff(prepend=ends.new_zeros(1)), rows, tile.m)
    x, weight = aligned(x), aligned(weight)
    product_launch(x, source, weight, ends, tiles, out, transposed=transposed, target=target).run()
    return out


def _combine(y: Tensor, places: Tensor, gates: Tensor | None) -> Tensor:
    out = torch.empty(places.shape[0], y.shape[1], dtype=y.dtype, device=y.device)
    combine_launch(aligned(y), aligned(places), None if gates is None else aligned(gates), out).run()
    return out


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, tokens: Tensor, places: Tensor, ends: Tensor, by_token: bool
) -> tuple[Tensor, Tensor]:
    to_x = _product(grad, None, weight, ends, len(tokens), True)
    if by_token:
        to_x, x = _combine(to_x, places, None), x[tokens]
    to_weight = torch.empty_like(weight)
    outer_launch(aligned(grad), aligned(x), ends, to_weight, target=device_class(x.device)).run()
    return to_x, to_weight


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, tokens: Tensor, places: Tensor, ends: Tensor, by_token: bool) -> Tensor:
        return _product(x, aligned(tokens) if by_token else None, weight, ends, len(tokens), False)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        *tensors, ctx.by_token = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return *opaque(_backward, grad, *ctx.saved_tensors, ctx.by_token), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, gates: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        return _combine(y, places, gates)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor):
        y, gates, tokens, places = ctx.saved_tensors
        grad = grad.float()
        gate_of_row = torch.empty_like(gates).flatten().scatter(0, places.flatten(), gates.flatten())
        to_y = (gate_of_row[:, None] * grad[tokens]).to(y.dtype)
        to_gates = torch.stack([(grad * y[place].float()).sum(-1) for place in places.unbind(1)], 1)
        return to_y, to_gates, None, None


def grouped_linear(x: Tensor, weight: Tensor, order: ExpertOrder, *, by_token: bool) -> Tensor:
    """As rz.ops.experts.grouped_linear."""
    return _GroupedLinear.apply(x, weight, order.tokens, order.places, order.ends, by_token)


def combine_experts(y: Tensor, gates: Tensor, order: ExpertOrder) -> Tensor:
    """As rz.ops.experts.combine_experts."""
    return _Combine.apply(y, gates, order.tokens, order.places)
