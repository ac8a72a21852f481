"""The matrix product of rz.ops.linear by Triton kernel, and its gradients by the same kernel."""

import torch
from torch import Tensor

from rz.kernels.gemm import gemm
from rz.ops.device import device_class
from rz.ops.launch import Launch, aligned, cdiv, opaque
from rz.ops.tiles import GEMM_GROUP, gemm_tile


def gemm_launch(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    target: str,
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> Launch:
    """out [N, M] = a @ b.T + bias.

    Args:
        a: [N, K]; with a_transposed [K, N], N being a size of the model then.
        b: [M, K]; with b_transposed [K, M].
        target: a device class of rz.ops.tiles.
    """
    rows, columns = out.shape
    inner = a.shape[0 if a_transposed else 1]
    tile = gemm_tile(target, columns, inner, a.dtype)
    return Launch(
        kernel=gemm,
        grid=(cdiv(rows, tile.m) * cdiv(columns, tile.n),),
        arguments={"a": a, "b": b, "bias": bias, "out": out, "rows": rows, "inner": inner},
        constants={
            "ROWS": rows if a_transposed else 0,
            "INNER": 0 if a_transposed else inner,
            "COLUMNS": columns,
            "A_ROW": 1 if a_transposed else inner,
            "A_INNER": rows if a_transposed else 1,
            "B_COLUMN": 1 if b_transposed else inner,
            "B_INNER": columns if b_transposed else 1,
            "EVEN": inner % tile.k == 0,
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": tile.k,
            "GROUP": GEMM_GROUP,
        },
        warps=tile.warps,
        stages=tile.stages,
    )


def _run(a: Tensor, b: Tensor, bias: Tensor | None, shape: tuple[int, int], dtype: torch.dtype, **how: bool) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device=a.device)
    a, b, bias = aligned(a), aligned(b), None if bias is None else aligned(bias)
    gemm_launch(a, b, bias, out, target=device_class(a.device), **how).run()
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, K] @ weight [M, K].T + bias -> [N, M] in the dtype of x; taken in the dtype of weight."""
    return _run(x.to(weight.dtype), weight, bias, (x.shape[0], weight.shape[0]), x.dtype)


def product_to_x(grad: Tensor, weight: Tensor) -> Tensor:
    """grad [N, M] @ weight [M, K] -> [N, K], all of one dtype."""
    run = lambda grad, weight: _run(grad, weight, None, (grad.shape[0], weight.shape[1]), grad.dtype, b_transposed=True)
    return opaque(run, grad, weight)


def product_to_weight(grad: Tensor, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """grad [N, M].T @ x [N, K], of one dtype, -> [M, K] in dtype, or in theirs; zeros for N = 0."""
    run = lambda grad, x: _run(
        grad, x, None, (grad.shape[1], x.shape[1]), dtype or grad.dtype, a_transposed=True, b_transposed=True
    )
    return opaque(run, grad, x)
