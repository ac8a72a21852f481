"""What rz verify --device cuda counts, on kernels in the interpreter and in small sizes."""

import pytest
import torch

from rz.verify import alignment

pytestmark = pytest.mark.usefixtures("on_kernels")
CPU = torch.device("cpu")


def test_products():
    assert alignment.product_bits((40, 24), torch.bfloat16, CPU, (1, 17)) == alignment.Bits(compared=888, differing=0)
    assert alignment.float32_error((64, 16), CPU, rows=4) < 1e-5


def test_experts():
    bits = alignment.expert_bits(torch.bfloat16, CPU, (1, 9))
    assert bits == alignment.Bits(compared=10 * 192, differing=0)


def test_attention():
    bits = alignment.attention_bits((2, 1, 16), torch.float32, CPU, 20, lengths=(1, 2, 20), last=2)
    assert bits == alignment.Bits(compared=2 * 23 * 2 * 16, differing=0)


def test_what_differs_is_counted():
    """A sum that depends on the number of rows: 3 rows of 4 values, seen at 1 and 3 rows and in another order."""
    x = torch.ones(3, 4)
    found = alignment.count(alignment.row_pairs(lambda x: x + len(x), x, (1, 3)))
    assert found == alignment.Bits(compared=3 * 4 + 12 + 12, differing=12)
    nan = torch.full((2,), torch.nan)
    assert alignment.count(iter([(nan, nan)])).differing == 2
