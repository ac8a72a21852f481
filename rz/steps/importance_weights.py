"""Importance weights: what a token sampled by an older policy counts under this one. All are constants to autograd.

Every function here takes (logprobs [B, T], batch) and numbers, and returns [B, T] in the dtype of logprobs, 0 where
mask is False. Nothing is read there, NaN and inf included. No gradient passes through any of them.
"""

import torch
from torch import Tensor

from rz.batch import TrainBatch
from rz.steps.log_ratio import check_logprobs, log_ratio


def importance_weights(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    """Token weights, without a clamp of any kind.

        rho = exp(p - q)

    Shapes: B responses, T positions.
    Args:
        logprobs: [B, T] float32 or float64, nats: p, the policy's log-probability of each sampled token.
        batch: its behaviour_logprobs are q.
    Returns: [B, T] in the dtype of logprobs; exactly 1 where p equals q, exactly 0 where mask is False.
    Gradient: none; the weights are constants.
    Edge cases: the difference is masked before the exponential. A live difference past 88.7 gives inf in float32, a
        live NaN stays NaN: rz.steps.finite says which tokens those are.
    Raises: TypeError or ValueError as check_logprobs.
    Source: Espeholt et al. 2018, arXiv:1802.01561, section 4.1, without the truncation.
    """
    return log_ratio(logprobs.detach(), batch).exp().masked_fill(~batch.mask, 0)


def truncated_importance_weights(logprobs: Tensor, batch: TrainBatch, *, cap: float) -> Tensor:
    """Token weights cut off at a cap (TIS).

        rho = min(exp(p - q), cap)

    Shapes, gradient, other errors: as importance_weights.
    Args:
        cap: > 0.
    Edge cases: a ratio that overflows gives cap; a live NaN stays NaN.
    Raises: ValueError if cap <= 0.
    Source: Espeholt et al. 2018, arXiv:1802.01561, section 4.1.
    """
    if not cap > 0:
        raise ValueError(f"cap must be > 0, got {cap}")
    return importance_weights(logprobs, batch).clamp(max=cap)


def masked_importance_weights(logprobs: Tensor, batch: TrainBatch, *, low: float, high: float) -> Tensor:
    """Token weights, 0 for a token whose ratio leaves an interval (IcePop).

        rho = exp(p - q) if low <= exp(p - q) <= high, else 0

    Shapes, gradient, other errors: as importance_weights. The token still counts in the length of its response.
    Args:
        low, high: 0 <= low < high, bounds of the ratio itself, not distances from 1.
    Edge cases: a ratio that overflows gives 0; a live NaN stays NaN.
    Raises: ValueError unless 0 <= low < high.
    Source: Ling Team 2025 (IcePop), arXiv:2510.18855.
    """
    if not 0 <= low < high:
        raise ValueError(f"low and high must obey 0 <= low < high, got {low} and {high}")
    weights = importance_weights(logprobs, batch)
    return weights.masked_fill((weights < low) | (weights > high), 0)


def sequence_importance_weights(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    """One weight a response: the ratio of the probabilities of the whole response, at each of its tokens.

        rho_it = product over the live tokens s of response i of exp(p_is - q_is) = exp(sum_s (p_is - q_is))

    Shapes, gradient, errors: as importance_weights. The sum runs in float64.
    Edge cases: grows without bound with the length of a response, and overflows to inf; a live NaN makes the weights
        of its response NaN; a response without tokens has weights 0.
    Source: Precup, Sutton and Singh 2000 (per-trajectory importance sampling).
    """
    total = log_ratio(logprobs.detach(), batch).sum(1, dtype=torch.float64)
    return _at_each_token(total, logprobs, batch)


def sequence_mean_importance_weights(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    """One weight a response: the geometric mean of its token ratios, at each of its tokens.

        rho_it = exp(1/n_i * sum over the live tokens s of response i of (p_is - q_is))

    Shapes, gradient, errors: as importance_weights. The sum runs in float64.
    Edge cases: a live NaN makes the weights of its response NaN; a response without tokens has weights 0.
    Source: Zheng et al. 2025 (GSPO), arXiv:2507.18071, equation 7, without the clip.
    """
    total = log_ratio(logprobs.detach(), batch).sum(1, dtype=torch.float64)
    return _at_each_token(total / batch.mask.sum(1).clamp(min=1), logprobs, batch)


def unit_importance_weights(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    """Weights of exactly 1 at every live token: no correction. Shapes and errors as importance_weights."""
    check_logprobs(logprobs, batch)
    return batch.mask.to(logprobs.dtype)


def _at_each_token(log_weights: Tensor, logprobs: Tensor, batch: TrainBatch) -> Tensor:
    weights = log_weights.exp().to(logprobs.dtype)
    return weights[:, None].expand(batch.mask.shape).masked_fill(~batch.mask, 0)
