import math
from functools import partial

import pytest
import torch
from batches import batch_of, cases
from hypothesis import given, settings

from rz.steps import (
    importance_weights,
    masked_importance_weights,
    sequence_importance_weights,
    sequence_mean_importance_weights,
    truncated_importance_weights,
    unit_importance_weights,
)

ALL = {
    "plain": importance_weights,
    "truncated": partial(truncated_importance_weights, cap=2.0),
    "masked": partial(masked_importance_weights, low=0.5, high=2.0),
    "sequence": sequence_importance_weights,
    "sequence_mean": sequence_mean_importance_weights,
    "unit": unit_importance_weights,
}
every = pytest.mark.parametrize("weights", ALL.values(), ids=ALL.keys())


def ratios(*values):
    """logprobs, and a batch with a last masked token, whose live ratios are these."""
    logprobs = torch.tensor([[*(math.log(value) - 1 for value in values), torch.nan]], dtype=torch.float64)
    mask = [[True] * len(values) + [False]]
    return logprobs, batch_of([[-1.0] * len(values) + [torch.inf]], mask)


@pytest.mark.parametrize(
    "weights, expected",
    [
        (importance_weights, [4, 0.25, 8]),
        (partial(truncated_importance_weights, cap=5.0), [4, 0.25, 5]),
        (partial(masked_importance_weights, low=0.5, high=5.0), [4, 0, 0]),
        (sequence_importance_weights, [8, 8, 8]),  # 4 * 0.25 * 8
        (sequence_mean_importance_weights, [2, 2, 2]),  # 8 ** (1/3)
        (unit_importance_weights, [1, 1, 1]),
    ],
    ids=ALL.keys(),
)
def test_values_by_hand(weights, expected):
    got = weights(*ratios(4, 0.25, 8))
    torch.testing.assert_close(got, torch.tensor([[*expected, 0]], dtype=torch.float64))


def test_bounds_of_the_mask_count_as_inside():
    batch = batch_of([[0.0, 0.0]])
    got = masked_importance_weights(torch.zeros(1, 2), batch, low=1.0, high=1.5)
    assert torch.equal(got, torch.ones(1, 2))
    assert torch.equal(masked_importance_weights(torch.zeros(1, 2), batch, low=0.5, high=1.0), torch.ones(1, 2))


@every
def test_equal_logprobs_give_exactly_one_and_the_mask_exactly_zero(weights):
    behaviour = -torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) * 20
    batch = batch_of(behaviour, torch.arange(5)[None, :] < torch.tensor([[5], [2], [0]]))
    got = weights(behaviour.clone(), batch)
    assert got.dtype == torch.float32 and torch.equal(got, batch.mask.float())


@every
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_nothing_is_read_where_the_mask_is_false(weights, case):
    logprobs, batch, _, _ = case
    clean = weights(logprobs, batch)
    for value in (torch.nan, torch.inf, -torch.inf, 1e4):
        dirty = weights(logprobs.masked_fill(~batch.mask, value), batch)
        assert torch.equal(dirty, clean) and torch.equal(dirty[~batch.mask], torch.zeros_like(dirty[~batch.mask]))


@every
def test_difference_89_at_a_masked_position_gives_zero_there(weights):
    batch = batch_of([[-90.0, -1.0]], [[False, True]])
    assert torch.equal(weights(torch.tensor([[-1.0, -1.0]]), batch), torch.tensor([[0.0, 1.0]]))


def test_difference_89_at_a_live_position_overflows_float32_and_is_not_clamped():
    batch = batch_of([[-90.0, -89.0]])
    got = importance_weights(torch.tensor([[-1.0, -1.0]]), batch)
    assert got[0, 0] == torch.inf and got[0, 1] > 1e38  # exp(88) = 1.65e38 still is a float32
    assert truncated_importance_weights(torch.tensor([[-1.0, -1.0]]), batch, cap=2.0).tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize("name", ["plain", "truncated", "masked", "sequence", "sequence_mean"])
def test_a_live_nan_stays_nan(name):
    batch = batch_of([[torch.nan], [-1.0]])
    got = ALL[name](torch.full((2, 1), -1.0), batch)
    assert got[0].isnan().all() and got[1] == 1


@every
@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_no_gradient_passes_through(weights, case):
    logprobs, batch, _, _ = case
    grad, value = torch.func.grad_and_value(lambda x: (weights(x, batch) * x.detach()).sum() + 0 * x.sum())(logprobs)
    assert not grad.any()
    torch.testing.assert_close(value, (weights(logprobs, batch) * logprobs).sum())
    assert not weights(logprobs.clone().requires_grad_(), batch).requires_grad


@every
def test_wrong_shape_is_refused(weights):
    with pytest.raises(ValueError, match=r"shape of mask \[1, 3\], got \[1, 2\]"):
        weights(torch.zeros(1, 2), batch_of(torch.zeros(1, 3)))


def test_numbers_out_of_range_are_refused():
    batch, zeros = batch_of(torch.zeros(1, 1)), torch.zeros(1, 1)
    with pytest.raises(ValueError, match="cap must be > 0, got 0"):
        truncated_importance_weights(zeros, batch, cap=0)
    with pytest.raises(ValueError, match="low and high must obey 0 <= low < high, got 2 and 1"):
        masked_importance_weights(zeros, batch, low=2, high=1)
