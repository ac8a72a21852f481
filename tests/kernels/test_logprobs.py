import pytest
import torch
from examples import DTYPES, assert_near, assert_rows_alone, gradients, normal

from rz.ops import row_logprobs, tempered_logprobs, token_logprobs, triton_logprobs

pytestmark = pytest.mark.usefixtures("on_kernels")


def exact(hidden, head, targets, temperature):
    return torch.log_softmax(hidden @ head.t() / temperature, -1).gather(1, targets[:, None])[:, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width, vocabulary", [(1, 32, 17), (17, 33, 257)])
def test_values_and_gradients(rows, width, vocabulary, dtype):
    hidden, head = normal(rows, width, dtype=dtype), (normal(vocabulary, width, seed=1) * width**-0.5).to(dtype)
    targets = torch.arange(rows) * 7 % vocabulary
    op = lambda hidden, head: token_logprobs(hidden, head, targets, temperature=0.7)
    by_definition = lambda hidden, head: exact(hidden, head, targets, 0.7)
    assert_near(op(hidden, head), by_definition(hidden.double(), head.double()), dtype, 8)
    wide = gradients(by_definition, hidden.double(), head.double())
    for got, expected in zip(gradients(op, hidden, head), wide, strict=True):
        assert_near(got, expected, dtype, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_bits_of_its_row(dtype):
    hidden, head, targets = normal(19, 32, dtype=dtype), normal(65, 32, dtype=dtype, seed=1), torch.arange(19) * 3
    rows = row_logprobs(hidden, head, temperature=0.6)
    assert torch.equal(token_logprobs(hidden, head, targets, temperature=0.6), rows[torch.arange(19), targets])


def test_rows_do_not_know_of_each_other_or_of_chunks(monkeypatch):
    hidden, head, targets = normal(40, 32), normal(50, 32, seed=1), torch.arange(40)
    op = lambda hidden, head: token_logprobs(hidden, head, targets[: len(hidden)], temperature=1.0)
    whole, grads = op(hidden, head), gradients(op, hidden, head)
    monkeypatch.setattr(triton_logprobs, "CHUNK_ELEMENTS", 1)  # the least: 16 rows
    assert torch.equal(op(hidden, head), whole)
    chunked = gradients(op, hidden, head)
    assert torch.equal(chunked[0], grads[0])
    torch.testing.assert_close(chunked[1], grads[1])


def test_tempered_rows_in_blocks():
    """5,000 entries are two blocks; a temperature of its own for each row."""
    logits, temperatures = normal(20, 5000) * 5, torch.linspace(0.5, 2, 20)
    got = tempered_logprobs(logits, temperature=temperatures)
    torch.testing.assert_close(
        got.double(), torch.log_softmax(logits.double() / temperatures[:, None], -1), atol=2e-6, rtol=2e-7
    )
    assert_rows_alone(lambda x: tempered_logprobs(x[:, 1:].contiguous(), temperature=0.7), logits[:, :300])
    assert torch.equal(tempered_logprobs(logits[3:4], temperature=temperatures[3:4]), got[3:4])


def test_by_hand():
    """Logits 0 and log 3 at temperature 1: probabilities 1/4 and 3/4. At 1/2, logits 0 and log 9: 1/10 and 9/10."""
    logits = torch.tensor([[1.0, 3.0]]).log()
    torch.testing.assert_close(tempered_logprobs(logits, temperature=1.0).exp(), torch.tensor([[0.25, 0.75]]))
    torch.testing.assert_close(tempered_logprobs(logits, temperature=0.5).exp(), torch.tensor([[0.1, 0.9]]))


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinities_and_no_rows():
    inf = torch.inf
    got = tempered_logprobs(torch.tensor([[0.0, -inf], [-inf, -inf], [inf, 0.0], [torch.nan, 0.0]]), temperature=1.0)
    assert torch.equal(got[0], torch.tensor([0.0, -inf])) and got[1:].isnan().any(1).all()
    assert tempered_logprobs(torch.zeros(0, 5), temperature=1.0).shape == (0, 5)
    assert token_logprobs(torch.zeros(0, 4), torch.zeros(5, 4), torch.zeros(0).long(), temperature=1.0).shape == (0,)


@pytest.mark.parametrize("target", [-1, 5, 1 << 40])
def test_a_token_outside_the_vocabulary_reads_no_memory(target):
    """A device cannot refuse it; its probability is 0."""
    hidden, head, targets = normal(2, 8), normal(5, 8, seed=1), torch.tensor([3, target])
    got = token_logprobs(hidden, head, targets, temperature=1.0)
    assert got[0] == row_logprobs(hidden, head, temperature=1.0)[0, 3] and got[1] == -torch.inf
