import importlib
import math

import pytest
import torch
from alignment import assert_aligned, normal, threads
from torch.utils._python_dispatch import TorchDispatchMode

from rz.ops import linear, row_logprobs, tempered_logprobs, token_logprobs

TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
MODULE = importlib.import_module("rz.ops.logprobs")


def example(rows, vocabulary, width, dtype=torch.float32, weight_dtype=None):
    targets = torch.arange(rows) * 7 % vocabulary
    head = normal(vocabulary, width, dtype=dtype, seed=1)
    return normal(rows, width, dtype=dtype), head.to(weight_dtype or dtype), targets


def reference(hidden, head, targets, temperature):
    logprobs = torch.log_softmax(hidden @ head.t() / temperature, -1)
    return logprobs.gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_value_by_hand(dtype, weight_dtype):
    # logits 0 and 2: at temperature 2 the odds are e, at temperature 1 they are e^2
    hidden, head = torch.tensor([[1.0], [1.0]], dtype=dtype), torch.tensor([[0.0], [2.0]], dtype=weight_dtype)
    for temperature, odds in ((2.0, math.e), (1.0, math.e**2)):
        got = token_logprobs(hidden, head, torch.tensor([0, 1]), temperature=temperature)
        torch.testing.assert_close(got, torch.tensor([1 / (1 + odds), odds / (1 + odds)]).log())


@pytest.mark.parametrize("vocabulary", [2, 20, 1000])
@pytest.mark.parametrize("rows", [0, 1, 63, 257])
def test_value_against_float64(vocabulary, rows):
    hidden, head, targets = example(rows, vocabulary, 16)
    got = token_logprobs(hidden, head, targets, temperature=0.6)
    assert got.shape == (rows,) and got.dtype == torch.float32
    expected = reference(hidden.double(), head.double(), targets, 0.6).float()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_only_the_product_is_rounded_to_bfloat16():
    hidden, head, targets = example(40, 50, 32, torch.bfloat16)
    logits = linear(hidden, head)
    assert logits.dtype == torch.bfloat16
    expected = torch.log_softmax(logits.float() / 0.6, -1).gather(1, targets[:, None])[:, 0]
    assert torch.equal(token_logprobs(hidden, head, targets, temperature=0.6), expected)


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize("vocabulary", [2, 20, 300])
@pytest.mark.parametrize("chunk", [1, 300 * 17, 1 << 22])
def test_equals_the_gathered_rows_whatever_the_chunk(monkeypatch, dtype, weight_dtype, vocabulary, chunk):
    hidden, head, targets = example(137, vocabulary, 24, dtype, weight_dtype)
    expected = row_logprobs(hidden, head, temperature=0.6).gather(1, targets[:, None])[:, 0]
    monkeypatch.setattr(MODULE, "CHUNK_ELEMENTS", chunk)
    for rows in (1, 2, 15, 16, 17, 33, 137):
        got = token_logprobs(hidden[:rows], head, targets[:rows], temperature=0.6)
        assert torch.equal(got, expected[:rows]), rows


