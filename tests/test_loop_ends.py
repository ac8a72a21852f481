"""How a run ends before its last update: stopped, or failed."""

import asyncio
import gc
import threading
import traceback
from time import perf_counter, sleep

import attrs
import numpy as np
import pytest
from scripted_engine import Learner, ScriptedEngine, Sums, arguments, learn, plan, run, uneven

from rz import turn
from rz.loop import train

# Stopping


def test_stop_aborts_what_runs_and_returns_the_state():
    engine, stop, records = ScriptedEngine(uneven), asyncio.Event(), []

    def after_three(record):
        records.append(record)
        if len(records) == 3:
            stop.set()

    running = []
    note = lambda record: (after_three(record), running.append([(r.prompt_index, r.sample) for r in engine.running()]))
    _, state = run(engine, stop=stop, on_update=note)
    assert state.version == engine.version == 3 and state is records[-1].state
    assert engine.aborted == running[-1] != [] and not engine.running()


def test_stop_before_the_first_step():
    stop = asyncio.Event()
    stop.set()
    engine, state = ScriptedEngine(uneven), Learner()
    assert run(engine, state=state, stop=stop)[1] is state
    assert engine.steps == 0


def test_stop_set_by_another_coroutine_is_seen_between_two_steps():
    engine, stop = ScriptedEngine(lambda prompt, sample: 10**9), asyncio.Event()

    async def both():
        asyncio.get_running_loop().call_soon(stop.set)
        return await train(**arguments(engine, [], stop=stop))

    assert asyncio.run(both()).version == 0
    assert engine.steps <= 3 and len(engine.aborted) == 6


# Hangs and failures: every wait has a limit, and every error has its place in the traceback


class SleepsForEver(Sums):
    async def score(self, prompt, response_ids):
        if prompt.index == 1:
            await asyncio.Event().wait()
        return 0.0


@attrs.frozen
class BlocksForEver(Sums):
    gate: threading.Event = attrs.Factory(threading.Event)

    def score(self, prompt, response_ids):
        return self.gate.wait() if prompt.index == 1 else 0.0


LATE = r"reward of prompt 1, sample 0 must arrive within reward_timeout_s \(0.05 s\) .* \(2 of 4 are late\)"


def test_a_reward_that_sleeps_for_ever_ends_the_run():
    with pytest.raises(TimeoutError, match=LATE):
        run(ScriptedEngine(uneven), task=SleepsForEver(), settings=plan(max_lag=0), reward_timeout_s=0.05)


def test_a_reward_that_blocks_its_thread_for_ever_ends_the_run(monkeypatch):
    errors, before, task = [], set(threading.enumerate()), BlocksForEver()
    monkeypatch.setattr(threading, "excepthook", errors.append)
    with pytest.raises(TimeoutError, match=LATE):
        run(ScriptedEngine(uneven), task=task, settings=plan(max_lag=0), reward_timeout_s=0.05)
    blocked = set(threading.enumerate()) - before
    task.gate.set()
    for thread in blocked:
        thread.join()
    assert len(blocked) == 2 and all(thread.daemon for thread in blocked)  # so the process can end
    assert not errors  # a reward that comes after the end is not an error of its own


def test_a_bad_reward_does_not_wait_for_the_others():
    class Mixed(SleepsForEver):
        async def score(self, prompt, response_ids):
            return await super().score(prompt, response_ids) if prompt.index else None

    began = perf_counter()
    with pytest.raises(TypeError, match="reward of prompt 0, sample 0 must be a finite number, got None"):
        run(ScriptedEngine(uneven), task=Mixed(), settings=plan(max_lag=0), reward_timeout_s=20.0)
    assert perf_counter() - began < 20.0


def test_pending_rewards_are_cancelled_when_a_run_fails():
    cancelled = []

    class Noting(Sums):
        async def score(self, prompt, response_ids):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append((prompt.index, len(response_ids)))
                raise

    async def failing():
        with pytest.raises(OSError):
            await train(**arguments(ScriptedEngine(lambda p, s: 1 + s, fail_at=2), [], task=Noting()))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(failing())
    assert cancelled == [(0, 1), (1, 1), (2, 1)]


def test_an_engine_that_raises_ends_the_run_with_its_traceback():
    with pytest.raises(OSError, match="the engine's step 5 failed") as caught:
        run(ScriptedEngine(uneven, fail_at=5))
    assert "scripted_engine.py" in traceback.extract_tb(caught.value.__traceback__)[-1].filename


def test_a_run_that_fails_beside_an_update_waits_for_its_thread():
    """A thread that still computes when the interpreter ends aborts the process."""
    begun, ended = threading.Event(), []

    def slow(state, batch):
        begun.set()
        sleep(0.1)
        ended.append(state.version)
        return learn(state, batch)

    class Failing(ScriptedEngine):
        def step(self):
            if begun.is_set():
                raise OSError("the engine failed")
            return super().step()

    with pytest.raises(OSError, match="the engine failed"):
        run(Failing(uneven), update=slow, overlap_steps=10**9, settings=plan(max_lag=8))
    assert ended == [0]


