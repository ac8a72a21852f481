"""Advantages: how much better a response did than the other responses to its prompt."""

import torch
from torch import Tensor


def _centred(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reward minus mean of its group [B] float64, members of its group [B], and who shares a group [B, B] bool."""
    if rewards.ndim != 1 or len(rewards) == 0 or not rewards.is_floating_point():
        raise ValueError(f"rewards must be [B] of a float type, B >= 1, got {list(rewards.shape)} {rewards.dtype}")
    if group_ids.shape != rewards.shape:
        raise ValueError(f"group_ids must have the shape of rewards {list(rewards.shape)}, got {list(group_ids.shape)}")
    same = group_ids[:, None] == group_ids[None, :]
    members = same.sum(1)
    wide = rewards.to(torch.float64)
    lowest = torch.where(same, wide[None, :], torch.inf).amin(1)
    above = wide - lowest  # exactly 0 throughout a group of equal rewards, so its mean is exactly 0 too
    return above - torch.where(same, above[None, :], 0.0).sum(1) / members, members, same


def group_mean_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean reward of the group.

        A_i = R_i - mean of R over the group of i

    Shapes: B responses.
    Args:
        rewards: [B] float.
        group_ids: [B] int. Responses with the same id are one group, wherever they stand.
    Returns: [B] in the dtype of rewards; computed in float64.
    Gradient: to rewards.
    Edge cases: equal rewards give exactly 0 in any float type; a group of one gives 0; a reward that is not finite
        makes its own group NaN and no other.
    Raises: ValueError if rewards is not a float vector, is empty, or the shapes differ.
    Source: Williams 1992 (REINFORCE with a baseline); the group as in Shao et al. 2024, arXiv:2402.03300, without
        the division by the deviation.
    """
    return _centred(rewards, group_ids)[0].to(rewards.dtype)


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean reward of the other responses of the group.

        A_i = R_i - mean of R over the group of i without i = n / (n - 1) * (R_i - mean of R over the group)

    Shapes, gradient, errors, other edge cases: as group_mean_advantages.
    Edge cases: a group of one has no others and gives 0.
    Source: Kool et al. 2019; Ahmadian et al. 2024 (RLOO), arXiv:2402.14740.
    """
    centred, members, _ = _centred(rewards, group_ids)
    return (centred * (members / (members - 1).clamp(min=1))).to(rewards.dtype)


def std_normalised_advantages(rewards: Tensor, group_ids: Tensor, *, epsilon: float) -> Tensor:
    """Reward minus the mean of the group, over the deviation of the group.

        A_i = (R_i - mean) / (s + epsilon),   s^2 = sum over the group of (R_j - mean)^2 / (n - 1)

    Shapes, gradient, other edge cases: as group_mean_advantages.
    Args:
        epsilon: > 0. Keeps the quotient finite where all rewards of a group are equal.
    Edge cases: equal rewards and a group of one give exactly 0; the gradient is NaN there, as the root has none at 0.
    Raises: as group_mean_advantages; ValueError if epsilon <= 0.
    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, section 4.1.2.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be > 0, got {epsilon}")
    centred, members, same = _centred(rewards, group_ids)
    squares = torch.where(same, centred.square()[None, :], 0.0).sum(1)
    deviation = (squares / (members - 1).clamp(min=1)).sqrt()
    return (centred / (deviation + epsilon)).to(rewards.dtype)
