import pytest
import torch
from conftest import SETTINGS
from rollouts import all_bits, ask, bits, finish, mixed, prompt

from rz.engine.plain import PlainEngine
from rz.engine.vllm import VllmEngine

# Refusals


@pytest.mark.parametrize(
    "request_, message",
    [
        (ask(0, prompt(4)), r"request id must be new, got \(0, 0\)"),
        (ask(1, prompt(501)), r"max_length 512, got 501 \+ 12 = 513"),
        (ask(1, prompt(4), max_tokens=509), r"max_length 512, got 4 \+ 509 = 513"),
        (ask(1, [5, 96]), r"prompt_ids must be in \[0, 96\), got 96"),
        (ask(1, [-1]), r"prompt_ids must be in \[0, 96\), got -1"),
        (ask(1, [5], stop_ids=[3, 96]), r"stop_ids must be in \[0, 96\), got 96"),
    ],
)
def test_a_request_that_cannot_run_is_refused_and_queues_nothing(engine, request_, message):
    engine.submit(ask(0, prompt(9)))
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    assert [rollout.prompt_index for rollout in engine.running()] == [0]
    assert [key for key in finish(engine)] == [(0, 0)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slots": 0}, "slots must be >= 1, got 0"),
        ({"max_length": 1}, "max_length must be >= 2, got 1"),
        ({"step_tokens": 0}, "step_tokens must be >= 1, got 0"),
        ({"step_tokens": 7}, "step_tokens must be >= slots 8, got 7"),
        ({"max_length": 4097}, "max_length must be <= the model's max_positions 4096, got 4097"),
        ({"block_size": 48}, "block_size must be a multiple of 32, got 48"),
        ({"block_size": 0}, "block_size must be a multiple of 32, got 0"),
        ({"cache_tokens": 511}, r"cache_tokens must hold one response of max_length \(512\), got 511"),
    ],
)
def test_vllm_settings_that_cannot_work_are_refused(model, change, message):
    with pytest.raises(ValueError, match=message):
        VllmEngine(*model, dtype=torch.float32, **(SETTINGS | change))


@pytest.mark.parametrize("name", ["slots", "max_length", "step_tokens"])
def test_plain_settings_that_cannot_work_are_refused(model, name):
    with pytest.raises(ValueError, match=f"{name} must be >= \\d, got 0"):
        PlainEngine(*model[1:], dtype=torch.float32, **(SETTINGS | {name: 0}))


def test_plain_refuses_what_is_longer_than_the_model(model):
    with pytest.raises(ValueError, match="max_length must be <= the model's max_positions 4096, got 4097"):
        PlainEngine(*model[1:], dtype=torch.float32, **(SETTINGS | {"max_length": 4097}))


def test_an_engine_does_not_start_on_part_of_a_model(model):
    folder, config, params = model
    part = {name: value for name, value in params.items() if name != "layers.1.o.weight"}
    for start in (lambda: VllmEngine(folder, config, part, dtype=torch.float32, **SETTINGS),
                  lambda: PlainEngine(config, part, dtype=torch.float32, **SETTINGS)):  # fmt: skip
        with pytest.raises(ValueError, match="params must hold layers.1.o.weight"):
            start()


# Abort and close


def test_running_shows_what_there_is_so_far_and_abort_forgets_it(engine):
    expected = all_bits(finish(engine, mixed()))
    for request in mixed():
        engine.submit(request)
    for _ in range(12):
        engine.step()
    shown = engine.running()
    order = [(rollout.prompt_index, rollout.sample) for rollout in shown]
    assert order == sorted(order) and {rollout.stop_reason for rollout in shown} == {"running"}
    for rollout in shown:
        tokens, logprobs, _ = expected[rollout.prompt_index, rollout.sample]
        count = len(rollout.response_ids)
        assert rollout.response_ids == tokens[:count] and bits(rollout)[1] == logprobs[:count]
    gone = [order[0], order[-1]]  # one that runs, and one that still waits for a slot
    engine.abort(iter([*gone, gone[0], (77, 7)]))
    assert [(rollout.prompt_index, rollout.sample) for rollout in engine.running()] == order[1:-1]
    finish(engine)
    assert all_bits(finish(engine, mixed())) == expected  # the ids are free again, the slots too


def test_a_step_with_nothing_to_do_returns_nothing(engine):
    assert engine.step() == [] and engine.running() == []


@pytest.mark.parametrize("kind", ["plain", "vllm"])
def test_a_closed_engine_closes_again_and_does_nothing_else(kind, model, several):
    if kind == "plain":
        engine = PlainEngine(*model[1:], dtype=torch.float32, **SETTINGS)
    else:
        engine = VllmEngine(*model, dtype=torch.float32, **SETTINGS)
    engine.submit(ask(0, prompt(4)))
    engine.step()
    engine.close()
    engine.close()
    for use in (lambda: engine.submit(ask(1, prompt(4))), engine.step, engine.running, engine.weights,
                lambda: engine.publish(model[2], 1), lambda: engine.abort([(0, 0)])):  # fmt: skip
        with pytest.raises(RuntimeError, match="engine must be open, got one that was closed"):
            use()
