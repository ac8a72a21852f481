"""vLLM's attention backend on CUDA and ROCm: rz's Triton kernels over vLLM's paged cache.

The plan reads vLLM's own buffers and waits for nothing, so a step of single-token queries can be captured in a CUDA
graph. Compiled and interpreted, not yet run on hardware.
"""

from typing import ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from rz.ops import paged_attention, write_cache
from rz.ops.triton_attention import KernelPlan


class RzKernelBuilder(AttentionMetadataBuilder[KernelPlan]):
    """Makes the plan of a step once; every layer of the group reads it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata, fast_build: bool = False) -> KernelPlan:
        requests = common.num_reqs
        return KernelPlan(
            query_starts=common.query_start_loc[: requests + 1],
            key_counts=common.seq_lens[:requests],
            table=common.block_table_tensor[:requests],
            page_size=self.kv_cache_spec.block_size,
            tokens=common.num_actual_tokens,
            most_keys=common.max_seq_len,
        )


class RzKernelImpl(AttentionImpl):
    """One layer's attention."""

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, *more, **named) -> None:
        self.num_heads, self.num_kv_heads, self.head_size, self.scale = num_heads, num_kv_heads, head_size, scale
        self.window = sliding_window

    def do_kv_cache_update(self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        # Padding has slot -1; it goes to block 0, which vLLM hands to no request.
        slots = slot_mapping.long().clamp(min=0)
        write_cache(kv_cache, key[: len(slots)], value[: len(slots)], slots)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata: KernelPlan | None, output, *scales, **more):
        if attn_metadata is None:  # a profiling run
            return output.zero_()
        n = attn_metadata.tokens
        output[:n] = paged_attention(query[:n], kv_cache, attn_metadata, window=self.window).view_as(output[:n])
        return output


class RzKernelBackend(AttentionBackend):
    """Handed to vLLM's attention layers by the model class; no global registration."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "RZ_KERNELS"

    @staticmethod
    def get_impl_cls() -> type[RzKernelImpl]:
        return RzKernelImpl

    @staticmethod
    def get_builder_cls() -> type[RzKernelBuilder]:
        return RzKernelBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(range(16, 257, 8))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # [blocks, kv_heads, block, 2 * head_dim]

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True
