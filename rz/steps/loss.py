"""Losses. Each takes its denominator, so that the losses of the microbatches of an update add up to its loss."""

import torch
from torch import Tensor

from rz.batch import TrainBatch
from rz.steps.log_ratio import check_logprobs, log_ratio


def response_count(batch: TrainBatch) -> int:
    """B, the responses of an update, empty ones included: the denominator of a mean over responses."""
    return batch.mask.shape[0]


def token_count(batch: TrainBatch) -> int:
    """The trained tokens of an update: the denominator of token_mean_loss. Reads the mask on the host."""
    return int(batch.mask.sum())


def reinforce_zero_loss(
    logprobs: Tensor, batch: TrainBatch, *, advantages: Tensor, weights: Tensor, denominator: float
) -> Tensor:
    """Importance-weighted policy gradient, mean over the tokens of a response, then over responses.

        loss = -1/denominator * sum_i 1/n_i * sum_t mask_it * A_i * rho_it * p_it

    Its gradient equals that of -A * exp(p - q) with the same means, where rho = exp(p - q).
    Shapes: B responses, T positions; n_i tokens of response i where mask is True.
    Args:
        logprobs: [B, T] float32 or float64, nats: p.
        batch: its mask says which tokens count.
        advantages: [B] float: A.  weights: [B, T] float: rho.
        denominator: > 0. The responses of the whole update, empty ones included, not of this microbatch.
    Returns: [] in the widest of the dtypes.
    Gradient: to logprobs only; advantages and weights count as constants. Exactly 0 where mask is False.
    Edge cases: nothing is read where mask is False, NaN and inf included; a response without tokens contributes 0; no
        True at all gives 0, gradient 0. A live weight that is not finite is not repaired.
    Raises: TypeError or ValueError as check_logprobs; ValueError for a shape that disagrees or denominator <= 0.
    Source: Williams 1992 (REINFORCE); weighted as in Espeholt et al. 2018, arXiv:1802.01561, section 4.2.
    """
    return _mean_over_responses(_weighted(logprobs, batch, advantages, weights, denominator), batch, denominator)


def token_mean_loss(
    logprobs: Tensor, batch: TrainBatch, *, advantages: Tensor, weights: Tensor, denominator: float
) -> Tensor:
    """Importance-weighted policy gradient, mean over all trained tokens: a long response counts for more.

        loss = -1/denominator * sum_i sum_t mask_it * A_i * rho_it * p_it

    Shapes, gradient, edge cases, errors: as reinforce_zero_loss.
    Args:
        denominator: > 0. The trained tokens of the whole update, not of this microbatch.
    Source: Yu et al. 2025 (DAPO), arXiv:2503.14476, section 3.3, without the clip.
    """
    return -_weighted(logprobs, batch, advantages, weights, denominator).sum() / denominator


def ppo_clipped_loss(
    logprobs: Tensor,
    batch: TrainBatch,
    *,
    advantages: Tensor,
    weights: Tensor | None = None,
    low: float,
    high: float,
    denominator: float,
) -> Tensor:
    """Clipped surrogate of PPO against the behaviour policy, mean over the tokens of a response, then over responses.

        loss = -1/denominator * sum_i 1/n_i * sum_t mask_it * min(ratio_it * A_i, clip(ratio_it, low, high) * A_i)

    with ratio = exp(p - q), differentiable.
    Shapes, edge cases, other errors: as reinforce_zero_loss.
    Args:
        weights: not read: the ratio is the correction. Taken so that this loss can stand where the others stand.
        low, high: 0 <= low <= 1 <= high, bounds of the ratio itself, not distances from 1.
    Gradient: to logprobs only; 0 for a token whose ratio is past the bound that its advantage pushes towards.
    Raises: ValueError unless 0 <= low <= 1 <= high.
    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
    """
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"low and high must obey 0 <= low <= 1 <= high, got {low} and {high}")
    _check(batch, advantages, None, denominator)
    ratio = log_ratio(logprobs, batch).exp()
    gain = advantages.detach()[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(low, high) * gain)
    return _mean_over_responses(surrogate.masked_fill(~batch.mask, 0), batch, denominator)


def supervised_loss(logprobs: Tensor, batch: TrainBatch, *, denominator: float) -> Tensor:
    """Negative log-likelihood of the responses, mean over the tokens of a response, then over responses.

        loss = -1/denominator * sum_i 1/n_i * sum_t mask_it * p_it

    Shapes, gradient, edge cases, errors: as reinforce_zero_loss with advantages and weights of 1.
    """
    check_logprobs(logprobs, batch)
    _check(batch, None, None, denominator)
    return _mean_over_responses(logprobs.masked_fill(~batch.mask, 0), batch, denominator)


def _check(batch: TrainBatch, advantages: Tensor | None, weights: Tensor | None, denominator: float) -> None:
    if advantages is not None and advantages.shape != batch.mask.shape[:1]:
        raise ValueError(f"advantages must be one a response [{batch.mask.shape[0]}], got {list(advantages.shape)}")
    if weights is not None and weights.shape != batch.mask.shape:
        raise ValueError(f"weights must have the shape of mask {list(batch.mask.shape)}, got {list(weights.shape)}")
    if not denominator > 0:
        raise ValueError(f"denominator must be > 0, got {denominator}")


def _weighted(logprobs: Tensor, batch: TrainBatch, advantages: Tensor, weights: Tensor, denominator: float) -> Tensor:
    check_logprobs(logprobs, batch)
    _check(batch, advantages, weights, denominator)
    coefficients = (advantages[:, None] * weights).detach()
    # Both factors are masked: masking their product leaves NaN in the gradient of padded entries.
    return coefficients.masked_fill(~batch.mask, 0) * logprobs.masked_fill(~batch.mask, 0)


def _mean_over_responses(values: Tensor, batch: TrainBatch, denominator: float) -> Tensor:
    return -(values.sum(1) / batch.mask.sum(1).clamp(min=1)).sum() / denominator
