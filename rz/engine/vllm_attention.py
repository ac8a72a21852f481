"""vLLM's attention backend over its paged cache, computed by rz.ops."""

import attrs
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from rz.ops import paged_attention, paged_plan, write_cache
from rz.ops.attention_plan import Plan


@attrs.frozen(eq=False)
class StepPlan:
    """What the layers of one cache group need to know of one engine step."""

    plan: Plan
    slots: Tensor  # [N] int64, where each token's key and value go
    tokens: int


class RzAttentionBuilder(AttentionMetadataBuilder[StepPlan]):
    """Makes the plan of a step once; every layer of the group reads it."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        self.windows = tuple({layer.impl.window for layer in layers})
        self.heads = layers[0].impl.num_heads
        self.kv_heads = layers[0].impl.num_kv_heads
        self.head_dim = layers[0].impl.head_size
        self.dtype = vllm_config.model_config.dtype

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> StepPlan:
        requests, tokens = common.num_reqs, common.num_actual_tokens
        starts = common.query_start_loc_cpu[: requests + 1]
        plan = paged_plan(
            (starts[1:] - starts[:-1]).tolist(),
            common.seq_lens[:requests].tolist(),
            common.block_table_tensor[:requests],
            block_size=self.kv_cache_spec.block_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            windows=self.windows,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )
        return StepPlan(plan, common.slot_mapping[:tokens].long(), tokens)


class RzAttentionImpl(CPUAttentionBackendImpl):
    """One layer's attention."""

    @property
    def window(self) -> int | None:
        return None if self.sliding_window < 0 else self.sliding_window

    def do_kv_cache_update(self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        slots = slot_mapping.long()
        write_cache(kv_cache, key[: len(slots)], value[: len(slots)], slots)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata: StepPlan | None, output, *scales, **more):
        if attn_metadata is None:  # a profiling run
            return output.zero_()
        n = attn_metadata.tokens
        output[:n] = paged_attention(query[:n], kv_cache, attn_metadata.plan, window=self.window).view_as(output[:n])
        return output


class RzAttentionBackend(CPUAttentionBackend):
    """Handed to vLLM's attention layers by the model class; no global registration."""

    @staticmethod
    def get_impl_cls() -> type[RzAttentionImpl]:
        return RzAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RzAttentionBuilder]:
        return RzAttentionBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(range(16, 257, 2))
