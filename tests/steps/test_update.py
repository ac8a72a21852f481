import math
from functools import partial

import attrs
import pytest
import torch
from batches import B, T, bits, equal, initial, sampled, table_logprobs

from rz.steps import (
    PolicyState,
    adamw,
    adamw_init,
    clip_by_global_norm,
    gap_metrics,
    group_mean_advantages,
    importance_weights,
    leave_one_out_advantages,
    masked_importance_weights,
    ppo_clipped_loss,
    reinforce_zero_loss,
    supervised_loss,
    supervised_update,
    token_count,
    token_mean_loss,
    unit_importance_weights,
    update,
)

run = partial(update, logprobs_fn=table_logprobs, learning_rate=0.1)


def test_update_is_the_composition_of_its_steps_under_torch_func():
    state = initial()
    batch = sampled(state)
    advantages = group_mean_advantages(batch.rewards, batch.group_ids)

    def loss(params):
        logprobs = table_logprobs(params, batch)
        weights = importance_weights(logprobs, batch)
        return reinforce_zero_loss(logprobs, batch, advantages=advantages, weights=weights, denominator=B), logprobs

    grads, (value, logprobs) = torch.func.grad_and_value(loss, has_aux=True)(state.params)
    clipped, norm = clip_by_global_norm(grads, max_norm=0.02)
    params, optimizer = adamw(
        state.params, clipped, state.optimizer, learning_rate=0.1, betas=(0.8, 0.9), weight_decay=0.2
    )
    after, metrics = run(state, batch, max_grad_norm=0.02, betas=(0.8, 0.9), weight_decay=0.2)
    assert after.version == 4 and after.optimizer.step == 1 and norm > 0.02
    torch.testing.assert_close((after.params, after.optimizer.first), (params, optimizer.first))
    assert metrics["loss"] == pytest.approx(float(value)) and metrics["grad_norm"] == pytest.approx(float(norm))
    assert metrics["learning_rate"] == 0.1
    gap = gap_metrics(logprobs, batch, policy_version=3)
    assert {name: metrics[name] for name in gap} == pytest.approx(gap)
    assert all(type(value) is float for value in metrics.values())


def test_metrics_by_hand():
    # group 2: 1, .5, 1, .3, mean .7: .3, -.2, .3, -.4; group 9: 0, 0; group 4: .7, .7. (.3 + .2 + .3 + .4)/8 = 0.15
    # rewards: mean 4.2/8 = 0.525, mean square (1 + .25 + .49 + 1 + .49 + .09)/8 = 0.415; lengths 27/8
    state = initial()
    metrics = run(state, sampled(state))[1]
    expected = {
        "reward_mean": 0.525, "reward_std": math.sqrt(0.415 - 0.525**2), "advantage_abs_mean": 0.15, "groups": 3.0,
        "groups_without_signal": 2.0, "groups_of_one": 0.0, "responses": 8.0, "response_length_mean": 27 / 8,
        "tokens": 27.0, "nonfinite_tokens": 0.0, "dropped_responses": 0.0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_old_state_stays_intact_and_usable():
    state = initial()
    batch = sampled(state)
    before = bits(state.params)
    first, first_metrics = run(state, batch, weight_decay=0.1, max_grad_norm=0.01, microbatch_size=3)
    assert equal(bits(state.params), before) and state.version == 3 and state.optimizer.step == 0
    assert not state.optimizer.first["table"].any() and not any(p.requires_grad for p in state.params.values())
    assert not any(tensor.requires_grad or tensor.grad_fn for tensor in first.params.values())
    assert not torch.equal(first.params["table"], state.params["table"])
    again, again_metrics = run(state, batch, weight_decay=0.1, max_grad_norm=0.01, microbatch_size=3)
    assert equal(bits(again.params), bits(first.params)) and again_metrics == first_metrics


@pytest.mark.parametrize("size", [1, 2, 4, 8, 3, 100])
def test_microbatches_give_the_same_update(size):
    state = initial()
    batch = sampled(state)
    whole, whole_metrics = run(state, batch)
    parts, parts_metrics = run(state, batch, microbatch_size=size)
    # the gradient is the running mean times ten; Adam's quotient would blow up the rounding of a gradient near 0
    torch.testing.assert_close(parts.optimizer.first, whole.optimizer.first)
    torch.testing.assert_close(parts.params, whole.params, rtol=1e-5, atol=1e-5)
    assert parts_metrics == pytest.approx(whole_metrics, rel=1e-5)


def test_microbatches_with_token_mean_give_the_same_update():
    state = initial()
    batch = sampled(state)
    whole, parts = (
        run(state, batch, loss_fn=token_mean_loss, denominator_fn=token_count, microbatch_size=size)[0]
        for size in (None, 2)
    )
    torch.testing.assert_close(parts.optimizer.first, whole.optimizer.first)


def test_permuted_rows_give_the_same_update():
    state = initial()
    batch = sampled(state)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(5))
    fields = {field.name: getattr(batch, field.name) for field in attrs.fields(type(batch))}
    shuffled = attrs.evolve(
        batch, **{name: value[order] for name, value in fields.items() if isinstance(value, torch.Tensor)}
    )
    (one, one_metrics), (other, other_metrics) = run(state, batch), run(state, shuffled, microbatch_size=2)
    torch.testing.assert_close(one.optimizer.first, other.optimizer.first)
    assert other_metrics == pytest.approx(one_metrics, rel=1e-5)


