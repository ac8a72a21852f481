"""Aligned operations: a row's bits depend on that row's inputs alone. One op a file."""

from rz.ops.attention import WholeSequences, paged_attention, paged_plan, write_cache
from rz.ops.embedding import embedding
from rz.ops.experts import ExpertOrder, combine_experts, expert_order, grouped_linear
from rz.ops.linear import linear
from rz.ops.logprobs import row_logprobs, tempered_logprobs, token_logprobs
from rz.ops.rms_norm import add_rms_norm, head_rms_norm, rms_norm
from rz.ops.rope import inverse_frequencies, rope, rope_tables
from rz.ops.swiglu import swiglu

__all__ = [
    "ExpertOrder",
    "WholeSequences",
    "add_rms_norm",
    "combine_experts",
    "embedding",
    "expert_order",
    "grouped_linear",
    "head_rms_norm",
    "inverse_frequencies",
    "linear",
    "paged_attention",
    "paged_plan",
    "rms_norm",
    "rope",
    "rope_tables",
    "row_logprobs",
    "swiglu",
    "tempered_logprobs",
    "token_logprobs",
    "write_cache",
]
