import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rz import schedule
from rz.schedule import OpenGroup, Settings


def make(**changes):
    return Settings(**(dict(group_size=2, groups_per_update=1, max_lag=1, slots=4, updates=3) | changes))


@st.composite
def plans(draw, exact=False):
    """Settings, and a function of (prompt, sample) to a length in engine steps, now and then a very long one."""
    max_lag = draw(st.integers(0, 5))
    plan = Settings(
        group_size=draw(st.integers(2, 4)),
        groups_per_update=draw(st.integers(1, 4)),
        max_lag=max_lag,
        slots=draw(st.integers(1, 20)),
        updates=draw(st.integers(1, 10)),
        exact_lag=draw(st.integers(0, max_lag)) if exact else None,
        publish_every=1 if exact else draw(st.integers(1, max_lag + 1)),
    )
    salt = draw(st.integers(0, 2**20))
    longest = lambda prompt: 200 if schedule.sample_seed(salt, prompt, -1) % 7 == 0 else 6
    return plan, lambda prompt, sample: 1 + schedule.sample_seed(salt, prompt, sample) % longest(prompt)


def simulate(plan, length, *, start_version=0, first_prompt=0, overlap=0):
    """Run the rules over responses that gain a token a step, an update taking `overlap` steps beside the engine: the
    lags of each consumed response, and the trace."""
    state = schedule.start(plan, version=start_version, first_prompt=first_prompt)
    live, ended, used, trace, under_way = {}, {}, {}, [], None
    while under_way is not None or not schedule.is_done(state):
        assert schedule.is_feasible(state.groups, state.version, plan)
        idle = state.in_flight == 0 and schedule.next_response(state) is None
        if under_way is not None and (under_way == 0 or idle):
            before, state, under_way = state.served, schedule.publish(state), None
            trace += [("publish", state.served)] if state.served > before else []
            continue
        chosen = schedule.next_update(state) if under_way is None else None
        if chosen is not None:
            for key in [(prompt, sample) for prompt in chosen for sample in range(plan.group_size)]:
                versions = ended.pop(key)
                assert all(version in schedule.allowed_versions(state) for version in versions)
                used[key] = [state.version - version for version in versions]
            trace.append(("update", chosen))
            state, under_way = schedule.consume(state), overlap
            continue
        while (response := schedule.next_response(state)) is not None:
            live[response] = []
            trace.append(("submit", response))
            state = schedule.submit(state)
        assert live, "deadlock: nothing in flight, nothing to submit and no update"
        assert len(live) == state.in_flight <= plan.slots
        for key in sorted(live):
            live[key].append(state.served)
            if len(live[key]) == length(*key):
                ended[key] = live.pop(key)
                state = schedule.finish(state, *key)
        under_way = None if under_way is None else under_way - 1
    assert not live and not ended and not state.groups, "something generated was not consumed"
    return used, trace


@given(plans(), st.integers(0, 3), st.integers(0, 50), st.sampled_from([0, 0, 1, 2, 7, 10**6]))
@settings(max_examples=300, deadline=None)
def test_lag_bound_nothing_dropped_no_deadlock(case, start_version, first_prompt, overlap):
    plan, length = case
    used, _ = simulate(plan, length, start_version=start_version, first_prompt=first_prompt, overlap=overlap)
    assert all(0 <= lag <= plan.max_lag for lags in used.values() for lag in lags)
    prompts = range(first_prompt, first_prompt + plan.updates * plan.groups_per_update)
    every = {(prompt, sample) for prompt in prompts for sample in range(plan.group_size)}
    assert {key: len(lags) for key, lags in used.items()} == {key: length(*key) for key in every}


@given(plans(), st.data())
@settings(max_examples=50, deadline=None)
def test_any_order_of_events_keeps_the_bound(case, data):
    """An adversary finishes any response in flight, submits as few as it likes, whatever their ages, and lets an update
    take as long as it likes."""
    plan, _ = case
    state, flying, admitted, under_way = schedule.start(plan), set(), {}, False
    while under_way or not schedule.is_done(state):
        chosen, response = None if under_way else schedule.next_update(state), schedule.next_response(state)
        can = (("update", chosen), ("submit", response), ("finish", flying), ("publish", under_way))
        moves = [move for move, possible in can if possible]
        assert moves, "deadlock: nothing in flight, nothing to submit and no update"
        match data.draw(st.sampled_from(moves)):
            case "update":
                assert all(state.version - admitted[prompt] <= plan.max_lag for prompt in chosen)
                state, under_way = schedule.consume(state), True
            case "publish":
                state, under_way = schedule.publish(state), False
            case "submit":
                admitted.setdefault(response[0], state.served)
                flying.add(response)
                state = schedule.submit(state)
            case "finish":
                key = data.draw(st.sampled_from(sorted(flying)))
                flying.remove(key)
                state = schedule.finish(state, *key)
        assert schedule.is_feasible(state.groups, state.version, plan)
    assert not state.groups


