"""Rows of a table."""

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids].

    Args:
        ids: [N] int64 or int32, each in [0, V).
        weight: [V, E] float.
    Returns: [N, E] in the dtype of weight; exact copies.
    Gradient: to weight, summed over equal ids in order of position.
    Raises: TypeError if ids are not integers; IndexError (torch's) if one is out of range.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids must be torch.int64 or torch.int32, got {ids.dtype}")
    return F.embedding(ids, weight)
