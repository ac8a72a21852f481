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
    for low, high in LAG_BUCKETS:
        suffix = f"lag_{low}_up" if high is None else f"lag_{low}" if low == high else f"lag_{low}_{high}"
        inside = lag >= low if high is None else (lag >= low) & (lag <= high)
        metrics |= {f"{name}_{suffix}": value for name, value in _summary(difference[inside]).items()}
    return metrics


def lag_kernel_split(current: Tensor, replay: Tensor, batch: TrainBatch, *, replayed: Tensor) -> dict[str, float]:
    """The gap's two terms apart: what the updates since did, and what the engine computed otherwise.

        p - q = (p - r) + (r - q),   lag term p - r, kernel term r - q

    Shapes: B responses, T positions.
    Args:
        current: [B, T] float32 or float64, nats: p, of the policy now.
        replay: [B, T] float32, nats: r, of the learner under the version that sampled each token.
        batch: its behaviour_logprobs are q.
        replayed: [B, T] bool, True = replay holds a value here. Read only where mask is True as well.
    Returns: floats: lag_term_mean_abs, lag_term_max, kernel_term_mean_abs, kernel_term_max (nats, of the absolute
        value, in float64), differing_tokens (r and q have other bits), replayed_tokens (live and replayed).
    Gradient: none; reads values on the host.
    Edge cases: bits are compared as integers, so that 0.0 and -0.0 differ and a NaN equals itself; no token gives 0
        everywhere; a value that is not finite shows as NaN or inf in its terms.
    Raises: TypeError if replay is not float32 or replayed not bool; ValueError for a shape that disagrees.
    """
    check_logprobs(current, batch)
    for name, value, dtype in (("replay", replay, torch.float32), ("replayed", replayed, torch.bool)):
        if value.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {value.dtype}")
        if value.shape != batch.mask.shape:
            raise ValueError(f"{name} must have the shape of mask {list(batch.mask.shape)}, got {list(value.shape)}")
    live = batch.mask & replayed
    p, r, q = (tensor.detach()[live].cpu() for tensor in (current, replay, batch.behaviour_logprobs))
    metrics = {}
    for name, term in (("lag_term", p.double() - r.double()), ("kernel_term", r.double() - q.double())):
        metrics[f"{name}_mean_abs"] = float(term.abs().mean()) if len(term) else 0.0
        metrics[f"{name}_max"] = float(term.abs().max()) if len(term) else 0.0
    metrics["differing_tokens"] = float(torch.ne(r.view(torch.int32), q.view(torch.int32)).sum())
    metrics["replayed_tokens"] = float(len(r))
    return metrics


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
