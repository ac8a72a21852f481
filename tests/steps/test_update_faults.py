"""What must not pass unseen through an update: faults, groups without signal, shifted positions, lost responses."""

import math
from functools import partial

import attrs
import pytest
import torch
from batches import B, batch_of, bits, equal, initial, sampled, table_logprobs

from rz.steps import (
    PolicyState,
    adamw_init,
    count_nonfinite,
    drop_nonfinite,
    reinforce_zero_loss,
    supervised_update,
    truncated_importance_weights,
    update,
)

run = partial(update, logprobs_fn=table_logprobs, learning_rate=0.1)


def test_a_group_of_one_is_counted_and_gives_no_gradient():
    state = initial()
    batch = attrs.evolve(sampled(state), group_ids=torch.arange(B))
    metrics = run(state, batch)[1]
    assert (metrics["groups_of_one"], metrics["groups_without_signal"]) == (8.0, 8.0)
    assert metrics["grad_norm"] == 0 and metrics["advantage_abs_mean"] == 0


def test_eight_rewards_of_0_7_move_nothing_but_the_step():
    state = initial()
    batch = attrs.evolve(sampled(state), rewards=torch.full((B,), 0.7), group_ids=torch.zeros(B, dtype=torch.int64))
    after, metrics = run(state, batch)
    assert metrics["grad_norm"] == 0 and metrics["groups_without_signal"] == 1
    assert equal(bits(after.params), bits(state.params)) and after.version == 4


def test_off_by_one_two_token_vocabulary():
    # Three positions with probabilities of token 1 of 1/2, 1/4, 1/8; response 1, 0, 1: p = ln 1/2, ln 3/4, ln 1/8.
    # q = ln 1/2, ln 3/8, ln 1/8 gives ratios 1, 2, 1. Rewards 1 and -1 with the second response empty: A = 1.
    # d loss / d logit of token 1 at t = -(1/2)(1/3) ratio * (1[token is 1] - P(1)): 1/2, 2 * -1/4, 7/8, over -6.
    probabilities = torch.tensor([[1 / 2, 1 / 2], [3 / 4, 1 / 4], [7 / 8, 1 / 8]])
    params = {"table": probabilities.log(), "bias": torch.zeros(2)}
    state = PolicyState(params=params, optimizer=adamw_init(params), version=0)
    behaviour = torch.tensor([[1 / 2, 3 / 8, 1 / 8, 1.0], [1.0, 1.0, 1.0, 1.0]]).log()[:, :3]
    batch = batch_of(
        behaviour, [[True] * 3, [False] * 3], rewards=[1, -1], response_ids=torch.tensor([[1, 0, 1], [1, 1, 1]])
    )
    after, metrics = run(state, batch)
    expected = torch.tensor([1 / 2, -1 / 2, 7 / 8]) / -6
    torch.testing.assert_close(after.optimizer.first["table"][:, 1] * 10, expected)  # first mean = 0.1 gradient
    torch.testing.assert_close(after.optimizer.first["table"][:, 0] * 10, -expected)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["loss"] == pytest.approx(-(math.log(1 / 2) + 2 * math.log(3 / 4) + math.log(1 / 8)) / 6)


def test_logprobs_one_short_are_refused():
    state = initial()
    with pytest.raises(ValueError, match=r"logprobs must have the shape of mask \[8, 6\], got \[8, 5\]"):
        run(state, sampled(state), logprobs_fn=lambda params, batch: table_logprobs(params, batch)[:, :-1])


def test_difference_89_at_a_masked_position_changes_no_bit():
    state = initial()
    batch = sampled(state)
    clean = run(state, batch)
    for value in (-90.0, torch.nan, torch.inf, -torch.inf):
        dirty = attrs.evolve(batch, behaviour_logprobs=batch.behaviour_logprobs.masked_fill(~batch.mask, value))
        after, metrics = run(state, dirty)
        assert equal(bits(after.params), bits(clean[0].params)) and metrics == clean[1]


def overflowing(state):
    batch = sampled(state)
    behaviour = batch.behaviour_logprobs.clone()
    behaviour[5, 2] = -95.0
    return attrs.evolve(batch, behaviour_logprobs=behaviour)


