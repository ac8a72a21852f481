"""rz's attention backend for vLLM on CUDA and ROCm, handed what vLLM would hand it. Empty classes stand for
vLLM's, whose import costs 20 s; tests/engine/test_kernel_backend.py looks at the real ones."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from examples import normal

from rz.ops import WholeSequences

pytestmark = pytest.mark.usefixtures("on_kernels")


class Builder:
    def __class_getitem__(cls, item):
        return cls

    def __init__(self, kv_cache_spec, *more):
        self.kv_cache_spec = kv_cache_spec


@pytest.fixture
def backend(monkeypatch):
    modules = {
        "vllm.v1.attention.backend": {
            "AttentionBackend": object,
            "AttentionCGSupport": SimpleNamespace(UNIFORM_SINGLE_TOKEN_DECODE=1),
            "AttentionImpl": object,
            "AttentionMetadataBuilder": Builder,
            "CommonAttentionMetadata": object,
            "MultipleOf": int,
        },
        "vllm.v1.kv_cache_interface": {"KVCacheLayout": SimpleNamespace(LBHNC=0)},
    }
    for name in ("vllm", "vllm.v1", "vllm.v1.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, values in modules.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rz.engine.vllm_kernel_attention", raising=False)
    from rz.engine.vllm_kernel_attention import RzKernelBackend

    yield RzKernelBackend
    sys.modules.pop("rz.engine.vllm_kernel_attention")


def common(query_lengths, key_counts, table, tokens, most_keys=64):
    starts = torch.tensor([0, *query_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=len(query_lengths),
        num_actual_tokens=tokens,
        max_seq_len=most_keys,
        query_start_loc=starts,
        seq_lens=torch.tensor(key_counts, dtype=torch.int32),
        block_table_tensor=table,
    )


def test_a_padded_decode_has_the_bits_of_the_whole_pass(backend):
    """Two requests of 20 and 5 tokens, decoded in a batch that vLLM padded to four; block 0 belongs to no request."""
    lengths = [20, 5]
    q, k, v = (normal(25, heads, 16, dtype=torch.bfloat16, seed=heads) for heads in (4, 2, 2))
    whole = WholeSequences(lengths).attend(0, q, k, v, window=7)
    cache = torch.full((4, 2, 16, 32), torch.nan, dtype=torch.bfloat16)
    table = torch.tensor([[3, 1], [2, 0], [0, 0], [0, 0]], dtype=torch.int32)
    slots = torch.tensor([*range(48, 64), *range(16, 20), *range(32, 37)])
    impl = backend.get_impl_cls()(4, 16, 0.25, 2, None, 7, "auto")
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=16), [], None, torch.device("cpu"))
    impl.do_kv_cache_update(None, k, v, cache, slots)
    plan = builder.build(0, common([20, 5, 0, 0], [20, 5, 0, 0], table, 25))
    out = torch.full((25, 4 * 16), torch.nan, dtype=torch.bfloat16)
    impl.forward(None, q, k, v, cache, plan, out)
    assert torch.equal(out.view_as(whole), whole)
    last = torch.tensor([19, 24, 0, 0])
    impl.do_kv_cache_update(None, k[last], v[last], cache, torch.tensor([19, 36, -1, -1], dtype=torch.int32))
    plan = builder.build(0, common([1, 1, 0, 0], [20, 5, 0, 0], table, 4))
    out = torch.full((4, 4 * 16), torch.nan, dtype=torch.bfloat16)
    impl.forward(None, q[last], k[last], v[last], cache, plan, out)
    assert torch.equal(out[:2].view(2, 4, 16), whole[last[:2]])


def test_a_profiling_run_gives_zeros(backend):
    impl = backend.get_impl_cls()(4, 16, 0.25, 2, None, None, "auto")
    assert not impl.forward(None, None, None, None, None, None, torch.ones(3, 64)).any()
