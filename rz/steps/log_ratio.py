"""The log-ratio of policy to behaviour policy, the one quantity that weights, clipped losses and gap share."""

import torch
from torch import Tensor

from rz.batch import TrainBatch


def check_logprobs(logprobs: Tensor, batch: TrainBatch) -> None:
    """Raises: TypeError unless logprobs is float32 or float64, ValueError unless it has the shape of batch.mask."""
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"logprobs must be float32 or float64, got {logprobs.dtype}")
    if logprobs.shape != batch.mask.shape:
        raise ValueError(f"logprobs must have the shape of mask {list(batch.mask.shape)}, got {list(logprobs.shape)}")


def log_ratio(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    """Log of the ratio of the policy's probability of each sampled token to the behaviour policy's.

        d = p - q where mask is True, 0 elsewhere

    Shapes: B responses, T positions.
    Args:
        logprobs: [B, T] float32 or float64, nats: p.
        batch: its behaviour_logprobs are q.
    Returns: [B, T] in the dtype of logprobs, nats.
    Gradient: to logprobs; exactly 0 where mask is False.
    Edge cases: nothing is read where mask is False, NaN and inf included.
    Raises: TypeError or ValueError as check_logprobs.
    """
    check_logprobs(logprobs, batch)
    return (logprobs - batch.behaviour_logprobs).masked_fill(~batch.mask, 0)
