import pytest
import torch
from conftest import SETTINGS
from rollouts import all_bits, ask, audit, bits, finish, mixed, prompt

from rz.engine.plain import PlainEngine
from rz.engine.vllm import VllmEngine
from rz.models.compute import compute_params
from rz.models.dense import random_params
from rz.models.make import make_tiny


def undelivered(engine, params, dtype=torch.float32):
    """Names of the engine's tensors that are not, bit for bit, what the learner computes with."""
    expected, got = compute_params(params, dtype=dtype), engine.weights()
    assert got.keys() == expected.keys()
    raw = lambda value: value.detach().contiguous().view(torch.uint8)
    return [name for name, value in expected.items() if not torch.equal(raw(value), raw(got[name]))]


def fresh(model, params):
    return PlainEngine(model[1], params, dtype=torch.float32, **SETTINGS)


def test_every_tensor_arrives_bit_for_bit_and_behaviour_changes(engine, model, other):
    before = all_bits(finish(engine, mixed()))
    assert undelivered(engine, model[2]) == []
    engine.publish(other, engine.version + 1)
    assert undelivered(engine, other) == [] and undelivered(engine, model[2])
    after = all_bits(finish(engine, mixed()))
    assert after != before and after == all_bits(finish(fresh(model, other), mixed()))


@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.1.qkv.weight", "layers.0.k_norm.weight"])
def test_one_tensor_left_behind_is_found(engine, model, other, name):
    engine.publish(other, engine.version + 1)
    engine.weights()[name].copy_(model[2][name])
    assert undelivered(engine, other) == ([name] if not name.endswith("norm.weight") else [])
    engine.weights()[name].add_(2.0**-20)
    assert undelivered(engine, other) == [name]
    assert audit({engine.version: other}, model[1], finish(engine, mixed()).values()).differing > 0


def test_bfloat16_tensors_arrive_bit_for_bit(vllm_bfloat16, model, other):
    plain = PlainEngine(*model[1:], dtype=torch.bfloat16, **SETTINGS)
    for engine in (vllm_bfloat16, plain):
        for params in (other, model[2]):
            engine.publish(params, engine.version + 1)
            assert undelivered(engine, params, torch.bfloat16) == []


def test_an_untied_head_and_biases_arrive_and_align(several, tmp_path):
    config = make_tiny(tmp_path / "qwen2", family="qwen2", vocab_size=96, tied=False)
    weights = [
        {k: v + 0.1 * torch.randn(v.shape, generator=torch.Generator().manual_seed(seed)) for k, v in base.items()}
        for seed, base in enumerate([random_params(config, seed=5)] * 2)
    ]
    engine = VllmEngine(tmp_path / "qwen2", config, weights[0], dtype=torch.bfloat16, **SETTINGS)
    done = finish(engine, mixed(6))
    assert undelivered(engine, weights[0], torch.bfloat16) == []
    engine.publish(weights[1], 1)
    assert undelivered(engine, weights[1], torch.bfloat16) == []
    rollouts = [*done.values(), *finish(engine, mixed(6)).values()]
    result = audit(dict(enumerate(weights)), config, rollouts, torch.bfloat16)
    engine.close()
    assert result.differing == 0 and result.tokens == 2 * sum(request.max_tokens for request in mixed(6))


def test_publishing_copies(engine, model):
    params = {name: value.clone() for name, value in model[2].items()}
    engine.publish(params, engine.version + 1)
    for value in params.values():
        value.zero_()
    assert undelivered(engine, model[2]) == []


def _without(params, name):
    return {key: value for key, value in params.items() if key != name}