@pytest.mark.parametrize("size", [None, 2])
def test_overflow_at_a_live_position_raises_and_names_the_row_of_the_update(size):
    state = initial()
    with pytest.raises(ValueError, match=r"ratio exp\(p - q\) must be finite .* in row 5 \(group 2\), position 2"):
        run(state, overflowing(state), microbatch_size=size)


def test_drop_is_counted_and_keeps_the_baseline():
    state = initial()
    batch = overflowing(state)
    after, metrics = run(state, batch, check=drop_nonfinite, microbatch_size=4)
    assert (metrics["nonfinite_tokens"], metrics["dropped_responses"]) == (1.0, 1.0)
    assert (metrics["tokens"], metrics["response_length_mean"]) == (21.0, 27 / 8)  # row 5 has 6 of the 27 tokens
    assert metrics["advantage_abs_mean"] == pytest.approx(0.15)
    emptied = run(state, attrs.evolve(batch, mask=batch.mask & (torch.arange(B) != 5)[:, None]), microbatch_size=4)[0]
    assert equal(bits(after.params), bits(emptied.params))


def test_count_goes_on_with_weights_that_bound_the_ratio_and_stops_with_weights_that_do_not():
    state = initial()
    truncated = partial(truncated_importance_weights, cap=2.0)
    metrics = run(state, overflowing(state), check=count_nonfinite, weights_fn=truncated)[1]
    assert (metrics["nonfinite_tokens"], metrics["dropped_responses"], metrics["tokens"]) == (1.0, 0.0, 27.0)
    with pytest.raises(ValueError, match="grad_norm must be finite, got (inf|nan)"):
        run(state, overflowing(state), check=count_nonfinite)


def test_nothing_is_dropped_by_default_whatever_its_length():
    state = initial()
    batch, seen = sampled(state), []

    def spy(logprobs, rows, **rest):
        seen.extend(rows.mask.sum(1).tolist())
        return reinforce_zero_loss(logprobs, rows, **rest)

    run(state, batch, loss_fn=spy, microbatch_size=5)
    assert seen == batch.mask.sum(1).tolist()


def test_bad_input_is_refused_and_named():
    state = initial()
    batch = sampled(state)
    rewards = batch.rewards.clone()
    rewards[2] = torch.nan
    with pytest.raises(ValueError, match=r"rewards must be finite, got nan in row 2 \(group 2\)"):
        run(state, attrs.evolve(batch, rewards=rewards))
    with pytest.raises(ValueError, match="microbatch_size must be >= 1 or None, got 0"):
        run(state, batch, microbatch_size=0)
    with pytest.raises(ValueError, match="params must all take part in logprobs_fn, got no gradient for unused"):
        unused = dict(state.params, unused=torch.zeros(1))
        run(PolicyState(params=unused, optimizer=adamw_init(unused), version=0), batch_at(batch, 0))
    with pytest.raises(ValueError, match="policy_version must be >= the version of every token"):
        run(attrs.evolve(state, version=0), batch_at(batch, 1))
    with pytest.raises(ValueError, match="batch must hold at least one response, got none"):
        supervised_update(state, batch.rows(0, 0), logprobs_fn=table_logprobs, learning_rate=0.1)


def batch_at(batch, version):
    return attrs.evolve(batch, policy_versions=torch.full_like(batch.policy_versions, version))


def test_a_donated_state_is_whole_after_an_update_that_was_refused():
    state = initial()
    batch = sampled(state)
    newer = attrs.evolve(batch, policy_versions=torch.full_like(batch.policy_versions, state.version + 1))
    before = {name: bits(tensors) for name, tensors in whole(state)}
    with pytest.raises(ValueError, match="policy_version must be >= the version of every token, got 3"):
        run(state, newer, donate=True, donate_params=True)
    assert all(equal(bits(tensors), before[name]) for name, tensors in whole(state))


def whole(state):
    return (("params", state.params), ("first", state.optimizer.first), ("second", state.optimizer.second))
