from functools import partial

import pytest
import torch
from batches import batch_of, cases
from hypothesis import given, settings

from rz.steps import (
    importance_weights,
    log_ratio,
    ppo_clipped_loss,
    reinforce_zero_loss,
    response_count,
    supervised_loss,
    token_count,
    token_mean_loss,
)

ppo = partial(ppo_clipped_loss, low=0.8, high=1.25)
supervised = lambda logprobs, batch, *, advantages, weights, denominator: supervised_loss(
    logprobs, batch, denominator=denominator
)
ALL = {"reinforce_zero": reinforce_zero_loss, "token_mean": token_mean_loss, "ppo": ppo, "supervised": supervised}
every = pytest.mark.parametrize("loss", ALL.values(), ids=ALL.keys())


def example(dtype=torch.float64):
    logprobs = torch.tensor([[-0.5, -1.0, -2.0], [-3.0, -9.0, -9.0], [-7.0, -7.0, -7.0]], dtype=dtype)
    batch = batch_of(torch.zeros(3, 3), [[True, True, False], [True, False, False], [False, False, False]])
    weights = torch.tensor([[1.0, 0.5, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]], dtype=dtype)
    return logprobs, batch, torch.tensor([2.0, -1.0, 5.0], dtype=dtype), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reinforce_zero_by_hand(dtype):
    # response 0: (2*1*(-0.5) + 2*0.5*(-1))/2 = -1; response 1: -1*2*(-3)/1 = 6; response 2 is empty; -(-1 + 6)/3
    logprobs, batch, advantages, weights = example(dtype)
    got = reinforce_zero_loss(logprobs, batch, advantages=advantages, weights=weights, denominator=3)
    torch.testing.assert_close(got, torch.tensor(-5 / 3, dtype=dtype))