@given(plans())
@settings(max_examples=60, deadline=None)
def test_admission_is_in_prompt_order_and_samples_are_in_order(case):
    _, trace = simulate(*case)
    submitted = [response for kind, response in trace if kind == "submit"]
    assert submitted == sorted(submitted)
    assert all(list(prompts) == sorted(prompts) for kind, prompts in trace if kind == "update")


@given(plans(), st.sampled_from([0, 3, 10**6]))
@settings(max_examples=60, deadline=None)
def test_max_lag_zero_is_the_synchronous_trace(case, overlap):
    plan, length = attrs.evolve(case[0], max_lag=0, publish_every=1), case[1]
    used, trace = simulate(plan, length, overlap=overlap)
    synchronous = []
    for update in range(plan.updates):
        prompts = tuple(range(update * plan.groups_per_update, (update + 1) * plan.groups_per_update))
        synchronous += [("submit", (prompt, sample)) for prompt in prompts for sample in range(plan.group_size)]
        synchronous += [("update", prompts), ("publish", update + 1)]
    assert trace == synchronous
    assert not any(lag for lags in used.values() for lag in lags)


@given(plans(exact=True), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_exact_lag_is_exact(case, start_version):
    plan, length = case
    used, _ = simulate(plan, length, start_version=start_version)
    for (prompt, _), lags in used.items():  # prompt k is consumed by update k // P, that many versions after the start
        assert set(lags) == {min(prompt // plan.groups_per_update, plan.exact_lag)}


@pytest.mark.parametrize("lag", [1, 3, 8])
def test_exact_lag_by_hand(lag):
    # One group an update: update u (from 0) consumes prompt u, sampled min(u, lag) versions behind.
    used, _ = simulate(make(max_lag=8, exact_lag=lag, updates=12), lambda prompt, sample: 2)
    assert [used[prompt, 1] for prompt in range(12)] == [[min(prompt, lag)] * 2 for prompt in range(12)]


def test_the_bound_is_reached_when_one_response_is_slow():
    # P = 1, L = 1. Prompt 0 takes 9 steps, all others 1. At version 0 prompts 0 and 1 are open (2 = P * (L + 1)), and 1
    # is consumed. At version 1 prompt 2 is admitted and completes, but taking it would leave prompt 0, of version 0, to
    # version 2: the learner waits. Prompt 0 is consumed at version 1 with lag 1.
    used, trace = simulate(make(updates=3, slots=8), lambda prompt, sample: 9 if prompt == 0 else 1)
    assert [prompts for kind, prompts in trace if kind == "update"] == [(1,), (0,), (2,)]
    assert used[0, 0] == [1] + [0] * 8  # its first token at version 0, the rest at version 1
    assert used[2, 0] == [1]  # sampled at version 1 while the learner waited, consumed at version 2


def test_feasible_by_hand():
    # P = 2, L = 1, version 3: groups of version 2 may be consumed by the update at 3 alone, so 2 of them fit and 3 do
    # not; with those of version 3 there are two updates, so 4 fit. A group of version 1 is too late.
    groups = lambda *versions: tuple(OpenGroup(prompt_index=i, admitted_version=v) for i, v in enumerate(versions))
    plan = make(groups_per_update=2)
    feasible = [groups(), groups(2, 2), groups(2, 2, 3, 3), groups(3, 3, 3, 3)]
    assert all(schedule.is_feasible(case, 3, plan) for case in feasible)
    assert not any(schedule.is_feasible(case, 3, plan) for case in [groups(2, 2, 2), groups(2, 2, 3, 3, 3), groups(1)])


def test_seeds_are_a_function_of_run_prompt_and_sample():
    # printf '7,12,3' | b2sum -l 64 gives 4e1fe9a1fd6654b6; without its last bit that is 0x4e1fe9a1fd6654b6 >> 1.
    assert schedule.sample_seed(7, 12, 3) == 0x4E1FE9A1FD6654B6 >> 1
    keys = [(run, prompt, sample) for run in range(3) for prompt in range(40) for sample in range(8)]
    seeds = {schedule.sample_seed(*key) for key in keys}
    assert len(seeds) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62 and min(seeds) < 2**61  # all 63 bits are in use


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40), st.integers(0, 2**20))
@settings(max_examples=50, deadline=None)
def test_seeds_are_in_range(run, prompt, sample):
    assert 0 <= schedule.sample_seed(run, prompt, sample) < 2**63


def test_the_old_schedule_stays_valid():
    before = schedule.start(make())
    after = schedule.submit(before)
    assert (before.in_flight, before.groups, after.in_flight) == (0, (), 1)
    assert schedule.finish(after, 0, 0).groups[0].finished == {0} and after.groups[0].finished == frozenset()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("group_size", 1, ">= 2, got 1"),
        ("group_size", 2.0, ">= 2, got 2.0"),
        ("groups_per_update", 0, ">= 1, got 0"),
        ("groups_per_update", True, ">= 1, got True"),
        ("max_lag", -1, ">= 0, got -1"),
        ("slots", 0, ">= 1, got 0"),
        ("updates", -1, ">= 0, got -1"),
        ("exact_lag", -1, ">= 0, got -1"),
        ("publish_every", 0, ">= 1, got 0"),
    ],
)
def test_settings_name_field_rule_and_value(field, value, rule):
    with pytest.raises(ValueError, match=f"{field} must be an integer {rule}"):
        make(**{field: value})


