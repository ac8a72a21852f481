"""The attention backend of CUDA and ROCm against vLLM's own classes. tests/kernels/test_vllm_backend.py computes."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vllm_finds_nothing_against_it(dtype):
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.kv_cache_interface import KVCacheLayout

    from rz.engine.vllm_kernel_attention import RzKernelBackend

    impl, builder = RzKernelBackend.get_impl_cls(), RzKernelBackend.get_builder_cls()
    assert not impl.__abstractmethods__ and not builder.__abstractmethods__
    assert not RzKernelBackend.__abstractmethods__
    against = RzKernelBackend.validate_configuration(
        head_size=128,
        dtype=dtype,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type="decoder",
        has_sliding_window=True,
    )
    assert against == []
    assert RzKernelBackend.supported_kv_cache_layouts() == (KVCacheLayout.LBHNC,)
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
