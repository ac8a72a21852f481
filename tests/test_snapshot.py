"""A run that goes on from a snapshot is the run that was never interrupted."""

import asyncio

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scripted_engine import Remembering, ScriptedEngine, Sums, consumed, plan, remember, run, uneven

from rz.snapshot import before, with_replay


def trace(records):
    """All that a run computed, update by update."""
    return [
        (
            record.state.seen,
            record.engine_steps,
            [(g.prompt.index, g.rewards, [r.policy_versions.tolist() for r in g.rollouts]) for g in record.groups],
        )
        for record in records
    ]


def replays(records):
    """What had been replayed of the tokens of each update, 7 where nothing had."""
    values = [record.batch.replay_logprobs for record in records]
    return [None if value is None else value.nan_to_num(7.0).tolist() for value in values]


def replay_all(params, grown):
    found = {}
    for rollout, first in grown:
        places = torch.arange(first, len(rollout.response_ids))
        found[rollout.prompt_index, rollout.sample] = places, rollout.behaviour_logprobs[places]
    return found


def fresh(state=None, version=0, **changes):
    engine = ScriptedEngine(uneven, version=version)
    state = Remembering(version) if state is None else state
    return engine, dict(state=state, update=remember, audit=replay_all) | changes


def noted(engine, arguments, taken):
    records = []

    def note(record):
        records.append(record)
        taken.append(record.snapshot() if record.snapshot else None)

    run(engine, **arguments | {"on_update": note})
    return records


MODES = st.sampled_from([{}, {"overlap_steps": 2}, {"overlap_steps": 50}])
PLANS = st.sampled_from(
    [plan(), plan(max_lag=0), plan(slots=1), plan(slots=40, max_lag=6), plan(exact_lag=2), plan(publish_every=2)]
)


@given(PLANS, MODES, st.integers(1, 8))
@examples(max_examples=60, deadline=None)
def test_a_run_from_a_snapshot_goes_on_as_the_whole(settings, mode, cut):
    mode = {} if settings.exact_lag is not None else mode
    engine, arguments = fresh(settings=settings, **mode)
    taken = []
    records = noted(engine, arguments, taken)
    snapshot = taken[cut - 1]
    if snapshot is None:
        assert settings.publish_every > 1 or settings.exact_lag
        return
    engine, arguments = fresh(snapshot.state, snapshot.plan.served, settings=settings, resume=snapshot, **mode)
    rest, _ = run(engine, **arguments)
    assert trace(rest) == trace(records[cut:]) and replays(rest) == replays(records[cut:])


@given(st.integers(1, 60), st.sampled_from([0, 2]), st.sampled_from([1, 2, 4]))
@examples(max_examples=60, deadline=None)
def test_a_run_that_fails_anywhere_leaves_the_snapshot_of_its_last_publish(step, overlap, publish_every):
    """Also where updates have consumed responses since, without a publish."""
    mode = dict(overlap_steps=overlap, settings=plan(publish_every=publish_every))
    whole, _ = run(fresh()[0], **fresh(**mode)[1])
    engine, arguments = fresh(**mode)
    engine.fail_at, ends = step, []
    arguments["on_end"] = lambda snapshot: ends.append(snapshot())
    try:
        done, _ = run(engine, **arguments)
    except OSError:
        pass
    (snapshot,) = ends
    made = snapshot.state.version
    assert made >= snapshot.plan.served
    engine, arguments = fresh(snapshot.state, snapshot.plan.served, resume=snapshot, **mode)
    rest, _ = run(engine, **arguments)
    assert trace(rest) == trace(whole[made:])
    assert replays(rest) == replays(whole[made:])


def raising(error, at):
    """remember, but the update after version `at` raises."""

    def step(state, batch):
        if state.version == at:
            raise error
        return remember(state, batch)

    return step


@pytest.mark.parametrize("donates", [False, True])
@pytest.mark.parametrize(("error", "whole"), [(ValueError("bad gradient"), True), (MemoryError("full"), False)])
def test_an_update_that_donates_and_fails_halfway_leaves_no_snapshot(donates, error, whole):
    """What a ValueError refused is as it was; what ended otherwise may have been overwritten in part."""
    ends = []
    on_end = lambda snapshot: ends.append(snapshot)
    engine, arguments = fresh(update=raising(error, 3), donates=donates, on_end=on_end)
    with pytest.raises(type(error)):
        run(engine, **arguments)
    if whole or not donates:
        assert ends[0]().state.version == 3
    else:
        with pytest.raises(
            RuntimeError, match="a snapshot must be made before an update that donates or after its pub"
        ):
            ends[0]()