def test_large_vocabulary():
    hidden, head, targets = example(100, 49152, 16)
    got = token_logprobs(hidden, head, targets, temperature=0.6)
    rows = row_logprobs(hidden, head, temperature=0.6)
    assert torch.equal(got, rows.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(got, reference(hidden.double(), head.double(), targets, 0.6).float())
    for start in (0, 99):
        assert torch.equal(row_logprobs(hidden[start : start + 1], head, temperature=0.6)[0], rows[start])


def test_a_single_long_row_is_summed_as_among_others():
    logits = normal(5, 40_000)
    for count in (1, 2):
        with threads(count):
            whole = tempered_logprobs(logits, temperature=0.7)
            for row in range(5):
                assert torch.equal(tempered_logprobs(logits[row : row + 1], temperature=0.7)[0], whole[row])


def test_temperature_of_each_row_equals_a_scalar():
    hidden, head, _ = example(40, 20, 16)
    temperatures = torch.tensor([0.6, 1.0, 1.7, 0.6]).repeat(10)
    mixed = row_logprobs(hidden, head, temperature=temperatures)
    for temperature in (0.6, 1.0, 1.7):
        rows = temperatures == temperature
        assert torch.equal(mixed[rows], row_logprobs(hidden, head, temperature=temperature)[rows])
        assert torch.equal(mixed[rows], row_logprobs(hidden[rows], head, temperature=temperature))


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize("vocabulary", [2, 20, 129])
def test_aligned(dtype, weight_dtype, vocabulary):
    hidden, head, _ = example(1003, vocabulary, 24, dtype, weight_dtype)
    assert_aligned(lambda x: row_logprobs(x, head, temperature=0.6), hidden)
    assert_aligned(lambda x: tempered_logprobs(x, temperature=0.6), row_logprobs(hidden, head, temperature=1.0))


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_gradients_against_float64(monkeypatch, dtype, weight_dtype, chunk):
    monkeypatch.setattr(MODULE, "CHUNK_ELEMENTS", chunk)
    hidden, head, targets = example(35, 20, 16, dtype, weight_dtype)
    above = normal(35, seed=2)
    loss = lambda hidden, head: (token_logprobs(hidden, head, targets, temperature=0.6) * above).sum()
    exact = lambda hidden, head: (reference(hidden, head, targets, 0.6) * above.double()).sum()
    grads = torch.func.grad(loss, argnums=(0, 1))(hidden, head)
    wanted = torch.func.grad(exact, argnums=(0, 1))(hidden.double(), head.double())
    for grad, want, argument in zip(grads, wanted, (hidden, head), strict=True):
        assert grad.dtype == argument.dtype
        # bfloat16: logits up to 16 in steps of 2^-4 move the probabilities by up to 10 %
        tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
        torch.testing.assert_close(grad.double(), want, **tolerance)
    arguments = [argument.clone().requires_grad_() for argument in (hidden, head)]
    again = torch.autograd.grad(loss(*arguments), arguments)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_token_of_probability_zero_gives_minus_infinity():
    got = token_logprobs(torch.ones(2, 1), torch.tensor([[0.0], [-torch.inf]]), torch.tensor([0, 1]), temperature=1.0)
    assert got.tolist() == [0.0, -math.inf]


class LargestOutput(TorchDispatchMode):
    """Records the elements of the largest tensor that any torch operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            self.elements = max(self.elements, tensor.numel())
        return out


def test_memory_does_not_grow_with_rows_times_vocabulary(monkeypatch):
    monkeypatch.setattr(MODULE, "CHUNK_ELEMENTS", 100 * 32)
    hidden, head, targets = example(1000, 100, 8)
    hidden.requires_grad_()
    head.requires_grad_()
    with LargestOutput() as largest:
        token_logprobs(hidden, head, targets, temperature=0.6).sum().backward()
    assert largest.elements == hidden.numel()  # 8,000; the logits of a chunk are 3,200, those of all rows 100,000


def test_errors_name_argument_rule_and_value():
    hidden, head, targets = example(3, 4, 5)
    with pytest.raises(ValueError, match=r"targets must be \[3\], got \[2\]"):
        token_logprobs(hidden, head, targets[:2], temperature=1.0)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"temperature must be > 0, got (0.0|-1.0|nan)"):
            token_logprobs(hidden, head, targets, temperature=temperature)
    with pytest.raises(RuntimeError, match="out of bounds"):
        token_logprobs(hidden, head, torch.tensor([0, 1, 4]), temperature=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(513, 512), (3, 151_936), (1, 151_936)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_with_a_gradient_the_bits_are_those_of_rows(dtype, rows, vocabulary, temperature):
    """What is kept for the backward changes no bit, though its last chunk is a single row."""
    hidden, head = normal(rows, 64, dtype=dtype), normal(vocabulary, 64, dtype=dtype, seed=1)
    targets = torch.arange(rows) * 31 % vocabulary
    whole = row_logprobs(hidden, head, temperature=torch.full((rows,), temperature))
    got = token_logprobs(hidden.requires_grad_(), head, targets, temperature=temperature)
    assert torch.equal(got, whole.gather(1, targets[:, None])[:, 0])
