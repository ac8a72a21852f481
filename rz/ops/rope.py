"""Rotary position embedding, with the scalings of long-context checkpoints."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rz.ops import device
from rz.ops.chunks import row_chunks, scratch
from rz.ops.function import apply


def _need(scaling: Mapping[str, Any], name: str) -> float:
    if not isinstance(value := scaling.get(name), int | float) or not value > 0:
        raise ValueError(f"rope_scaling.{name} must be a number > 0, got {value!r}")
    return float(value)


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor, low, high = (_need(scaling, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _need(scaling, "original_max_position_embeddings")
    if high <= low:
        raise ValueError(f"rope_scaling.high_freq_factor must be > low_freq_factor {low}, got {high}")
    wavelength = 2 * math.pi / frequencies
    slow = torch.where(wavelength > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * slow / factor + smooth * slow
    middle = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(middle, between, slow)


def _yarn(
    frequencies: Tensor, scaling: Mapping[str, Any], head_dim: int, theta: float, max_position: int
) -> tuple[Tensor, float]:
    given = {"original_max_position_embeddings": max_position, "beta_fast": 32, "beta_slow": 1}
    given |= {name: value for name, value in scaling.items() if value is not None}
    factor, original = _need(given, "factor"), _need(given, "original_max_position_embeddings")
    fast, slow = _need(given, "beta_fast"), _need(given, "beta_slow")

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(fast), dimension(slow)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    blended = (frequencies / factor) * ramp + frequencies * (1 - ramp)

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if numerator and denominator:
            attention = magnitude(factor, numerator) / magnitude(factor, denominator)
        else:
            attention = magnitude(factor)
    return blended, float(attention)


def inverse_frequencies(
    head_dim: int, *, theta: float, scaling: Mapping[str, Any] | None, max_position: int
) -> tuple[Tensor, float]:
    """The rotation speed of each pair of head dimensions.

    Args:
        head_dim: D, even.
        theta: > 1, the base.
        scaling: None, or the `rope_scaling` mapping of a checkpoint: rope_type "default", "linear", "llama3" or "yarn".
        max_position: the longest sequence of the checkpoint; YaRN falls back to it for the original length.
    Returns: ([D / 2] float32 in radians a position, the factor that multiplies cos and sin).
    Raises: ValueError naming the field for an unknown rope_type or a bad number.
    Source: Su et al. 2021, arXiv:2104.09864; YaRN: Peng et al. 2023, arXiv:2309.00071; llama3: the Llama 3.1 release.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and >= 2, got {head_dim}")
    if not theta > 1:
        raise ValueError(f"theta must be > 1, got {theta}")
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / _need(scaling, "factor"), 1.0
    if kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if kind == "yarn":
        return _yarn(frequencies, scaling, head_dim, theta, max_position)
    raise ValueError(f"rope_scaling.rope_type must be one of default, linear, llama3, yarn, got {kind!r}")


def rope_tables(positions: Tensor, frequencies: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """factor * cos and factor * sin of positions * frequencies.

    Args:
        positions: [N] integers, each in [0, 2**24), absolute in their sequence.
        frequencies: [D / 2] float32.
    Returns: two tensors [N, D / 2] float32.
    Gradient: none.
    """
    angles = positions.float()[:, None] * frequencies[None, :]
    return angles.cos() * factor, angles.sin() * factor


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        half = x.shape[-1] // 2
        for part in row_chunks(len(x), x.shape[1] * x.shape[2]):
            wide = x[part].float()
            first, second = wide.split(half, -1)
            across, up = torch.cat((cos[part], cos[part]), -1)[:, None], sin[part, None]
            turned = torch.mul(wide, across, out=scratch(out[part]))
            turned[..., :half].sub_(second * up)
            turned[..., half:].add_(first * up)
            if out.dtype != torch.float32:
                out[part] = turned
        return out

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return apply(_Rope, grad, cos, -sin), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of head dimensions by its row's angle, in float32, rounded once.

    Args:
        x: [N, H, D] float.  cos, sin: [N, D / 2] float32.
    Returns: [N, H, D] in the dtype of x.
    Gradient: to x.
    Raises: ValueError if x is not [N, H, D] with an even D, or cos or sin not [N, D / 2].
    """
    if x.ndim != 3 or x.shape[-1] % 2:
        raise ValueError(f"x must be [N, H, D] with an even D, got {list(x.shape)}")
    expected = (x.shape[0], x.shape[-1] // 2)
    if cos.shape != expected or sin.shape != expected:
        raise ValueError(f"cos and sin must be {list(expected)}, got {list(cos.shape)} and {list(sin.shape)}")
    if device.has_kernels(x):
        from rz.ops import triton_rope

        return triton_rope.Rope.apply(x, cos, sin)
    return apply(_Rope, x, cos, sin)