def test_between_an_update_that_donates_and_its_publish_there_is_no_snapshot():
    def audit(params, grown):  # between the two
        if params["version"] == 2:
            raise OSError("no more")
        return {}

    for donates in (False, True):
        ends = []
        engine, arguments = fresh(
            audit=audit, donates=donates, on_end=lambda snapshot, ends=ends: ends.append(snapshot)
        )
        with pytest.raises(OSError, match="no more"):
            run(engine, **arguments)
        if donates:
            with pytest.raises(RuntimeError, match="a snapshot must be made"):
                ends[0]()
        else:
            assert ends[0]().state.version == 2


@pytest.mark.parametrize(
    "mode", [{"overlap_steps": 1}, {"settings": plan(publish_every=2)}, {"settings": plan(exact_lag=1)}]
)
def test_donated_state_is_refused_where_a_snapshot_needs_it(mode):
    engine, arguments = fresh(donates=True, **mode)
    with pytest.raises(ValueError, match="donates must be False with overlap_steps, publish_every > 1 or exact_lag"):
        run(engine, **arguments)


def test_a_stopped_run_leaves_its_snapshot_and_aborts():
    stop, ends = asyncio.Event(), []
    engine, arguments = fresh(stop=stop, on_end=lambda snapshot: ends.append(snapshot()))
    arguments["on_update"] = lambda record: record.state.version == 3 and stop.set()
    _, state = run(engine, **arguments)
    (snapshot,) = ends
    assert snapshot.state is state and snapshot.plan.version == 3 and not engine.running() and engine.aborted
    whole, _ = run(fresh()[0], **fresh(audit=None)[1])
    engine, arguments = fresh(snapshot.state, 3, resume=snapshot)
    rest, _ = run(engine, **arguments)
    assert trace(rest) == trace(whole[3:])


def test_rewards_that_are_known_are_not_asked_again():
    asked = []

    class Asking(Sums):
        def score(self, prompt, response_ids):
            asked.append(prompt.index)
            return len(response_ids)

    taken = []
    engine, arguments = fresh(task=Asking(), settings=plan(slots=40, max_lag=6))
    noted(engine, arguments, taken)
    snapshot = taken[2]
    known = [response for response in snapshot.responses if response.reward is not None]
    assert known and len(asked) == 32
    engine, arguments = fresh(snapshot.state, 3, task=Asking(), settings=plan(slots=40, max_lag=6), resume=snapshot)
    run(engine, **arguments)
    assert len(asked) == 32 + 20 - len(known)  # five updates of two groups of two are left


def test_another_task_or_version_is_refused():
    taken = []
    noted(*fresh(settings=plan(slots=40)), taken)

    class Other(Sums):
        def prompt(self, index):
            return attrs.evolve(super().prompt(index), token_ids=[9, 9])

    snapshot = taken[1]
    engine, arguments = fresh(snapshot.state, 2, resume=snapshot, settings=plan(slots=40))
    with pytest.raises(ValueError, match=r"prompt \d+ of the task must be the one .* began with, got another"):
        run(engine, **arguments | {"task": Other()})
    engine, arguments = fresh(snapshot.state, 1, resume=snapshot, settings=plan(slots=40))
    with pytest.raises(ValueError, match=r"engine must have the version that the run goes on from \(2\), got 1"):
        run(engine, **arguments)


def test_cutting_at_a_version_by_hand():
    # One group an update, lag 8, four slots: an update after each step, so each token of prompt 0 has its own version.
    engine = ScriptedEngine(lambda prompt, sample: 4 if prompt == 0 else 1)
    records, _ = run(engine, settings=plan(groups_per_update=1, max_lag=8, slots=4))
    rollout = next(r for r in consumed(records) if r.prompt_index == 0)
    assert rollout.policy_versions.tolist() == [0, 1, 2, 3]
    cut = before(with_replay(rollout, torch.tensor([-1.0, -2.0, -3.0])), 2)
    assert cut.response_ids == rollout.response_ids[:2] and cut.stop_reason == "running"
    assert cut.policy_versions.tolist() == [0, 1] and cut.replay_logprobs.tolist() == [-1.0, -2.0]
    assert with_replay(rollout, torch.tensor([-1.0])).replay_logprobs.isnan().tolist() == [False, True, True, True]
    assert before(rollout, 0).response_ids == () and before(rollout, 9).response_ids == rollout.response_ids
