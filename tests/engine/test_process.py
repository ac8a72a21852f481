"""An engine in a process of its own behaves as the one inside it."""

import os
import signal
from functools import partial
from time import perf_counter

import attrs
import pytest
import torch
from conftest import SETTINGS
from rollouts import (
    all_bits,
    ask,
    audit,
    demanding_engine,
    finish,
    half_engine,
    hanging_engine,
    mixed,
    no_engine,
    picky_engine,
    plain_engine,
    prompt,
    vllm_engine,
)

from rz.engine.plain import PlainEngine
from rz.engine.process import ProcessEngine


@pytest.fixture(scope="module")
def remote(model):
    engine = ProcessEngine(partial(plain_engine, model[1], **SETTINGS), model[2], limit_s=60.0)
    yield engine
    engine.close()


def test_responses_publishes_and_continuations_are_those_of_the_engine_inside(remote, model, other):
    inside = PlainEngine(*model[1:], dtype=torch.float32, version=remote.version, **SETTINGS)
    for request in mixed():
        remote.submit(request)
        inside.submit(request)
    for version in (1, 2):
        for _ in range(9):
            assert all_bits({r.sample: r for r in remote.step()}) == all_bits({r.sample: r for r in inside.step()})
        params = (model[2], other)[version % 2]
        for engine in (remote, inside):
            engine.publish(params, version)
    live = lambda engine: {(r.prompt_index, r.sample): r for r in engine.running()}
    rest = live(remote)
    assert rest and all_bits(rest) == all_bits(live(inside)) and remote.version == 2
    remote.abort(rest)
    assert not remote.running()
    for request in mixed():
        if request.id in rest:
            remote.submit(request, rest[request.id])
    got, expected = finish(remote), finish(inside)
    assert all_bits(got) == all_bits(expected)
    assert all(torch.equal(got[key].policy_versions, expected[key].policy_versions) for key in got)
    assert audit({0: model[2], 1: other, 2: model[2]}, model[1], got.values()).differing == 0


def test_a_publish_copies_and_a_bad_one_changes_nothing(remote, model, other):
    params = {name: value.clone() for name, value in other.items()}
    remote.publish(params, remote.version + 1)
    for value in params.values():
        value.zero_()
    with pytest.raises(ValueError, match=r"norm.weight must have the shape \[64\], got \[1\]"):
        remote.publish(other | {"norm.weight": torch.ones(1)}, remote.version + 1)
    fresh = PlainEngine(model[1], other, dtype=torch.float32, **SETTINGS)
    assert all_bits(finish(remote, mixed(4))) == all_bits(finish(fresh, mixed(4)))


def test_a_request_that_could_never_run_is_refused_at_once(remote):
    with pytest.raises(ValueError, match="prompt tokens plus max_tokens must be <= max_length 512"):
        remote.submit(ask(0, prompt(600)))
    remote.submit(ask(0, prompt(9)))
    with pytest.raises(ValueError, match=r"request id must be new, got \(0, 0\) which is running"):
        remote.submit(ask(0, prompt(9)))
    remote.abort([(0, 0)])
    assert not remote.running() and remote.step() == []


def test_what_the_engine_refuses_is_raised_by_the_next_call_and_the_others_run(model):
    engine = ProcessEngine(partial(picky_engine, model[1], **SETTINGS), model[2], limit_s=60.0)
    for index in range(4):
        engine.submit(ask(index, prompt(9)))
    for refused in (0, 2):  # neither call is made
        with pytest.raises(ValueError, match=f"index must be no multiple of 2, got {refused}") as caught:
            engine.step()
        assert "in the engine process" in str(caught.value.__cause__) and "in submit" in str(caught.value.__cause__)
    running = engine.running()
    assert [(rollout.prompt_index, rollout.response_ids) for rollout in running] == [(1, ()), (3, ())]
    engine.submit(ask(4, prompt(9)))
    with pytest.raises(ValueError, match="got 4"):
        engine.publish(model[2], 1)
    assert engine.version == 0
    engine.submit(ask(6, prompt(9)))
    engine.close()  # whatever was still to be sent
    assert not engine._child.is_alive()
    with pytest.raises(RuntimeError, match="engine must be open, got one that was closed"):
        engine.submit(ask(7, prompt(9)))