def test_exact_lag_above_max_lag_is_an_error():
    with pytest.raises(ValueError, match=r"exact_lag must be <= max_lag \(1\), got 2"):
        make(exact_lag=2)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"publish_every": 3}, r"<= max_lag \+ 1 \(2\), got 3"),
        ({"publish_every": 2, "exact_lag": 1}, "1 with exact_lag"),
    ],
)
def test_publishing_too_seldom_is_an_error(changes, rule):
    with pytest.raises(ValueError, match="publish_every must be " + rule):
        make(**changes)


def test_publish_every_by_hand():
    # One group an update, lag 2 and every response one step: versions 0 1 2 are made of tokens of version 0, then 3 is
    # published: updates 3 4 5 consume tokens of version 3, at lags 0 1 2 again.
    used, trace = simulate(make(max_lag=2, updates=7, slots=2, publish_every=3), lambda prompt, sample: 1)
    assert [used[prompt, 1] for prompt in range(7)] == [[0], [1], [2], [0], [1], [2], [0]]
    assert [version for kind, version in trace if kind == "publish"] == [3, 6]


def test_overlap_by_hand():
    # One group an update, lag 1, two slots, two tokens a response, an update takes one step. Prompt 0 is generated
    # under version 0; while it is consumed, prompt 1 gets its first token under version 0 and its second under 1.
    used, trace = simulate(make(slots=2), lambda prompt, sample: 2, overlap=1)
    assert [used[prompt, 0] for prompt in range(3)] == [[0, 0], [1, 0], [1, 0]]
    assert [kind for kind, _ in trace if kind != "submit"] == ["update", "publish"] * 3


@pytest.mark.parametrize("name", ["version", "first_prompt"])
def test_negative_start_is_an_error(name):
    with pytest.raises(ValueError, match=f"{name} must be >= 0, got -1"):
        schedule.start(make(), **{name: -1})


def test_moves_that_the_rules_forbid_are_errors():
    state = schedule.start(make(slots=1))
    with pytest.raises(ValueError, match="schedule must have an update to make, got none"):
        schedule.consume(state)
    with pytest.raises(ValueError, match="must be in flight, got prompt 0, sample 0"):
        schedule.finish(state, 0, 0)
    state = schedule.submit(state)
    with pytest.raises(ValueError, match="schedule must have a response to submit, got none"):
        schedule.submit(state)
    with pytest.raises(ValueError, match="must be in flight, got prompt 0, sample 1"):
        schedule.finish(state, 0, 1)  # of an open group, but not submitted yet
    state = schedule.finish(state, 0, 0)
    with pytest.raises(ValueError, match="must be in flight, got prompt 0, sample 0"):
        schedule.finish(state, 0, 0)


def test_no_updates_is_done_at_once():
    state = schedule.start(make(updates=0))
    assert schedule.is_done(state) and schedule.next_response(state) is None and schedule.next_update(state) is None
