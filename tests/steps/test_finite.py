import attrs
import pytest
import torch
from batches import batch_of, cases
from hypothesis import given, settings

from rz.steps import count_nonfinite, drop_nonfinite, importance_weights, reinforce_zero_loss, require_finite

ALL = [require_finite, drop_nonfinite, count_nonfinite]


def example(p=-1.0, q=-1.0, mask=True):
    """Three responses of two tokens, groups 5, 5 and 8; what is asked for stands in row 1, position 1."""
    logprobs, behaviour = torch.full((3, 2), -1.0), torch.full((3, 2), -1.0)
    logprobs[1, 1], behaviour[1, 1] = p, q
    live = torch.ones(3, 2, dtype=torch.bool)
    live[1, 1] = mask
    return logprobs, batch_of(behaviour, live, group_ids=[5, 5, 8])


FAULTS = [
    (torch.nan, -1.0, "logprobs must be finite where mask is True, got nan"),
    (-torch.inf, -1.0, "logprobs must be finite where mask is True, got -inf"),
    (torch.inf, -1.0, "logprobs must be finite where mask is True, got inf"),
    (-1.0, torch.nan, "behaviour_logprobs must be finite where mask is True, got nan"),
    (-1.0, -torch.inf, "behaviour_logprobs must be finite where mask is True, got -inf"),
    (-1.0, torch.inf, "behaviour_logprobs must be finite where mask is True, got inf"),  # its ratio is 0
    (-1.0, -90.0, r"the ratio exp\(p - q\) must be finite in float32, got exp\(89\)"),
]


@pytest.mark.parametrize("p, q, message", FAULTS)
def test_a_live_fault_raises_naming_row_group_and_position(p, q, message):
    with pytest.raises(ValueError, match="^" + message + r" in row 1 \(group 5\), position 1$"):
        require_finite(*example(p, q))
    with pytest.raises(ValueError, match=r"in row 9 \(group 5\), position 1"):
        require_finite(*example(p, q), first_row=8)


def test_overflow_is_judged_in_float32_whatever_the_type():
    logprobs, batch = example(-1.0, -90.0)
    with pytest.raises(ValueError, match=r"exp\(89\)"):
        require_finite(logprobs.double(), batch)


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("p, q", [fault[:2] for fault in FAULTS])
def test_a_masked_fault_is_not_read(check, p, q):
    logprobs, batch = example(p, q, mask=False)
    got, count = check(logprobs, batch)
    assert count == 0 and torch.equal(got.mask, batch.mask)


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("p, q", [(-1.0, -89.0), (-1000.0, -1.0), (0.0, -0.0)])  # exp(88) fits; exp(-999) is 0
def test_what_is_finite_passes(check, p, q):
    logprobs, batch = example(p, q)
    got, count = check(logprobs, batch)
    assert count == 0 and torch.equal(got.mask, batch.mask)


@pytest.mark.parametrize("p, q", [fault[:2] for fault in FAULTS])
def test_drop_clears_the_whole_response_and_count_changes_nothing(p, q):
    logprobs, batch = example(p, q)
    dropped, count = drop_nonfinite(logprobs, batch)
    assert count == 1 and dropped.mask.tolist() == [[True, True], [False, False], [True, True]]
    assert all(
        getattr(dropped, field.name) is getattr(batch, field.name)
        for field in attrs.fields(type(batch))
        if field.name != "mask"
    )
    assert batch.mask.all()
    assert count_nonfinite(logprobs, batch) == (batch, 1)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_dropping_leaves_the_gradient_of_other_responses_bit_for_bit(case):
    logprobs, batch, advantages, _ = case
    broken = logprobs.clone()
    broken[0, 0] = -torch.inf

    def gradient(x, kept):
        weights = importance_weights(x, kept)
        loss = lambda y: reinforce_zero_loss(y, kept, advantages=advantages, weights=weights, denominator=len(x))
        return torch.func.grad(loss)(x)

    kept, count = drop_nonfinite(broken, batch)
    assert count == int(batch.mask[0, 0])
    assert torch.equal(gradient(broken, kept)[1:], gradient(logprobs, batch)[1:])
    if count:
        assert not gradient(broken, kept)[0].any()


@pytest.mark.parametrize("check", ALL)
def test_wrong_shape_is_refused(check):
    with pytest.raises(ValueError, match=r"shape of mask \[3, 2\], got \[3, 1\]"):
        check(example()[0][:, :1], example()[1])