@pytest.mark.parametrize("part", ["send_bytes", "poll", "recv_bytes"])
def test_ctrl_c_in_any_part_of_a_call_closes_the_engine(model, part):
    engine = ProcessEngine(partial(plain_engine, model[1], **SETTINGS), model[2], limit_s=60.0)
    engine.submit(ask(0, prompt(9)))

    def interrupted(self, *arguments):
        getattr(super(type(self), self), part)(*arguments)
        raise KeyboardInterrupt

    engine._pipe.__class__ = type("Interrupted", (type(engine._pipe),), {part: interrupted})
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(RuntimeError, match="engine must be open, got one that was closed"):
        engine.running()
    engine.close()
    assert not engine._child.is_alive()


def test_ctrl_c_among_the_responses_of_a_step_closes_the_engine(model, monkeypatch):
    engine = ProcessEngine(partial(plain_engine, model[1], **SETTINGS), model[2], limit_s=60.0)
    engine.submit(attrs.evolve(ask(0, prompt(9)), max_tokens=1))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rz.engine.process._unpacked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(RuntimeError, match="engine must be open, got one that was closed"):
        engine.running()
    engine.close()


def test_a_child_that_stops_reading_is_named_within_the_limit(model):
    engine = ProcessEngine(partial(plain_engine, model[1], **SETTINGS), model[2], limit_s=60.0)
    for index in range(1000):
        engine.submit(ask(index, prompt(400)))
    os.kill(engine._child.pid, signal.SIGSTOP)
    engine._limit(0.3)
    began = perf_counter()
    with pytest.raises(TimeoutError, match=r"engine process must answer step within 0.3 s, got nothing"):
        engine.step()
    assert perf_counter() - began < 3
    engine.close()
    assert not engine._child.is_alive()


@pytest.mark.parametrize(("then", "error"), [("ends", RuntimeError), ("hangs", TimeoutError)])
def test_half_an_answer(model, then, error):
    engine = ProcessEngine(partial(half_engine, model[1], then=then, **SETTINGS), model[2], limit_s=60.0)
    engine._limit(1.0)
    rule = "live as long as the run, got its end during step: killed by SIGKILL" if then == "ends" else "answer step"
    with pytest.raises(error, match=f"engine process must {rule}"):
        engine.step()
    engine.close()
    assert not engine._child.is_alive()


def test_an_engine_that_cannot_start_says_why(model):
    with pytest.raises(ValueError, match="slots must be >= 1, got 0"):
        ProcessEngine(no_engine, model[2], limit_s=60.0)


def test_a_killed_engine_is_named_at_once(model):
    engine = ProcessEngine(partial(plain_engine, model[1], **SETTINGS), model[2], limit_s=60.0)
    engine.submit(ask(0, prompt(9)))
    os.kill(engine._child.pid, signal.SIGKILL)
    began = perf_counter()
    with pytest.raises(
        RuntimeError, match=r"must live as long as the run, .* step: killed by SIGKILL \(out of memory\?\)"
    ):
        engine.step()
    assert perf_counter() - began < 1.5
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="engine must be open, got one that was closed"):
        engine.step()


def test_a_hanging_engine_is_named_within_its_limit(model):
    engine = ProcessEngine(partial(hanging_engine, model[1], **SETTINGS), model[2], limit_s=20.0)
    engine._limit_s = 0.2
    began = perf_counter()
    with pytest.raises(TimeoutError, match=r"engine process must answer step within 0.2 s, got nothing"):
        engine.step()
    assert perf_counter() - began < 1.2
    began, engine._limit_s = perf_counter(), 20.0  # nothing waits for it a second time
    with pytest.raises(RuntimeError, match="engine must be open, got one that was closed"):
        engine.running()
    engine.close()
    assert perf_counter() - began < 5.0 and not engine._child.is_alive()


def test_an_error_that_cannot_be_made_again_is_told_by_its_text(model):
    with pytest.raises(RuntimeError, match=r"Demanding\('no room'\)") as caught:
        ProcessEngine(demanding_engine, model[2], limit_s=60.0)
    assert "in the engine process" in str(caught.value.__cause__) and "Demanding" in str(caught.value.__cause__)


def test_vllm_in_a_process_gives_the_bits_of_the_plain_engine(model, other):
    engine = ProcessEngine(partial(vllm_engine, *model[:2], **SETTINGS), model[2], limit_s=240.0)
    inside = PlainEngine(*model[1:], dtype=torch.float32, **SETTINGS)
    got, expected = finish(engine, mixed(6)), finish(inside, mixed(6))
    assert all_bits(got) == all_bits(expected)
    for one in (engine, inside):
        one.publish(other, 1)
    assert all_bits(finish(engine, mixed(6))) == all_bits(finish(inside, mixed(6)))
    engine.close()
