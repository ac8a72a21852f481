import importlib

import attrs
import pytest
import torch
from alignment import threads

from rz.ops.probe import ProbeResult, probe, require_aligned

F32, BF16 = torch.float32, torch.bfloat16


def module(name):  # rz.ops.linear is the function; its module has the same name
    return importlib.import_module(f"rz.ops.{name}")


def failed(**arguments):
    return [result.name for result in probe(F32, **arguments) if not result.passed]


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(F32, None), (BF16, None), (BF16, F32)])
def test_this_machine_passes(dtype, weight_dtype):
    shapes = [(64, 128), (40, 3)]
    results = require_aligned(dtype, shapes, attention=(6, 2, 16), weight_dtype=weight_dtype, threads=(1, 2))
    assert all(result.passed and result.detail.endswith("rows equal") for result in results)
    names = [result.name for result in results]
    assert len(set(names)) == len(names)
    assert {"linear 64 to 128", "linear 40 to 3", "attention 6, 2, 16", "number of threads"} <= set(names)


def test_thread_count_and_random_state_are_restored():
    state = torch.get_rng_state()
    with threads(2):
        probe(F32, threads=(1,))
        assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), state)


def test_results_are_frozen_and_repeat():
    first, second = probe(F32), probe(F32)
    assert first == second
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        first[0].passed = False


def few_rows_in_two_halves(x, weight, bias):
    """What a library does that takes another kernel for few rows."""
    half = x.shape[1] // 2
    if len(x) >= 16:
        return x @ weight.t()
    return x[:, :half] @ weight[:, :half].t() + x[:, half:] @ weight[:, half:].t()


def test_linear_that_depends_on_the_row_count_fails(monkeypatch):
    monkeypatch.setattr(module("linear"), "_product", few_rows_in_two_halves)
    assert {"linear 64 to 64", "linear 64 to 192", "linear 50 to 70", "token logprobs"} <= set(
        failed(shapes=[(50, 70)])
    )
    with pytest.raises(RuntimeError) as error:
        require_aligned(F32, [(50, 70)])
    assert str(error.value).startswith(
        "this machine is not aligned in float32: linear 64 to 64: rows 0 to 1 alone: 1 of 1 rows differ, by up to "
    )
    assert "\n" not in str(error.value)


def test_linear_that_depends_on_the_row_count_of_one_shape_fails(monkeypatch):
    sound = module("linear")._product
    broken = lambda x, weight, bias: (few_rows_in_two_halves if weight.shape == (70, 50) else sound)(x, weight, bias)
    monkeypatch.setattr(module("linear"), "_product", broken)
    assert failed(shapes=[(50, 71)]) == []
    assert failed(shapes=[(50, 70)]) == ["linear 50 to 70"]


def test_linear_that_depends_on_the_place_of_a_row_fails(monkeypatch):
    def broken(x, weight, bias):
        out = x @ weight.t()
        out[-1] = out[-1] * (1 + 2**-22)
        return out

    monkeypatch.setattr(module("linear"), "_product", broken)
    assert "linear with few outputs" in failed()


def test_linear_that_depends_on_the_thread_count_fails(monkeypatch):
    sound = module("linear")._product
    monkeypatch.setattr(module("linear"), "_product", lambda *args: sound(*args) * torch.get_num_threads())
    with threads(2):
        assert failed() == ["number of threads"]
        assert failed(threads=()) == []


def test_norm_that_depends_on_the_row_count_fails(monkeypatch):
    def broken(x, residual, weight, eps):
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
        return x * scale * weight * (1 + len(x) * 2**-22), residual, scale

    monkeypatch.setattr(module("rms_norm")._RmsNorm, "forward", staticmethod(broken))
    assert failed() == ["rms_norm", "rms_norm of heads"]


def test_activation_on_strided_halves_fails(monkeypatch):
    broken = lambda gate_up: torch.nn.functional.silu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1]
    monkeypatch.setattr(module("swiglu")._SwiGlu, "forward", staticmethod(broken))
    assert failed() == ["swiglu"]


def test_softmax_that_treats_a_single_row_otherwise_fails(monkeypatch):
    def broken(logits, *, temperature):
        out = torch.log_softmax(logits.float() / temperature, -1)
        return out.nextafter(out + 1) if len(logits) == 1 else out

    monkeypatch.setattr(module("probe"), "tempered_logprobs", broken)
    assert failed() == [f"log-softmax over {size}" for size in (20, 1000, 40000)]


def test_attention_that_differs_over_the_cache_fails(monkeypatch):
    sound = module("probe").paged_attention
    monkeypatch.setattr(module("probe"), "paged_attention", lambda *args, window: sound(*args, window=window) * 1.0001)
    assert failed() == ["attention 4, 2, 32"]


def fused_that(factor):
    """The attention kernel, its output times a factor of (queries, keys)."""
    sound = module("attention_kernel").fused

    def broken(queries, keys, values, mask=None, *, causal=False):
        out, lse = sound(queries, keys, values, mask, causal=causal)
        return out * factor(queries, keys), lse

    return broken


def test_attention_that_differs_for_few_queries_fails(monkeypatch):
    broken = fused_that(lambda queries, keys: 1 if queries.shape[2] > 16 else 1 + 2**-20)
    monkeypatch.setattr(module("attention_kernel"), "fused", broken)
    assert failed() == ["attention 4, 2, 32"]
    monkeypatch.setattr(module("probe"), "fused", broken)
    assert failed() == ["attention kernel, number of rows", "attention 4, 2, 32"]


def test_attention_that_depends_on_the_padded_keys_fails(monkeypatch):
    broken = fused_that(lambda queries, keys: 1 + keys.shape[2] * 2**-22)
    monkeypatch.setattr(module("attention_kernel"), "fused", broken)
    assert failed() == ["attention 4, 2, 32"]
    monkeypatch.setattr(module("probe"), "fused", broken)
    assert failed() == ["attention kernel, number of keys", "attention 4, 2, 32"]


def test_a_difference_is_described():
    result = module("probe")._result("sums", [("first", torch.ones(3, 2), torch.tensor([[1.0, 1], [1, 3], [1, 1]]))])
    assert result == ProbeResult(name="sums", passed=False, detail="first: 1 of 3 rows differ, by up to 2.0e+00")
