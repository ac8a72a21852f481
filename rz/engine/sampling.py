"""How every engine draws a token: one uniform number a token, a function of (seed, index in the response) alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _mixed(value: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> Tensor:
    """One number in [0, 1) for each pair (seed of the response, index of the token in it).

    Returns: [N] float64, multiples of 2**-53. The same pair gives the same number, whatever stands beside it.
    """
    stream = (
        _mixed(_mixed((seed + 0x9E3779B97F4A7C15) & _MASK) + (index + 1) * 0x9E3779B97F4A7C15 & _MASK)
        for seed, index in zip(seeds, indices, strict=True)
    )
    return torch.tensor([(bits >> 11) * 2.0**-53 for bits in stream], dtype=torch.float64)


def sample_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution.

    Args:
        logprobs: [N, V] float32, nats, normalised.
        uniform: [N] float64 in [0, 1).
    Returns: [N] int64: the first token whose cumulative probability exceeds uniform times the total. A token of
        probability 0 is never drawn.
    Edge cases: a row with NaN gives a token that means nothing; its logprob is NaN, which every caller refuses.
    """
    cumulative = torch.cumsum(logprobs.exp(), -1, dtype=torch.float64)
    target = uniform.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logprobs.shape[1] - 1)
