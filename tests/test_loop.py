import asyncio
from time import perf_counter, sleep

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scripted_engine import LOGPROB, Learner, ScriptedEngine, Sums, consumed, learn, plan, run, token, uneven

from rz import turn
from rz.schedule import sample_seed

# Lag


@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 12), st.integers(0, 4))
@examples(max_examples=20, deadline=None)
def test_no_token_is_above_the_lag_bound(max_lag, groups, slots, version):
    settings = plan(max_lag=max_lag, groups_per_update=groups, slots=slots)
    engine = ScriptedEngine(uneven, version=version)
    records, state = run(engine, settings=settings)
    assert state.version == version + 8 and engine.most <= slots
    for record in records:
        lags = (record.state.version - 1 - record.batch.policy_versions)[record.batch.mask]
        assert 0 <= lags.min() and lags.max() <= max_lag
        assert record.metrics["lag_max"] == lags.max()
        assert record.metrics["lag_mean"] == pytest.approx(lags.double().mean().item())


def test_lag_labels_of_known_delays():
    # One group an update, lag 1, one token a step. Prompt 0 takes 4 steps, all others 1. Step 1 finishes prompt 1; it
    # is consumed at version 0 and version 1 is published. Step 2 finishes prompt 2, which has to wait for prompt 0: its
    # last three tokens are of version 1, its first of version 0. Prompt 0 is consumed at version 1, prompt 2 at 2.
    engine = ScriptedEngine(lambda prompt, sample: 4 if prompt == 0 else 1)
    records, _ = run(engine, settings=plan(groups_per_update=1, max_lag=1, updates=3))
    assert [record.groups[0].prompt.index for record in records] == [1, 0, 2]
    assert [record.groups[0].rollouts[1].policy_versions.tolist() for record in records] == [[0], [0, 1, 1, 1], [1]]
    assert [record.metrics["lag_max"] for record in records] == [0, 1, 1]
    assert [record.metrics["lag_mean"] for record in records] == [0.0, 0.25, 1.0]
    assert [record.engine_steps for record in records] == [1, 3, 0]