@pytest.mark.parametrize(
    "change, rise, message",
    [
        (lambda p: p, 0, r"version must be > (\d+), got \1"),
        (lambda p: p, -1, r"version must be > \d+, got"),
        (lambda p: _without(p, "layers.1.down.weight"), 1, "every tensor of the model, got none named layers.1.down"),
        (lambda p: _without(p, "embed_tokens.weight"), 1, "got none named embed_tokens.weight"),
        (lambda p: p | {"lm_head.weight": p["embed_tokens.weight"]}, 1, "tensors only, got lm_head.weight"),
        (lambda p: p | {"norm.weight": torch.ones(63)}, 1, r"norm.weight must have the shape \[64\], got \[63\]"),
        (lambda p: p | {"norm.weight": torch.ones(1)}, 1, r"norm.weight must have the shape \[64\], got \[1\]"),
    ],
)
def test_a_bad_publish_is_refused_and_changes_nothing(engine, model, other, change, rise, message):
    engine.submit(ask(0, prompt(9)))
    for _ in range(4):
        engine.step()
    version, before = engine.version, bits(engine.running()[0])
    with pytest.raises(ValueError, match=message):
        engine.publish(change(dict(other)), version + rise)
    assert engine.version == version and undelivered(engine, model[2]) == []
    assert bits(engine.running()[0]) == before
    (rollout,) = finish(engine).values()
    assert bits(rollout) == bits(*finish(fresh(model, model[2]), [ask(0, prompt(9))]).values())


def test_a_warm_prefix_is_not_reused_under_new_weights(model, other, vllm_float32):
    shared = prompt(260, 1)
    group = lambda: [ask(i, shared + prompt(3, i), max_tokens=20) for i in range(6)]
    vllm_float32.publish(model[2], vllm_float32.version + 1)
    finish(vllm_float32, group()[:1])
    cached = vllm_float32.cached_tokens
    finish(vllm_float32, group())
    assert vllm_float32.cached_tokens - cached == 6 * 256  # two blocks of 128 each: the cache was warm
    vllm_float32.submit(ask(9, shared + prompt(50, 9), max_tokens=60))  # and again with a response in flight
    for _ in range(8):
        vllm_float32.step()
    vllm_float32.publish(other, vllm_float32.version + 1)
    done = all_bits({key: r for key, r in finish(vllm_float32, group()).items() if key != (9, 0)})
    newcomer = VllmEngine(*model[:2], other, dtype=torch.float32, **SETTINGS)
    assert done == all_bits(finish(newcomer, group()))
    newcomer.close()


def test_tokens_after_a_publish_in_flight_are_of_the_new_weights_alone(engine, model, other):
    first = engine.version
    requests = [ask(i, prompt(20 + 30 * i, i), max_tokens=60, temperature=(1.0, 0.6)[i % 2]) for i in range(5)]
    for request in requests:
        engine.submit(request)
    for _ in range(25):
        engine.step()
    engine.publish(other, first + 1)
    done = finish(engine)
    result = audit({first: model[2], first + 1: other}, model[1], done.values())
    assert (result.tokens, result.differing) == (300, 0)
    assert sum(len(rollout.policy_versions.unique()) == 2 for rollout in done.values()) >= 3


def test_a_publish_at_any_token_loses_repeats_and_rescores_none(engine, model, other):
    ids, tokens = prompt(9), 10
    for index in range(tokens):
        first = engine.version
        engine.publish(model[2], first + 1)
        engine.submit(ask(0, ids, max_tokens=tokens))
        while len(engine.running()[0].response_ids) < index:
            engine.step()
        before = engine.running()[0]
        engine.publish(other, first + 2)
        assert bits(engine.running()[0]) == bits(before)
        (rollout,) = finish(engine).values()
        assert rollout.policy_versions.tolist() == [first + 1] * index + [first + 2] * (tokens - index)
        assert rollout.response_ids[:index] == before.response_ids
        assert torch.equal(rollout.behaviour_logprobs[:index], before.behaviour_logprobs)
        result = audit({first + 1: model[2], first + 2: other}, model[1], [rollout])
        assert (result.tokens, result.differing) == (tokens, 0)


def test_versions_never_fall_under_many_publishes(vllm_bfloat16, model, other):
    engine, weights = vllm_bfloat16, {}
    for request in mixed(16):
        engine.submit(request)
    done, steps = [], 0
    while engine.running():
        if steps % 30 == 0:
            engine.publish((model[2], other)[steps // 30 % 2], engine.version + 1)
            weights[engine.version] = (model[2], other)[steps // 30 % 2]
        done += engine.step()
        steps += 1
    assert len(weights) > 3 and all((rollout.policy_versions.diff() >= 0).all() for rollout in done)
    result = audit(weights, model[1], done, torch.bfloat16)
    assert (result.tokens, result.differing) == (sum(request.max_tokens for request in mixed(16)), 0)
