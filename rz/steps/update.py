"""One update of the policy, composed from the other steps."""

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from rz.batch import TrainBatch
from rz.steps.advantages import group_mean_advantages
from rz.steps.finite import require_finite
from rz.steps.gap import gap_metrics, lag_kernel_split
from rz.steps.importance_weights import importance_weights
from rz.steps.loss import reinforce_zero_loss, response_count, supervised_loss
from rz.steps.optimizer import AdamWState, adamw, clip_by_global_norm, global_norm

Params = dict[str, Tensor]


@attrs.frozen(kw_only=True, eq=False)
class PolicyState:
    """What an update maps to the next. Fields never change, nor do their tensors but by an update they are donated to.

    Args:
        params: float32 masters, a flat dict by name.
        optimizer: of the same names and shapes.
        version: >= 0. Updates applied.
    """

    params: Params
    optimizer: AdamWState
    version: int


def update(
    state: PolicyState,
    batch: TrainBatch,
    *,
    logprobs_fn: Callable[[Params, TrainBatch], Tensor],
    learning_rate: float,
    advantages_fn: Callable[[Tensor, Tensor], Tensor] = group_mean_advantages,
    weights_fn: Callable[[Tensor, TrainBatch], Tensor] = importance_weights,
    loss_fn: Callable[..., Tensor] = reinforce_zero_loss,
    denominator_fn: Callable[[TrainBatch], float] = response_count,
    check: Callable[..., tuple[TrainBatch, int]] = require_finite,
    max_grad_norm: float | None = None,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    microbatch_size: int | None = None,
    donate: bool = False,
    donate_params: bool = False,
) -> tuple[PolicyState, dict[str, float]]:
    """One policy-gradient update.

    Args:
        state: stays as it is, but for what is donated.
        batch: the responses of the update. B responses, T positions.
        logprobs_fn: (params, batch) -> [B, T] float32 or float64, nats, differentiable in every parameter.
        advantages_fn: (rewards [B], group_ids [B]) -> [B], called once, with the whole batch.
        weights_fn: (logprobs, batch) -> [B, T], constants.
        loss_fn: (logprobs, batch, *, advantages, weights, denominator) -> [].
        denominator_fn: whole batch -> denominator of loss_fn; token_count for token_mean_loss.
        check: require_finite, drop_nonfinite or count_nonfinite.
        learning_rate, weight_decay, betas: as adamw.
        max_grad_norm: > 0, or None: no clipping.
        microbatch_size: >= 1 responses a forward and backward pass, or None: all at once. Sets the memory needed, not
            the update, up to rounding.
        donate, donate_params: as adamw: the caller gives up state.optimizer, and state.params, whose memory is used
            again. If the update raises they are as they were.
    Returns: (state of version + 1, metrics as floats): loss; grad_norm (before clipping); learning_rate; responses;
        response_length_mean; reward_mean; reward_std (divided by B); advantage_abs_mean; groups; groups_of_one;
        groups_without_signal (all rewards equal, groups of one included); nonfinite_tokens; dropped_responses; and
        all of gap_metrics and lag_kernel_split under the version of state, over the tokens trained on.
    Edge cases: a microbatch without tokens is not run; a batch without tokens has gradient 0, and the optimiser's
        step is still taken.
    Raises: what check raises; ValueError if batch has no response, if a reward or the gradient norm is not finite, if a
        parameter gets no gradient, or a number is out of range.
    """
    if not batch.rewards.isfinite().all():
        row = int((~batch.rewards.isfinite()).nonzero()[0])
        raise ValueError(
            f"rewards must be finite, got {float(batch.rewards[row])} in row {row} (group {int(batch.group_ids[row])})"
        )
    advantages = advantages_fn(batch.rewards, batch.group_ids)
    denominator = denominator_fn(batch)

    def rows_loss(logprobs: Tensor, rows: TrainBatch, start: int) -> Tensor:
        rows, _ = check(logprobs.detach(), rows, first_row=start)
        weights = weights_fn(logprobs.detach(), rows)
        gains = advantages[start : start + len(logprobs)]
        return loss_fn(logprobs, rows, advantages=gains, weights=weights, denominator=denominator)

    def measured(logprobs: Tensor) -> dict[str, float]:
        trained, nonfinite = check(logprobs, batch)
        gaps = gap_metrics(logprobs, trained, policy_version=state.version)
        gaps |= lag_kernel_split(logprobs, trained, policy_version=state.version)
        return (
            gaps
            | _reward_metrics(batch)
            | {
                "advantage_abs_mean": float(advantages.abs().mean()),
                "nonfinite_tokens": float(nonfinite),
                "dropped_responses": float((batch.mask.any(1) & ~trained.mask.any(1)).sum()),
            }
        )

    return _descend(
        state,
        batch,
        rows_loss,
        logprobs_fn,
        measured,
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        weight_decay=weight_decay,
        betas=betas,
        microbatch_size=microbatch_size,
        donate=donate,
        donate_params=donate_params,
    )


