import json
import subprocess
from types import SimpleNamespace

import attrs
import pytest
import torch
from rollouts import all_bits, finish, mixed

from rz.audit import replay
from rz.verify import prove as prove_module
from rz.verify.prove import ProveConfig, prove
from rz.verify.scenarios import (
    CONTROL,
    ROOMY,
    SMALL,
    engines,
    moved_by_one_ulp,
    prove_scenario,
    requests,
    stock_rollouts,
    weights_of,
)

SMALLER = {
    "one at a time": {},
    "batches of 64": {"batch": 8, "responses": (10, 40), "shows": {"batch": 8}},
    "long": {"long": ((1, 400), (480, 30), (129, 1), (256, 200)), "shows": {"longest_prompt": 480}},
    "shared prefix": {"batch": 8, "shows": {"cached_tokens": 256}},
    "publishes": {"batch": 8, "responses": (90, 160), "publish_every": 60},
    "preempted": {"batch": 8, "prompts": (60, 200), "responses": (60, 120)},
    "preempted, with publishes": {"batch": 8, "prompts": (60, 200), "responses": (60, 120)},
}


@pytest.mark.parametrize("dtype, scenarios", [("float32", ROOMY), ("bfloat16", ROOMY[3:4] + SMALL)])
def test_no_token_differs_in_a_small_version_of_each_scenario(model, request, dtype, scenarios):
    engine = request.getfixturevalue(f"vllm_{dtype}")
    for scenario in scenarios:
        small = attrs.evolve(scenario, **SMALLER[scenario.name])
        kind = getattr(torch, dtype)
        engine.publish(weights_of(model[2], engine.version + 1), engine.version + 1)
        found, rollouts = prove_scenario(engine, model[2], small, dtype=kind, tokens=60, seed=4)
        assert found["differing"] == 0 and found["max_abs"] == 0 and found["tokens"] >= 60
        assert found["tokens"] == sum(len(rollout.response_ids) for rollout in rollouts)
        assert found["batch"] <= small.batch and (found["versions"] > 1) == bool(small.publish_every)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_controls_differ(several, model, dtype):
    folder, config, params = model
    wanted = list(requests(CONTROL, tokens=300, vocab_size=config.vocab_size, seed=1))
    stock = stock_rollouts(folder, dtype=dtype, wanted=wanted)
    assert [len(rollout.response_ids) for rollout in stock] == [request.max_tokens for request in wanted]
    result = replay(params, config, stock, version=0, dtype=dtype)
    # The same mathematics, so close; not the same bits.
    assert result.differing > 0 and result.max_abs < (1e-4 if dtype == torch.float32 else 1.0)
    moved = moved_by_one_ulp(params, dtype=dtype)
    assert sum(int((moved[name] != value).sum()) for name, value in params.items()) == 1


def test_one_weight_moved_by_one_unit_shows(engine, model):
    rollouts = list(finish(engine, mixed()).values())
    count = lambda params: replay(params, model[1], rollouts, version=engine.version, dtype=torch.float32).differing
    assert count(model[2]) == 0 and count(moved_by_one_ulp(model[2], dtype=torch.float32)) > 0


def test_a_cache_full_of_nan_changes_nothing(vllm_float32, model):
    vllm_float32.publish(model[2], vllm_float32.version + 1)
    expected = all_bits(finish(vllm_float32, mixed()))
    vllm_float32.publish(model[2], vllm_float32.version + 1)  # the prefix cache is dropped, so that all is computed
    attention = vllm_float32._model.attention
    for layer in attention:
        layer.kv_cache.fill_(torch.nan)
    assert all_bits(finish(vllm_float32, mixed())) == expected
    assert any(layer.kv_cache.isnan().any() for layer in attention)


def test_a_scenario_that_does_not_do_what_it_is_for_is_an_error(vllm_float32, model):
    idle = attrs.evolve(ROOMY[0], batch=2, shows={"preemptions": 1})
    with pytest.raises(RuntimeError, match="preemptions of one at a time must be >= 1, got 0"):
        prove_scenario(vllm_float32, model[2], idle, dtype=torch.float32, tokens=1, seed=0)


def test_the_scenarios_cover_what_is_claimed():
    wanted = [list(requests(scenario, tokens=500, vocab_size=96, seed=0)) for scenario in ROOMY]
    assert {len(request.prompt_ids) for request in wanted[2]} >= {1, 2000}
    assert max(request.max_tokens for request in wanted[2]) > 1000
    assert {scenario.batch for scenario in ROOMY} >= {1, 64}
    assert {request.temperature for request in wanted[1]} == {0.6, 1.0}
    assert len({tuple(request.prompt_ids[:300]) for request in wanted[3]}) == 1
    for turn in range(4):
        for settings, scenarios in engines(turn):
            for request in (r for s in scenarios for r in requests(s, tokens=500, vocab_size=96, seed=turn)):
                assert len(request.prompt_ids) + request.max_tokens <= settings["max_length"]
            assert settings["step_tokens"] >= settings["slots"]


def test_requests_are_a_function_of_their_arguments_and_reach_the_tokens():
    draw = lambda seed: list(requests(ROOMY[1], tokens=9000, vocab_size=96, seed=seed))
    assert draw(3) == draw(3) != draw(4)
    assert 9000 <= sum(request.max_tokens for request in draw(3)) < 9200


def test_weights_of_a_version_move_every_matrix(model):
    assert all(torch.equal(weights_of(model[2], 0)[name], value) for name, value in model[2].items())
    assert all(not torch.equal(weights_of(model[2], 1)[name], value) for name, value in model[2].items())
    assert all(torch.equal(weights_of(model[2], 5)[name], weights_of(model[2], 5)[name]) for name in model[2])


# The command


@pytest.mark.parametrize("differing, control, passed", [(0, 3, True), (2, 3, False), (0, 0, False)])
def test_processes_are_put_together(monkeypatch, differing, control, passed):
    calls = []

    def child(command, *, env, stdout):
        settings = json.loads(command[-1])
        calls.append((env["OMP_NUM_THREADS"], settings["tokens"], settings["dtypes"], settings["number"]))
        result = {"tokens": 500, "differing": differing, "max_abs": 0.5 * bool(differing), "control": False}
        other = {"tokens": 7, "differing": control, "max_abs": 1.0, "control": True}
        with open(settings["out"], "w") as file:
            json.dump([result, other], file)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(prove_module.subprocess, "run", child)
    result = prove(ProveConfig(tokens=1001, threads=(1, 2)))
    both = ["float32", "bfloat16"]
    assert calls == [("1", 251, both, 0), ("2", 251, both, 1)]  # 1001 tokens over four, rounded up
    assert (result["tokens"], result["differing"], result["passed"]) == (1000, 2 * differing, passed)
    assert result["max_abs"] == (0.5 if differing else 0.0) and len(result["results"]) == 4
    assert (result["controls"], result["controls_differing"]) == (2, 2 if control else 0)


def test_a_process_that_fails_ends_the_proof(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=3))
    with pytest.raises(RuntimeError, match="the proof with 2 threads must end, got exit status 3"):
        prove(ProveConfig(threads=(2,)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokens": 0}, "tokens must be >= 1, got 0"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"threads": ()}, r"threads must be one or more counts >= 1, got \(\)"),
        ({"threads": (1, 0)}, r"threads must be one or more counts >= 1, got \(1, 0\)"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ProveConfig(**change)