def test_max_lag_zero_is_synchronous():
    engine = ScriptedEngine(uneven)
    records, _ = run(engine, settings=plan(max_lag=0))
    for update, record in enumerate(records):
        assert [group.prompt.index for group in record.groups] == [2 * update, 2 * update + 1]
        assert (record.batch.policy_versions[record.batch.mask] == update).all()
    order = [kind if kind == "publish" else kind + str(value[0] // 2) for kind, value in engine.events]
    for update in range(8):  # all of an update's groups start and finish between two publishes
        part = order[9 * update : 9 * update + 9]
        assert sorted(part) == ["finish" + str(update)] * 4 + ["publish"] + ["submit" + str(update)] * 4
        assert part[-1] == "publish"


@pytest.mark.parametrize("lag", [0, 1, 3, 8])
def test_exact_lag_dial_is_exact(lag):
    engine = ScriptedEngine(uneven, version=2)
    records, state = run(engine, settings=plan(max_lag=8, exact_lag=lag, updates=12))
    for update, record in enumerate(records):
        lags = (update + 2 - record.batch.policy_versions)[record.batch.mask]
        assert set(lags.tolist()) == {min(update, lag)}
    # After update u (from 1) of version 2 + u the engine serves version 2 + u - lag, if that is new to it.
    assert [version for version, _ in engine.published] == list(range(3, 15 - lag))
    assert all(params["version"] == version for version, params in engine.published)
    assert state.version == 14


def wrong_version(offset):
    @attrs.define(eq=False)
    class Mislabelling(ScriptedEngine):
        def step(self):
            late = lambda rollout: attrs.evolve(rollout, policy_versions=rollout.policy_versions + offset)
            return [late(rollout) for rollout in super().step()]

    return Mislabelling(lambda prompt, sample: 2)


@pytest.mark.parametrize("offset", [-1, 1])
@pytest.mark.parametrize("exact_lag", [None, 0])
def test_a_version_outside_the_bound_ends_the_run(offset, exact_lag):
    rule = rf"policy_versions of prompt 0, sample 0 must be within 0 to 0, got \[{offset}, {offset}\]"
    with pytest.raises(RuntimeError, match=rule):
        run(wrong_version(offset), settings=plan(max_lag=0, exact_lag=exact_lag))


def test_a_falling_version_ends_the_run():
    engine = wrong_version(torch.tensor([0, -1]))
    engine.version = 1
    with pytest.raises(RuntimeError, match=r"policy_versions of prompt 0, sample 0 must never fall, got \[1, 0\]"):
        run(engine)


# Responses


def test_nothing_generated_is_dropped_and_lengths_agree():
    seen = []
    records, _ = run(ScriptedEngine(uneven), on_response=seen.append)
    ids = lambda rollouts: sorted((r.prompt_index, r.sample, len(r.response_ids)) for r in rollouts)
    every = [(prompt, sample, uneven(prompt, sample)) for prompt in range(16) for sample in range(2)]
    assert ids(consumed(records)) == ids(seen) == every


@pytest.mark.parametrize("length", range(1, 13))
def test_a_publish_in_mid_response_keeps_every_token(length):
    # Prompt 0 is in flight while the others, of one token, let updates be made; its versions change in mid-response.
    engine = ScriptedEngine(lambda prompt, sample: length if prompt == 0 else 1)
    records, _ = run(engine, settings=plan(groups_per_update=1, max_lag=8, updates=12, slots=4))
    for rollout in consumed(records):
        places = range(length if rollout.prompt_index == 0 else 1)
        assert rollout.response_ids == tuple(token(rollout.prompt_index, rollout.sample, place) for place in places)
        assert torch.equal(rollout.behaviour_logprobs, torch.full((len(places),), LOGPROB))
        assert (rollout.policy_versions.diff() >= 0).all() and len(rollout.policy_versions) == len(places)
        if rollout.prompt_index == 0:  # an update after each step, until the bound makes the learner wait
            assert rollout.policy_versions.tolist() == [min(place, 8) for place in places]


def test_groups_are_by_prompt_with_samples_and_rewards_in_order():
    records, _ = run(ScriptedEngine(uneven))
    for record in records:
        assert [group.prompt.index for group in record.groups] == sorted(group.prompt.index for group in record.groups)
        for group in record.groups:
            assert [rollout.sample for rollout in group.rollouts] == [0, 1]
            assert group.rewards == tuple(uneven(group.prompt.index, sample) for sample in range(2))
    assert sorted(group.prompt.index for record in records for group in record.groups) == list(range(16))


def test_requests_carry_prompt_settings_and_seed():
    engine = ScriptedEngine(uneven)
    run(engine, first_prompt=40)
    assert [request.id for request in engine.requests] == [(40 + i, sample) for i in range(16) for sample in range(2)]
    for request in engine.requests:
        assert request.prompt_ids == (5, request.prompt_index)
        assert (request.max_tokens, request.temperature, request.stop_ids) == (64, 0.7, (0,))
        assert request.seed == sample_seed(3, *request.id)


def test_seeds_do_not_depend_on_the_order_of_submission():
    seeds = []
    for settings, lengths in [
        (plan(slots=1, max_lag=0), uneven),
        (plan(slots=50, groups_per_update=4, updates=4), lambda prompt, sample: 1 + (prompt + sample) % 5),
    ]:
        engine = ScriptedEngine(lengths)
        run(engine, settings=settings)
        seeds.append({request.id: request.seed for request in engine.requests})
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 32


def test_a_task_that_answers_with_another_prompt_is_an_error():
    class Stuck(Sums):
        def prompt(self, index):
            return super().prompt(0)

    with pytest.raises(ValueError, match="prompt 1 of the task must have index 1, got 0"):
        run(ScriptedEngine(uneven), task=Stuck())


def test_a_response_that_finishes_twice_is_an_error():
    class Twice(ScriptedEngine):
        def step(self):
            return super().step() * 2

    with pytest.raises(ValueError, match="finished response must be in flight, got prompt"):
        run(Twice(uneven))


# The clock


@attrs.define(eq=False)
class Turns:
    """Rewards that take a different number of turns of the event loop for each response."""

    salt: int
    stop_ids: tuple[int, ...] = ()

    def prompt(self, index):
        return Sums().prompt(index)

    async def score(self, prompt, response_ids):
        for _ in range(sample_seed(self.salt, prompt.index, len(response_ids)) % 40):
            await asyncio.sleep(0)
        return len(response_ids)


def test_what_happens_is_a_function_of_counted_events_never_of_reward_time():
    runs = []
    for task in (Sums(), Turns(1), Turns(2)):
        engine, seen = ScriptedEngine(uneven), []
        records, _ = run(engine, task=task, on_response=lambda rollout, seen=seen: seen.append(rollout.sample))
        updates = [[(g.prompt.index, g.rewards) for g in record.groups] for record in records]
        versions = [rollout.policy_versions.tolist() for rollout in consumed(records)]
        runs.append((engine.events, seen, updates, versions, [record.engine_steps for record in records]))
    assert runs[0] == runs[1] == runs[2]


def test_a_reward_starts_when_its_response_finishes_and_runs_between_engine_steps():
    engine, steps = ScriptedEngine(lambda prompt, sample: 1 if sample == 0 else 10), []

    class Noting(Sums):
        async def score(self, prompt, response_ids):
            steps.append((prompt.index, len(response_ids), engine.steps))
            return 0.0

    run(engine, task=Noting(), settings=plan(updates=1))
    assert steps == [(0, 1, 1), (1, 1, 1), (0, 10, 10), (1, 10, 10)]


# Updates and publishing


def test_each_update_is_published_once_with_its_own_weights():
    engine = ScriptedEngine(uneven)
    records, state = run(engine)
    assert [version for version, _ in engine.published] == list(range(1, 9))
    assert all(params["version"] == version for version, params in engine.published)
    assert engine.version == state.version == 8 and state is records[-1].state


def test_publish_params_chooses_what_the_engine_gets():
    engine = ScriptedEngine(uneven)
    run(engine, publish_params=lambda state: {"doubled": torch.tensor(2 * state.version)})
    assert [params["doubled"].item() for _, params in engine.published] == [2 * version for version in range(1, 9)]


def test_metrics_have_one_rising_step_axis_and_each_name_once():
    records, _ = run(ScriptedEngine(uneven))
    assert [record.metrics["policy_version"] for record in records] == list(range(1, 9))
    assert [record.metrics["loss"] for record in records] == list(range(8))
    assert sum(record.metrics["tokens"] for record in records) == sum(uneven(p, s) for p in range(16) for s in range(2))
    for record in records:
        assert record.metrics["tokens"] == record.batch.mask.sum()
        assert record.metrics["seconds"] == record.seconds["total"] >= sum(record.seconds[part] for part in turn.PARTS)
        assert all(record.metrics[f"{part}_seconds"] == record.seconds[part] for part in turn.PARTS)
        assert record.metrics["audited_tokens"] == record.metrics["differing_tokens"] == 0
        assert record.metrics["engine_steps"] == record.engine_steps


def test_engine_steps_add_up():
    engine = ScriptedEngine(uneven)
    records, _ = run(engine)
    assert sum(record.engine_steps for record in records) == engine.steps


def test_no_updates_returns_the_state_and_touches_nothing():
    engine, state = ScriptedEngine(uneven), Learner()
    records, after = run(engine, state=state, settings=plan(updates=0))
    assert after is state and not records and not engine.events


def test_an_update_that_does_not_raise_the_version_by_one_is_an_error():
    with pytest.raises(RuntimeError, match="update must return version 1, got 2"):
        run(ScriptedEngine(uneven), update=lambda state, batch: (Learner(state.version + 2), {}))


# The audit


@pytest.mark.parametrize(
    "mode", [{}, {"exact_lag": 0}, {"exact_lag": 2}, {"publish_every": 3}, {"overlap_steps": 1}, {"overlap_steps": 9}]
)
@pytest.mark.parametrize("slots", [1, 6, 40])
def test_audit_sees_every_token_once_under_its_own_version(mode, slots):
    overlap = mode.get("overlap_steps", 0)
    mode = {name: value for name, value in mode.items() if name != "overlap_steps"}
    engine, seen, calls = ScriptedEngine(uneven, version=1), [], []

    def audit(params, grown):
        assert params["version"] == engine.version  # before the publish
        calls.append(engine.version)
        found = {}
        for rollout, first in grown:
            now = torch.arange(first, len(rollout.response_ids))
            assert len(now), "a response without a token to replay"
            assert (rollout.policy_versions[now] == engine.version).all()
            seen.extend((rollout.prompt_index, rollout.sample, place, engine.version) for place in now.tolist())
            values = rollout.behaviour_logprobs[now].clone()
            if rollout.stop_reason != "running":
                values[-1] += 2.0**-23  # the last token of each response: one ulp off
            found[rollout.prompt_index, rollout.sample] = now, values
        return found

    records, _ = run(engine, audit=audit, settings=plan(slots=slots, **mode), overlap_steps=overlap)
    used = [
        (rollout.prompt_index, rollout.sample, place, version)
        for rollout in consumed(records)
        for place, version in enumerate(rollout.policy_versions.tolist())
    ]
    assert sorted(seen) == sorted(used)
    assert len(calls) == sum(record.engine_steps > 0 for record in records)  # else there is nothing new to see
    assert sum(record.metrics["audited_tokens"] for record in records) == len(used)
    # this audit finds the last token of each finished response differing; each is passed so once
    assert sum(record.metrics["differing_tokens"] for record in records) == len(consumed(records))


def test_what_was_replayed_before_an_update_reaches_its_batch():
    # One group an update, lag 1, as in test_lag_labels_of_known_delays: prompt 0 is consumed at version 1 with a token
    # of version 0, which was replayed at the first update, and three of version 1, which the audit sees after it.
    def audit(params, grown):
        places = lambda rollout, first: torch.arange(first, len(rollout.response_ids))
        found = {(r.prompt_index, r.sample): places(r, first) for r, first in grown}
        return {key: (now, 10.0 * now.float() - engine.version) for key, now in found.items()}

    engine = ScriptedEngine(lambda prompt, sample: 4 if prompt == 0 else 1)
    records, _ = run(engine, audit=audit, settings=plan(groups_per_update=1, max_lag=1, updates=3))
    nan = float("nan")
    assert records[0].batch.replay_logprobs is None  # prompt 1, at lag 0
    expected = torch.tensor([[0.0, nan, nan, nan]]).expand(2, -1)
    assert torch.equal(records[1].batch.replay_logprobs.isnan(), expected.isnan())
    assert records[1].batch.replay_logprobs[:, 0].tolist() == [0.0, 0.0]
    assert records[2].batch.replay_logprobs.tolist() == [[-1.0], [-1.0]]  # prompt 2, of version 1


# Updates beside the engine


@pytest.mark.parametrize("overlap", [1, 3, 1000])
@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_an_update_beside_the_engine_keeps_the_bound_and_every_response(overlap, max_lag):
    engine, seen = ScriptedEngine(uneven), []
    records, state = run(
        engine, settings=plan(max_lag=max_lag), overlap_steps=overlap, on_response=seen.append, update=learn
    )
    assert state.version == 8 and engine.version == 8
    for record in records:
        lags = (record.state.version - 1 - record.batch.policy_versions)[record.batch.mask]
        assert 0 <= lags.min() and lags.max() <= max_lag
    ids = lambda rollouts: sorted((r.prompt_index, r.sample, len(r.response_ids)) for r in rollouts)
    assert ids(consumed(records)) == ids(seen) == [(p, s, uneven(p, s)) for p in range(16) for s in range(2)]


def test_an_update_runs_beside_so_many_steps_whatever_its_time():
    # Two slots, one group of two, two tokens a response: the update on prompt 0 begins after step 2, and version 1 is
    # published after step 3, when prompt 1 has one token of version 0.
    traces = []
    for pause in (0.0, 0.05):

        def slow(state, batch, pause=pause):
            sleep(pause)
            return learn(state, batch)

        engine = ScriptedEngine(lambda prompt, sample: 2)
        settings = plan(groups_per_update=1, max_lag=1, slots=2, updates=3)
        records, _ = run(engine, settings=settings, overlap_steps=1, update=slow)
        traces.append((engine.events, [record.engine_steps for record in records]))
        versions = [record.groups[0].rollouts[0].policy_versions.tolist() for record in records]
        assert versions == [[0, 0], [0, 1], [1, 2]]
        assert [record.metrics["lag_max"] for record in records] == [0, 1, 1]
    assert traces[0] == traces[1]


def test_the_engine_steps_while_the_update_runs():
    class Slow(ScriptedEngine):
        def step(self):
            sleep(0.005)
            return super().step()

    engine, during = Slow(lambda prompt, sample: 20 + 20 * prompt), []

    def waits(state, batch):
        before, limit = engine.steps, perf_counter() + 10
        while engine.steps < before + 2 and perf_counter() < limit:
            sleep(0.001)
        during.append(engine.steps - before)
        return learn(state, batch)

    run(engine, update=waits, overlap_steps=40, settings=plan(updates=3, slots=12))
    assert during[0] >= 2


def test_an_update_beside_the_engine_that_raises_ends_the_run_at_once():
    def fail(state, batch):
        raise FloatingPointError("loss is nan")

    engine = ScriptedEngine(lambda prompt, sample: 3)
    with pytest.raises(FloatingPointError, match="loss is nan"):
        run(engine, update=fail, overlap_steps=10**9, settings=plan(max_lag=8))
    assert engine.steps < 10**6


def test_overlap_with_the_exact_dial_is_refused():
    with pytest.raises(ValueError, match="overlap_steps must be >= 0, and 0 with exact_lag, got 1"):
        run(ScriptedEngine(uneven), settings=plan(exact_lag=1), overlap_steps=1)
    with pytest.raises(ValueError, match="overlap_steps must be >= 0, and 0 with exact_lag, got -1"):
        run(ScriptedEngine(uneven), overlap_steps=-1)