def test_reinforce_zero_gradient_by_hand_and_numerically():  # -A rho / n / 3: -2/2/3, -1/2/3; 2/1/3
    logprobs, batch, advantages, weights = example()
    loss = lambda x: reinforce_zero_loss(x, batch, advantages=advantages, weights=weights, denominator=3)
    expected = torch.tensor([[-1 / 3, -1 / 6, 0], [2 / 3, 0, 0], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(torch.func.grad(loss)(logprobs), expected)
    assert torch.autograd.gradcheck(loss, logprobs.requires_grad_())


def test_token_mean_by_hand():  # the same terms without n: -(-1 - 1 + 6)/3 tokens
    logprobs, batch, advantages, weights = example()
    got = token_mean_loss(logprobs, batch, advantages=advantages, weights=weights, denominator=token_count(batch))
    torch.testing.assert_close(got, torch.tensor(-4 / 3, dtype=torch.float64))


def test_supervised_by_hand():  # -((-0.5 - 1)/2 - 3/1)/3 = 3.75/3
    logprobs, batch, _, _ = example()
    got = supervised_loss(logprobs, batch, denominator=response_count(batch))
    torch.testing.assert_close(got, torch.tensor(1.25, dtype=torch.float64))


def test_counts_by_hand():
    assert (response_count(example()[1]), token_count(example()[1])) == (3, 3)


def test_ppo_by_hand():
    # ratios 2, 2, 1/2, 1/2 clip to 1.25, 1.25, 0.8, 0.8; with A = 1 the minimum is 1.25, 1.25, 0.5, 0.5; with A = -1
    # it is -2, -2, -0.8, -0.8; one token a response. Gradient -A ratio / 8 where the minimum is the free branch.
    logprobs = torch.tensor([2.0, 2.0, 0.5, 0.5] * 2, dtype=torch.float64).log()[:, None]
    batch = batch_of(torch.zeros(8, 1))
    advantages = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=torch.float64)
    loss = lambda x: ppo(x, batch, advantages=advantages, denominator=8)
    grad, value = torch.func.grad_and_value(loss)(logprobs)
    torch.testing.assert_close(value, torch.tensor(-(3.5 - 5.6) / 8, dtype=torch.float64))
    expected = torch.tensor([0, 0, -0.5, -0.5, 2, 2, 0, 0], dtype=torch.float64)[:, None] / 8
    torch.testing.assert_close(grad, expected)


@settings(max_examples=50, deadline=None)
@given(cases())
def test_gradient_equals_that_of_minus_advantage_times_ratio(case):
    logprobs, batch, advantages, _ = case
    rows = len(logprobs)
    weights = importance_weights(logprobs, batch)
    lengths = batch.mask.sum(1).clamp(min=1)
    surrogate = lambda x: (
        -((log_ratio(x, batch).exp() * advantages[:, None] * batch.mask).sum(1) / lengths).sum() / rows
    )
    loss = lambda x: reinforce_zero_loss(x, batch, advantages=advantages, weights=weights, denominator=rows)
    torch.testing.assert_close(torch.func.grad(loss)(logprobs), torch.func.grad(surrogate)(logprobs))


def test_ppo_without_a_bound_in_reach_has_the_gradient_of_reinforce_zero():
    logprobs, batch, advantages, _ = example()
    wide = lambda x: ppo_clipped_loss(x, batch, advantages=advantages, low=0.0, high=1e9, denominator=3)
    weights = importance_weights(logprobs, batch)
    loss = lambda x: reinforce_zero_loss(x, batch, advantages=advantages, weights=weights, denominator=3)
    torch.testing.assert_close(torch.func.grad(wide)(logprobs), torch.func.grad(loss)(logprobs))


@every
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_masked_positions_cannot_reach_loss_or_gradient(loss, case):
    logprobs, batch, advantages, weights = case
    run = torch.func.grad_and_value(
        lambda x, w: loss(x, batch, advantages=advantages, weights=w, denominator=3), argnums=0
    )
    clean = run(logprobs, weights)
    for value in (torch.nan, torch.inf, -torch.inf, 89.0):
        dirty = lambda x, value=value: x.masked_fill(~batch.mask, value)
        grad, got = run(dirty(logprobs), dirty(weights))
        assert torch.equal(got, clean[1]) and torch.equal(grad, clean[0])
        assert torch.equal(grad[~batch.mask], torch.zeros_like(grad[~batch.mask]))


@every
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_padding_never_matters(loss, case):
    logprobs, batch, advantages, weights = case
    pad = lambda x, value: torch.nn.functional.pad(x, (0, 2), value=value)
    padded = batch_of(pad(batch.behaviour_logprobs, torch.nan), pad(batch.mask, False))
    run = torch.func.grad_and_value(
        lambda x, b, w: loss(x, b, advantages=advantages, weights=w, denominator=3), argnums=0
    )
    grad, value = run(logprobs, batch, weights)
    padded_grad, padded_value = run(pad(logprobs, -torch.inf), padded, pad(weights, torch.inf))
    torch.testing.assert_close((padded_grad, padded_value), (pad(grad, 0.0), value))


@every
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_microbatches_add_up(loss, case):
    logprobs, batch, advantages, weights = case
    parts = sum(
        loss(logprobs[i : i + 1], batch.rows(i, i + 1), advantages=advantages[i : i + 1], weights=weights[i : i + 1],
             denominator=3)
        for i in range(len(logprobs))
    )  # fmt: skip
    torch.testing.assert_close(parts, loss(logprobs, batch, advantages=advantages, weights=weights, denominator=3))


@every
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_order_of_rows_never_matters(loss, case):
    logprobs, batch, advantages, weights = case
    flipped = batch_of(batch.behaviour_logprobs.flip(0), batch.mask.flip(0))
    torch.testing.assert_close(
        loss(logprobs.flip(0), flipped, advantages=advantages.flip(0), weights=weights.flip(0), denominator=3),
        loss(logprobs, batch, advantages=advantages, weights=weights, denominator=3),
    )


@every
def test_no_gradient_to_advantages_or_weights(loss):
    logprobs, batch, advantages, weights = example()
    run = lambda a, w: loss(logprobs, batch, advantages=a, weights=w, denominator=3) + 0 * (a.sum() + w.sum())
    assert not any(grad.any() for grad in torch.func.grad(run, argnums=(0, 1))(advantages, weights))


@every
def test_no_token_at_all_gives_zero_and_gradient_zero(loss):
    batch = batch_of(torch.full((2, 3), torch.nan), torch.zeros(2, 3, dtype=torch.bool))
    run = lambda x: loss(x, batch, advantages=torch.ones(2), weights=torch.ones(2, 3), denominator=2)
    grad, value = torch.func.grad_and_value(run)(torch.full((2, 3), torch.nan))
    assert value == 0 and torch.equal(grad, torch.zeros(2, 3))


def test_an_empty_response_counts_in_the_mean_over_responses():
    logprobs, batch, advantages, weights = example()
    with_empty = reinforce_zero_loss(logprobs, batch, advantages=advantages, weights=weights, denominator=3)
    without = reinforce_zero_loss(
        logprobs[:2], batch.rows(0, 2), advantages=advantages[:2], weights=weights[:2], denominator=2
    )
    torch.testing.assert_close(with_empty, without * 2 / 3)


@pytest.mark.parametrize("loss", [reinforce_zero_loss, token_mean_loss])
def test_a_live_weight_that_is_not_finite_is_not_repaired(loss):
    logprobs, batch, advantages, weights = example()
    assert not loss(logprobs, batch, advantages=advantages, weights=weights * torch.inf, denominator=3).isfinite()


@every
def test_wrong_shapes_and_numbers_are_refused(loss):
    logprobs, batch, advantages, weights = example()
    with pytest.raises(ValueError, match=r"logprobs must have the shape of mask \[3, 3\], got \[3, 2\]"):
        loss(logprobs[:, :2], batch, advantages=advantages, weights=weights, denominator=3)
    with pytest.raises(ValueError, match="denominator must be > 0, got 0"):
        loss(logprobs, batch, advantages=advantages, weights=weights, denominator=0)


@pytest.mark.parametrize("name", ["reinforce_zero", "token_mean", "ppo"])
def test_advantages_are_one_a_response(name):
    logprobs, batch, advantages, weights = example()
    with pytest.raises(ValueError, match=r"advantages must be one a response \[3\], got \[3, 1\]"):
        ALL[name](logprobs, batch, advantages=advantages[:, None], weights=weights, denominator=3)


def test_weights_are_one_a_token():
    logprobs, batch, advantages, weights = example()
    with pytest.raises(ValueError, match=r"weights must have the shape of mask \[3, 3\], got \[3, 1\]"):
        reinforce_zero_loss(logprobs, batch, advantages=advantages, weights=weights[:, :1], denominator=3)


@pytest.mark.parametrize("low, high", [(1.1, 1.2), (0.5, 0.9), (-0.1, 1.0)])
def test_clip_bounds_hold_one(low, high):
    logprobs, batch, advantages, _ = example()
    with pytest.raises(ValueError, match="low and high must obey 0 <= low <= 1 <= high"):
        ppo_clipped_loss(logprobs, batch, advantages=advantages, low=low, high=high, denominator=3)