def supervised_update(
    state: PolicyState,
    batch: TrainBatch,
    *,
    logprobs_fn: Callable[[Params, TrainBatch], Tensor],
    learning_rate: float,
    max_grad_norm: float | None = None,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    microbatch_size: int | None = None,
    donate: bool = False,
    donate_params: bool = False,
) -> tuple[PolicyState, dict[str, float]]:
    """One update towards the responses of batch as they are: supervised_loss over response_count.

    Args, errors, edge cases: as update. Rewards, groups, versions and behaviour_logprobs are not read.
    Returns: (state of version + 1, metrics as floats): loss, grad_norm, learning_rate, responses,
        response_length_mean, tokens.
    """

    def rows_loss(logprobs: Tensor, rows: TrainBatch, start: int) -> Tensor:
        return supervised_loss(logprobs, rows, denominator=response_count(batch))

    return _descend(
        state,
        batch,
        rows_loss,
        logprobs_fn,
        lambda logprobs: {"tokens": float(batch.mask.sum())},
        learning_rate=learning_rate,
        max_grad_norm=max_grad_norm,
        weight_decay=weight_decay,
        betas=betas,
        microbatch_size=microbatch_size,
        donate=donate,
        donate_params=donate_params,
    )


def _descend(
    state: PolicyState,
    batch: TrainBatch,
    rows_loss: Callable[[Tensor, TrainBatch, int], Tensor],
    logprobs_fn: Callable[[Params, TrainBatch], Tensor],
    measured: Callable[[Tensor], dict[str, float]],
    *,
    max_grad_norm: float | None,
    microbatch_size: int | None,
    **optimizer: Any,
) -> tuple[PolicyState, dict[str, float]]:
    """One optimiser step down the sum of rows_loss over microbatches; the new state, and metrics with those measured of
    the logprobs [B, T]: before the step, as they may refuse the batch."""
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size must be >= 1 or None, got {microbatch_size}")
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in state.params.items()}
    responses = batch.mask.shape[0]
    if responses == 0:
        raise ValueError("batch must hold at least one response, got none")
    size = microbatch_size or responses
    loss, parts = 0.0, []
    for start in range(0, responses, size):
        rows = batch.rows(start, start + size)
        if not rows.mask.any():
            parts.append(torch.zeros_like(rows.behaviour_logprobs))
            continue
        logprobs = logprobs_fn(leaves, rows)
        rows_value = rows_loss(logprobs, rows, start)
        rows_value.backward(inputs=list(leaves.values()))
        parts.append(logprobs.detach())
        loss += rows_value.detach()
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    if not batch.mask.any():
        grads = {name: torch.zeros_like(tensor) for name, tensor in state.params.items()}
    for name, grad in grads.items():
        if grad is None:
            raise ValueError(f"params must all take part in logprobs_fn, got no gradient for {name}")
    if max_grad_norm is None:
        norm = global_norm(grads)
    else:
        grads, norm = clip_by_global_norm(grads, max_norm=max_grad_norm)
    if not math.isfinite(grad_norm := float(norm)):
        raise ValueError(f"grad_norm must be finite, got {grad_norm}")
    more = measured(torch.cat(parts))
    params, after = adamw(state.params, grads, state.optimizer, **optimizer)
    metrics = {
        "loss": float(loss),
        "grad_norm": grad_norm,
        "learning_rate": float(optimizer["learning_rate"]),
        "responses": float(responses),
        "response_length_mean": float(batch.mask.sum(1).double().mean()),
    }
    return PolicyState(params=params, optimizer=after, version=state.version + 1), metrics | more


def _reward_metrics(batch: TrainBatch) -> dict[str, float]:
    rewards = batch.rewards.double()
    groups: dict[int, list[float]] = {}
    for group, reward in zip(batch.group_ids.tolist(), batch.rewards.tolist(), strict=True):
        groups.setdefault(group, []).append(reward)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "groups": float(len(groups)),
        "groups_of_one": float(sum(len(members) == 1 for members in groups.values())),
        "groups_without_signal": float(sum(len(set(members)) == 1 for members in groups.values())),
    }