@pytest.mark.parametrize("duration", [10**9, None])
def test_an_engine_that_stalls_ends_the_run(duration, monkeypatch):
    monkeypatch.setattr(turn, "STALL_STEPS", 20)

    class Stalled(ScriptedEngine):
        def step(self):
            self.steps += 1
            if duration is None:
                self._live.clear()  # and forgets its requests
            return []

    engine = Stalled(uneven)
    flying = r"6 responses are in flight, .* \[\(0, 0\)" if duration else "0 responses are in flight"
    with pytest.raises(RuntimeError, match=f"must sample a token within 20 steps, got none; {flying}"):
        run(engine)
    assert engine.steps == 40


@pytest.mark.parametrize("length", [50, 7])
def test_a_long_response_is_no_stall(length, monkeypatch):
    # With length 7 each wave of responses is counted once, after 5 steps, and has the same number of tokens then.
    monkeypatch.setattr(turn, "STALL_STEPS", 5)
    records, _ = run(ScriptedEngine(lambda prompt, sample: length), settings=plan(slots=4, max_lag=0))
    assert len(records) == 8


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("answer", "error", "rule"),
    [
        (float("nan"), ValueError, "got nan"),
        (float("-inf"), ValueError, "got -inf"),
        (None, TypeError, "got None"),
        ("1", TypeError, "got '1'"),
        (ZeroDivisionError("by zero"), RuntimeError, r"got an error from score: ZeroDivisionError\('by zero'\)"),
        (StopIteration(), RuntimeError, "got an error from score: "),
        (asyncio.CancelledError(), RuntimeError, r"got an error from score: CancelledError\(\)"),
    ],
)
def test_a_bad_reward_names_prompt_sample_and_rule(answer, error, rule, asynchronous):
    def score(prompt, response_ids):
        if (prompt.index, len(response_ids)) != (1, 2):
            return 0.0
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def score_later(prompt, response_ids):
        return score(prompt, response_ids)

    class Bad(Sums):
        pass

    Bad.score = staticmethod(score_later if asynchronous else score)
    with pytest.raises(error, match=f"reward of prompt 1, sample 1 must be a finite number, {rule}") as caught:
        run(ScriptedEngine(lambda prompt, sample: 1 + sample), task=Bad())
    if isinstance(answer, ZeroDivisionError):
        assert caught.value.__cause__ is answer


def test_numbers_of_other_libraries_are_rewards():
    class Numpy(Sums):
        def score(self, prompt, response_ids):
            return np.float32(0.5)  # no subclass of float

    records, _ = run(ScriptedEngine(uneven), task=Numpy())
    assert records[0].groups[0].rewards == (0.5, 0.5)


def test_an_update_that_raises_passes_through():
    def fail(state, batch):
        raise FloatingPointError("loss is nan")

    with pytest.raises(FloatingPointError, match="loss is nan"):
        run(ScriptedEngine(uneven), update=fail)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (dict(state=Learner(4)), r"engine must have the version that the run goes on from \(4\), got 0"),
        (dict(reward_timeout_s=0.0), "reward_timeout_s must be > 0 and finite, got 0.0"),
        (dict(reward_timeout_s=float("inf")), "reward_timeout_s must be > 0 and finite, got inf"),
        (dict(first_prompt=-1), "first_prompt must be >= 0, got -1"),
        (dict(max_tokens=0), "max_tokens must be >= 1, got 0"),
        (dict(temperature=0.0), "temperature must be > 0 and finite, got 0.0"),
    ],
)
def test_impossible_arguments_name_field_rule_and_value(changes, rule):
    with pytest.raises(ValueError, match=rule):
        run(ScriptedEngine(uneven), **changes)


# Going on without a reward


@attrs.frozen
class Half(Sums):
    """Prompts 1 and 4 have a reward that is late, raises or is NaN."""

    how: str = "late"

    async def score(self, prompt, response_ids):
        if prompt.index not in (1, 4):
            return 1.0
        if self.how == "late":
            await asyncio.Event().wait()
        if self.how == "raises":
            raise OSError("no sandbox")
        return float("nan")


@pytest.mark.parametrize("how", ["late", "raises", "nan"])
def test_a_group_without_a_reward_is_left_out_and_counted(how, caplog):
    engine = ScriptedEngine(uneven)
    settings = plan(max_lag=0, updates=3)
    records, state = run(engine, task=Half(how=how), settings=settings, reward_timeout_s=0.05, drop_unscored=True)
    assert state.version == 3
    assert [[group.prompt.index for group in record.groups] for record in records] == [[0], [2, 3], [5]]
    assert [[group.prompt.index for group in record.left_out] for record in records] == [[1], [], [4]]
    assert [record.metrics["dropped_groups"] for record in records] == [1, 0, 1]
    assert len(records[0].batch.rewards) == 2 and all(np.isnan(records[0].left_out[0].rewards))
    gc.collect()
    assert not caplog.records  # asyncio tells of errors that nobody has read


def test_an_update_without_any_group_left_ends_the_run():
    with pytest.raises(
        RuntimeError, match=r"at least one group with all its rewards, got none: .*OSError\('no sandbox'\)"
    ):
        run(ScriptedEngine(uneven), task=Half(how="raises"), settings=plan(groups_per_update=1), drop_unscored=True)
