import pytest
import torch
from batches import batch_of, cases
from hypothesis import given, settings

from rz.steps import log_ratio


def test_value_by_hand():  # -1 - (-2) = 1; masked 0; -0.5 - (-0.25) = -0.25
    batch = batch_of([[-2.0, torch.nan, -0.25]], [[True, False, True]])
    got = log_ratio(torch.tensor([[-1.0, torch.inf, -0.5]]), batch)
    assert torch.equal(got, torch.tensor([[1.0, 0.0, -0.25]]))


@settings(max_examples=50, deadline=None)
@given(cases())
def test_gradient_is_the_mask(case):
    logprobs, batch, _, _ = case
    logprobs = logprobs.masked_fill(~batch.mask, torch.nan)
    grad = torch.func.grad(lambda x: log_ratio(x, batch).sum())(logprobs)
    assert torch.equal(grad, batch.mask.double())


def test_a_shorter_sequence_is_refused_never_truncated():
    with pytest.raises(ValueError, match=r"logprobs must have the shape of mask \[1, 3\], got \[1, 2\]"):
        log_ratio(torch.zeros(1, 2), batch_of(torch.zeros(1, 3)))
    with pytest.raises(ValueError, match=r"shape of mask \[2, 1\], got \[1, 1\]"):  # broadcastable all the same
        log_ratio(torch.zeros(1, 1), batch_of(torch.zeros(2, 1)))


def test_half_precision_is_refused():
    with pytest.raises(TypeError, match="logprobs must be float32 or float64, got torch.bfloat16"):
        log_ratio(torch.zeros(1, 1, dtype=torch.bfloat16), batch_of(torch.zeros(1, 1)))
