"""The algorithm, one step per file: functions from immutable values to new ones."""

from rz.steps.advantages import group_mean_advantages, leave_one_out_advantages, std_normalised_advantages
from rz.steps.finite import count_nonfinite, drop_nonfinite, require_finite
from rz.steps.gap import gap_metrics, lag_kernel_split
from rz.steps.importance_weights import (
    importance_weights,
    masked_importance_weights,
    sequence_importance_weights,
    sequence_mean_importance_weights,
    truncated_importance_weights,
    unit_importance_weights,
)
from rz.steps.log_ratio import log_ratio
from rz.steps.loss import (
    ppo_clipped_loss,
    reinforce_zero_loss,
    response_count,
    supervised_loss,
    token_count,
    token_mean_loss,
)
from rz.steps.optimizer import AdamWState, adamw, adamw_init, clip_by_global_norm, global_norm
from rz.steps.update import PolicyState, supervised_update, update

__all__ = [
    "AdamWState",
    "PolicyState",
    "adamw",
    "adamw_init",
    "clip_by_global_norm",
    "count_nonfinite",
    "drop_nonfinite",
    "gap_metrics",
    "global_norm",
    "group_mean_advantages",
    "importance_weights",
    "lag_kernel_split",
    "leave_one_out_advantages",
    "log_ratio",
    "masked_importance_weights",
    "ppo_clipped_loss",
    "reinforce_zero_loss",
    "require_finite",
    "response_count",
    "sequence_importance_weights",
    "sequence_mean_importance_weights",
    "std_normalised_advantages",
    "supervised_loss",
    "supervised_update",
    "token_count",
    "token_mean_loss",
    "truncated_importance_weights",
    "unit_importance_weights",
    "update",
]
