"""Products with the weights of a token's experts, and their sum."""

import attrs
import torch
from torch import Tensor

from rz.ops import device
from rz.ops.linear import linear


@attrs.frozen(kw_only=True, eq=False)
class ExpertOrder:
    """Rows (token, slot) sorted by expert, then token. N tokens, k slots, R = N k rows.

    Args:
        tokens: [R] int64, the token of each row.
        places: [N, k] int64, the row of each slot of a token.
        ends: [experts] int32, where the rows of each expert end.
    """

    tokens: Tensor
    places: Tensor
    ends: Tensor


def expert_order(experts: Tensor, *, count: int) -> ExpertOrder:
    """The order of the rows of a layer.

    Args:
        experts: [N, k] int64 in [0, count), the experts of each token, distinct.
        count: of experts.
    """
    order = torch.sort(experts.flatten(), stable=True)
    places = torch.empty_like(order.indices)
    places[order.indices] = torch.arange(len(places), device=places.device)
    boundaries = torch.arange(count, device=places.device)
    return ExpertOrder(
        tokens=order.indices // experts.shape[1],
        places=places.view(experts.shape),
        ends=torch.searchsorted(order.values, boundaries, right=True, out_int32=True),
    )


def grouped_linear(x: Tensor, weight: Tensor, order: ExpertOrder, *, by_token: bool) -> Tensor:
    """Each row times the weight of its expert: bits of a row are a function of that row and weight alone.

    Shapes: R rows, K inputs, M outputs.
    Args:
        x: by_token, [N, K], one row a token, read once for each of its slots; otherwise [R, K], already in order.
        weight: [experts, M, K] in the dtype of x.
    Returns: [R, M] in the dtype of x, in the order of the rows.
    Gradient: to x and weight, deterministic.
    Edge cases: an expert without rows gets a zero gradient.
    Raises: ValueError if shapes disagree, TypeError if dtypes do.
    """
    rows = order.places.shape[0] if by_token else order.tokens.shape[0]
    if weight.shape[0] != order.ends.shape[0] or x.shape != (rows, weight.shape[2]):
        expected = [order.ends.shape[0], "M", "K"], [rows, "K"]
        raise ValueError(f"weight, x must be {expected[0]}, {expected[1]}, got {list(weight.shape)}, {list(x.shape)}")
    if weight.dtype != x.dtype:
        raise TypeError(f"weight must be {x.dtype}, got {weight.dtype}")
    if device.has_kernels(x):
        from rz.ops import triton_experts

        return triton_experts.grouped_linear(x, weight, order, by_token=by_token)
    if by_token:
        x = x[order.tokens]
    ends = [0, *order.ends.tolist()]
    return torch.cat([linear(x[ends[i] : ends[i + 1]], weight[i]) for i in range(len(weight))])


def combine_experts(y: Tensor, gates: Tensor, order: ExpertOrder) -> Tensor:
    """sum over slots j of gates[:, j] * the row of slot j: in slot order, in float32, rounded once.

    Args:
        y: [R, M] in the order of the rows.
        gates: [N, k] float32.
    Returns: [N, M] in the dtype of y.
    Gradient: to y and gates, deterministic.
    Raises: ValueError if gates is not [N, k] or y has not R rows.
    """
    if gates.shape != order.places.shape:
        raise ValueError(f"gates must be {list(order.places.shape)}, got {list(gates.shape)}")
    if y.ndim != 2 or y.shape[0] != order.tokens.shape[0]:
        raise ValueError(f"y must have {order.tokens.shape[0]} rows, got {list(y.shape)}")
    if device.has_kernels(y):
        from rz.ops import triton_experts

        return triton_experts.combine_experts(y, gates, order)
    total = torch.zeros(len(gates), y.shape[1], dtype=torch.float32)
    for slot in range(gates.shape[1]):
        total = total + y[order.places[:, slot]].float() * gates[:, slot, None]
    return total.to(y.dtype)