def test_learning_rate_zero_leaves_every_bit_and_the_gap_at_zero():
    state = start = initial()
    for seed in range(50):
        batch = sampled(state, noise=0.0, seed=seed)
        state, metrics = run(state, batch, learning_rate=0.0, weight_decay=0.1, microbatch_size=4)
        assert metrics["gap_max"] == 0 and metrics["ratio_max"] == 1 and metrics["ess"] == 1
    assert equal(bits(state.params), bits(start.params)) and state.version == 53
    moved = dict(state.params, bias=torch.nextafter(state.params["bias"], torch.tensor(torch.inf)))
    moved["table"] = state.params["table"].clone()
    moved["table"][0, 0] = torch.nextafter(moved["table"][0, 0] * 1.0001, torch.tensor(torch.inf))
    assert run(attrs.evolve(state, params=moved), batch)[1]["gap_max"] > 0


def test_equal_logprobs_give_weights_of_exactly_one():
    state = initial()
    batch, seen = sampled(state, noise=0.0), []
    spy = lambda logprobs, rows: seen.append(importance_weights(logprobs, rows)) or seen[-1]
    corrected = run(state, batch, weights_fn=spy)[0]
    assert torch.equal(seen[0], batch.mask.float())
    assert equal(bits(corrected.params), bits(run(state, batch, weights_fn=unit_importance_weights)[0].params))


@pytest.mark.parametrize(
    "choice",
    [
        {"advantages_fn": leave_one_out_advantages},
        {"weights_fn": partial(masked_importance_weights, low=0.9, high=1.1)},
        {"loss_fn": partial(ppo_clipped_loss, low=0.9, high=1.1)},
        {"loss_fn": token_mean_loss, "denominator_fn": token_count},
    ],
    ids=lambda choice: "-".join(choice),
)
def test_siblings_stand_where_the_defaults_stand(choice):
    state = initial()
    batch = sampled(state)
    usual, other = run(state, batch)[0], run(state, batch, **choice)[0]
    assert not torch.equal(usual.optimizer.first["table"], other.optimizer.first["table"])


def test_a_batch_without_tokens_has_gradient_zero():
    state = initial()
    batch = sampled(state, lengths=(0,) * B)
    for after, metrics in (run(state, batch), supervised_update(
        state, batch, logprobs_fn=table_logprobs, learning_rate=0.1
    )):  # fmt: skip
        assert metrics["grad_norm"] == 0 and metrics["loss"] == 0 and metrics["tokens"] == 0
        assert equal(bits(after.params), bits(state.params)) and (after.version, after.optimizer.step) == (4, 1)


def test_a_microbatch_without_tokens_is_not_run():
    state = initial()
    rows = []
    spy = lambda params, batch: rows.append(len(batch.mask)) or table_logprobs(params, batch)
    run(state, sampled(state), logprobs_fn=spy, microbatch_size=1)
    assert rows == [1] * (B - 1)  # row 3 is empty


def test_training_raises_the_probability_of_the_rewarded_token():
    state = initial()
    for seed in range(60):
        batch = sampled(state, noise=0.0, seed=seed, lengths=(1,) * B)
        rewards = (batch.response_ids[:, 0] == 2).float()
        batch = attrs.evolve(batch, rewards=rewards, group_ids=torch.zeros(B, dtype=torch.int64))
        state = run(state, batch)[0]
    assert (state.params["table"] + state.params["bias"])[0].softmax(0)[2] > 0.9


def test_supervised_update_is_adamw_on_the_supervised_loss():
    state = initial()
    batch = sampled(state)
    grads, value = torch.func.grad_and_value(
        lambda params: supervised_loss(table_logprobs(params, batch), batch, denominator=B)
    )(state.params)
    params, _ = adamw(state.params, grads, state.optimizer, learning_rate=0.1)
    for size in (None, 3):
        after, metrics = supervised_update(
            state, batch, logprobs_fn=table_logprobs, learning_rate=0.1, microbatch_size=size
        )
        torch.testing.assert_close(after.params, params)
        assert after.version == 4 and metrics["loss"] == pytest.approx(float(value))
        assert (metrics["tokens"], metrics["responses"], metrics["response_length_mean"]) == (27.0, 8.0, 27 / 8)


def test_supervised_update_reads_no_reward_and_no_behaviour():
    state = initial()
    batch = sampled(state)
    nothing = attrs.evolve(batch, rewards=torch.full((B,), torch.nan), behaviour_logprobs=torch.full((B, T), torch.nan))
    fit = partial(supervised_update, state, logprobs_fn=table_logprobs, learning_rate=0.1)
    assert equal(bits(fit(batch)[0].params), bits(fit(nothing)[0].params))


def test_a_parameter_used_twice_or_shared_in_gradient_counts_once_each():
    # d(a + b) gives both the same gradient tensor: adding microbatches in place must not add it twice
    params = {"a": torch.zeros(T), "b": torch.zeros(T)}
    state = PolicyState(params=params, optimizer=adamw_init(params), version=3)
    logprobs = lambda params, batch: (params["a"] + params["b"])[None].expand(len(batch.mask), T)
    batch = attrs.evolve(sampled(initial()), behaviour_logprobs=torch.zeros(B, T))
    whole, parts = (run(state, batch, logprobs_fn=logprobs, microbatch_size=size)[0] for size in (None, 1))
    torch.testing.assert_close(parts.optimizer.first, whole.optimizer.first)
    assert torch.equal(parts.optimizer.first["a"], parts.optimizer.first["b"])
