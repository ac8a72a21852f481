import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.steps import group_mean_advantages, leave_one_out_advantages, std_normalised_advantages

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
ALL = [
    group_mean_advantages,
    leave_one_out_advantages,
    lambda rewards, group_ids: std_normalised_advantages(rewards, group_ids, epsilon=1e-6),
]
every = pytest.mark.parametrize("advantages", ALL, ids=["group_mean", "leave_one_out", "std_normalised"])


@st.composite
def groups(draw):
    count = draw(st.integers(1, 12))
    ids = draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count))
    rewards = draw(st.lists(st.floats(-5, 5), min_size=count, max_size=count))
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids)


@pytest.mark.parametrize("dtype", FLOATS)
def test_group_mean_by_hand(dtype):  # group 7: 1, 0, 2, mean 1; group 3: 4, 0, mean 2; ids interleaved
    rewards, ids = torch.tensor([1, 4, 0, 0, 2], dtype=dtype), torch.tensor([7, 3, 7, 3, 7])
    assert torch.equal(group_mean_advantages(rewards, ids), torch.tensor([0, 2, -1, -2, 1], dtype=dtype))


def test_leave_one_out_by_hand():  # 3 - (0 + 0)/2 = 3; 0 - (3 + 0)/2 = -1.5
    got = leave_one_out_advantages(torch.tensor([3.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(got, torch.tensor([3.0, -1.5, -1.5]))


def test_std_normalised_by_hand():  # mean 3, squares 4 + 0 + 4 = 8, s = sqrt(8/2) = 2; (1 - 3)/(2 + 2) = -0.5
    got = std_normalised_advantages(torch.tensor([1.0, 3.0, 5.0]), torch.zeros(3, dtype=torch.int64), epsilon=2.0)
    assert torch.equal(got, torch.tensor([-0.5, 0.0, 0.5]))


@every
@pytest.mark.parametrize("dtype", FLOATS)
def test_eight_rewards_of_0_7_give_exactly_zero(advantages, dtype):  # in float32 their plain mean is not 0.7
    got = advantages(torch.full((8,), 0.7, dtype=dtype), torch.full((8,), 5))
    assert got.dtype == dtype and torch.equal(got, torch.zeros(8, dtype=dtype))


@every
@settings(max_examples=50, deadline=None)
@given(value=st.floats(-1e30, 1e30), count=st.integers(1, 20))
def test_equal_rewards_give_exactly_zero_whatever_they_are(advantages, value, count):
    ids = torch.arange(2 * count) % 2
    rewards = torch.tensor([value, 0.1], dtype=torch.float64)[ids]
    assert torch.equal(advantages(rewards, ids), torch.zeros(2 * count, dtype=torch.float64))


@every
def test_group_of_one_gives_exactly_zero(advantages):
    got = advantages(torch.tensor([0.3, 1.0, 0.0, -7.1]), torch.tensor([4, 9, 9, 2]))
    assert got[0] == 0 and got[3] == 0 and got[1] > 0 > got[2]


@every
@settings(max_examples=50, deadline=None)
@given(case=groups(), seed=st.integers(0, 1000))
def test_order_of_rows_never_matters(advantages, case, seed):
    rewards, ids = case
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(advantages(rewards[order], ids[order]), advantages(rewards, ids)[order])


@every
@settings(max_examples=50, deadline=None)
@given(case=groups(), constant=st.sampled_from([-4.0, 0.5, 64.0]))
def test_a_constant_added_to_a_group_never_matters(advantages, case, constant):
    rewards, ids = case
    rewards = (rewards * 8).round() / 8  # eighths, so that the sum is exact and only the constant is in play
    shifted = torch.where(ids == ids[0], rewards + constant, rewards)
    torch.testing.assert_close(advantages(shifted, ids), advantages(rewards, ids))


@settings(max_examples=50, deadline=None)
@given(case=groups())
def test_each_group_alone_gives_the_same_and_sums_to_zero(case):
    rewards, ids = case
    whole = group_mean_advantages(rewards, ids)
    for group in ids.unique():
        torch.testing.assert_close(whole[ids == group], group_mean_advantages(rewards[ids == group], ids[ids == group]))
        assert abs(float(whole[ids == group].sum())) < 1e-12  # sums of at most 12 numbers below 10


@every
def test_a_reward_that_is_not_finite_stays_in_its_group(advantages):
    got = advantages(torch.tensor([torch.nan, 1.0, 3.0, 1.0]), torch.tensor([1, 1, 2, 2]))
    assert got[:2].isnan().all() and got[2:].isfinite().all()


@every
def test_composes_under_torch_func(advantages):
    rewards, ids = torch.tensor([1.0, 0.0, 5.0, 2.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    grad, value = torch.func.grad_and_value(lambda x: advantages(x, ids)[0])(rewards)
    torch.testing.assert_close(value, advantages(rewards, ids)[0])
    assert torch.autograd.gradcheck(lambda x: advantages(x, ids), rewards.requires_grad_())
    assert grad[2:].eq(0).all()


@every
def test_wrong_shapes_are_refused(advantages):
    with pytest.raises(ValueError, match=r"group_ids must have the shape of rewards \[2\], got \[3\]"):
        advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rewards must be \[B\] of a float type, B >= 1, got \[2, 1\]"):
        advantages(torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rewards must be .* B >= 1, got \[0\]"):
        advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="rewards must be .* torch.int64"):
        advantages(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))


def test_epsilon_must_be_positive():
    with pytest.raises(ValueError, match="epsilon must be > 0, got 0.0"):
        std_normalised_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), epsilon=0.0)
