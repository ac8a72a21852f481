"""How far the policy is from the one that sampled: gap metrics by policy lag, and the gap's two terms apart."""

import torch
from torch import Tensor

from rz.batch import TrainBatch
from rz.steps.log_ratio import check_logprobs

LAG_BUCKETS = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 32), (33, 64), (65, None))


def gap_metrics(logprobs: Tensor, batch: TrainBatch, *, policy_version: int) -> dict[str, float]:
    """Distances of policy and behaviour policy over the live tokens, in all and by policy lag.

    With d = p - q in float64 and n live tokens:

        k1 = mean(-d)   k2 = mean(d^2 / 2)   k3 = mean(expm1(d) - d)   estimates of KL(behaviour, policy), nats
        gap_max = max |d|, nats     ratio_max = max exp(d)
        ess = (sum exp(d))^2 / sum exp(2 d) / n, the effective sample size as a share of n, in (0, 1],
              by logsumexp
        tokens = n      lag_mean, lag_max of lag = policy_version - version that sampled the token

    and k1, k2, k3, gap_max, ratio_max, ess, tokens again for each bucket of lags, under the suffixes _lag_0, _lag_1,
    _lag_2_3, _lag_4_7, _lag_8_15, _lag_16_32, _lag_33_64 and _lag_65_up.
    Shapes: B responses, T positions.
    Args:
        logprobs: [B, T] float32 or float64, nats: p.
        batch: its behaviour_logprobs are q.
        policy_version: >= the version of every live token. The version that p is of.
    Returns: floats, always under the same names.
    Gradient: none; reads values on the host.
    Edge cases: nothing is read where mask is False. No token, in all or in a bucket, gives 0 everywhere and ess 1. A
        live value that is not finite shows as NaN or inf.
    Raises: TypeError or ValueError as check_logprobs; ValueError if a live token is newer than policy_version.
    Source: k1, k2, k3: Schulman 2020, "Approximating KL divergence"; ess: Kong 1992.
    """
    check_logprobs(logprobs, batch)
    live = batch.mask
    difference = (logprobs.detach()[live].double() - batch.behaviour_logprobs[live].double()).cpu()
    lag = policy_version - batch.policy_versions[live].cpu()
    if (lag < 0).any():
        raise ValueError(
            f"policy_version must be >= the version of every token, got {policy_version} "
            f"and a token of version {policy_version - int(lag.min())}"
        )
    metrics = _summary(difference) | {
        "lag_mean": float(lag.double().mean()) if len(lag) else 0.0,
        "lag_max": float(lag.max()) if len(lag) else 0.0,
        "differing_lag_0": float((difference[lag == 0] != 0).sum()),
    }
    for suffix, inside in _buckets(lag):
        metrics |= {name + suffix: value for name, value in _summary(difference[inside]).items()}
    return metrics


def lag_kernel_split(logprobs: Tensor, batch: TrainBatch, *, policy_version: int) -> dict[str, float]:
    """The gap's two terms apart, over the live tokens that were replayed, in all and by policy lag.

        p - q = (p - r) + (r - q),   lag term p - r: what the updates since did,
                                     kernel term r - q: what the engine computed otherwise

    Shapes: B responses, T positions.
    Args:
        logprobs: [B, T] float32 or float64, nats: p.
        batch: its behaviour_logprobs are q, its replay_logprobs r, NaN (or None) where a token was not replayed.
        policy_version: the version that p is of.
    Returns: floats, always under the same names: lag_term (mean of the absolute value, nats, in float64), kernel_term
        (its largest absolute value), replayed_tokens, replayed_differing (r and q have other bits), and the first three
        for each bucket of lags, with the suffixes of gap_metrics.
    Gradient: none; reads values on the host.
    Edge cases: bits are compared as integers, so that 0.0 and -0.0 differ; no token gives 0 everywhere; a value of p or
        q that is not finite shows as NaN or inf in its terms.
    Raises: as check_logprobs.
    """
    check_logprobs(logprobs, batch)
    if batch.replay_logprobs is None:
        live = torch.zeros_like(batch.mask)
        p = r = q = lag = torch.zeros(0)
    else:
        live = batch.mask & ~batch.replay_logprobs.isnan()
        p, r, q = (x.detach()[live].cpu() for x in (logprobs, batch.replay_logprobs, batch.behaviour_logprobs))
        lag = policy_version - batch.policy_versions[live].cpu()
    differing = torch.ne(r.view(torch.int32), q.view(torch.int32)).sum()
    lag_term, kernel_term = (p.double() - r.double()).abs(), (r.double() - q.double()).abs()
    metrics = {"replayed_differing": float(differing)}
    for suffix, inside in (("", lag == lag), *_buckets(lag)):
        terms = lag_term[inside], kernel_term[inside]
        metrics["lag_term" + suffix] = float(terms[0].mean()) if len(terms[0]) else 0.0
        metrics["kernel_term" + suffix] = float(terms[1].max()) if len(terms[1]) else 0.0
        metrics["replayed_tokens" + suffix] = float(len(terms[0]))
    return metrics


def _buckets(lag: Tensor) -> list[tuple[str, Tensor]]:
    """The suffix of each bucket of lags, and which of the tokens are in it."""
    return [
        (
            f"_lag_{low}_up" if high is None else f"_lag_{low}" if low == high else f"_lag_{low}_{high}",
            lag >= low if high is None else (lag >= low) & (lag <= high),
        )
        for low, high in LAG_BUCKETS
    ]


def _summary(difference: Tensor) -> dict[str, float]:
    count = len(difference)
    if count == 0:
        return {"k1": 0.0, "k2": 0.0, "k3": 0.0, "gap_max": 0.0, "ratio_max": 0.0, "ess": 1.0, "tokens": 0.0}
    largest = difference.max()
    shifted = (difference - largest).exp()  # the shift of logsumexp, which cancels: exactly 1 where all are equal
    return {
        "k1": 0.0 - float(difference.mean()),
        "k2": float(difference.square().mean() / 2),
        "k3": float((difference.expm1() - difference).mean()),
        "gap_max": float(difference.abs().max()),
        "ratio_max": float(largest.exp()),
        "ess": float((shifted.sum().square() / shifted.square().sum() / count).clamp(max=1)),
        "tokens": float(count),
    }
