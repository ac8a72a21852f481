import pytest
import torch
from alignment import normal, threads

from rz.ops import embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", [[], [2], [3, 0, 3]])
def test_rows_are_exact_copies(dtype, ids):
    weight = normal(4, 5, dtype=dtype)
    for kind in (torch.int64, torch.int32):
        got = embedding(torch.tensor(ids, dtype=kind), weight)
        assert torch.equal(got, torch.stack([weight[i] for i in ids]) if ids else weight[:0])


def test_gradient_by_hand():  # id 3 is met twice, id 1 never
    above = torch.tensor([[1.0], [10.0], [100.0]])
    grad = torch.func.grad(lambda weight: (embedding(torch.tensor([3, 0, 3]), weight) * above).sum())(torch.ones(4, 1))
    assert grad.flatten().tolist() == [10.0, 0.0, 0.0, 101.0]


def test_gradient_has_the_same_bits_every_time_and_with_any_threads():
    ids = torch.arange(5000) % 7
    weight, above = normal(7, 64), normal(5000, 64)
    grads = []
    for count in (1, 2, 1, 2):
        with threads(count):
            grads.append(torch.func.grad(lambda weight: (embedding(ids, weight) * above).sum())(weight))
    assert all(torch.equal(grad, grads[0]) for grad in grads)
    torch.testing.assert_close(grads[0], torch.zeros(7, 64).index_add(0, ids, above), rtol=1e-5, atol=1e-4)


def test_errors():
    with pytest.raises(TypeError, match=r"ids must be torch.int64 or torch.int32, got torch.float32"):
        embedding(torch.zeros(2), normal(4, 5))
    for outside in (-1, 4):
        with pytest.raises(IndexError):
            embedding(torch.tensor([outside]), normal(4, 5))
