import math

import pytest
import torch
from alignment import assert_aligned, normal

from rz.ops import swiglu

TYPES = [torch.float32, torch.bfloat16]


def reference(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def test_value_by_hand():  # sigmoid(ln 3) = 3/4, sigmoid(0) = 1/2
    got = swiglu(torch.tensor([[math.log(3), 0.0, 4.0, 5.0]]))
    torch.testing.assert_close(got, torch.tensor([[3 * math.log(3), 0.0]]))


def test_silu_is_not_rounded_before_up_multiplies():
    # silu(1) = 0.731059; times 21 is 15.3522, in steps of 1/16: 245.64, so 246/16 = 15.375.
    # Rounded first to 187/256 the product would be 15.3398, 245.44 steps, so 245/16 = 15.3125.
    assert swiglu(torch.tensor([[1.0, 21.0]]).bfloat16()).item() == 15.375


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 126), (257, 64)])
def test_value_against_float64(dtype, shape):
    gate_up = 4 * normal(*shape, dtype=dtype)
    got = swiglu(gate_up)
    assert got.dtype == dtype
    torch.testing.assert_close(got, reference(gate_up.double()).to(dtype))


def test_extreme_gates_stay_finite_with_their_gradient():
    gate_up = torch.tensor([[-3e38, -200.0, -88.8, 200.0, 2.0, 2.0, 2.0, 2.0]])
    got = swiglu(gate_up)
    torch.testing.assert_close(got, torch.tensor([[0.0, 0.0, 0.0, 400.0]]))
    grad = torch.func.grad(lambda x: swiglu(x).sum())(gate_up)
    torch.testing.assert_close(grad, torch.tensor([[0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 200.0]]))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(9, 66), (2, 20, 1 << 15)])  # the last in several chunks of rows
@pytest.mark.parametrize("strided", [False, True])
def test_gradient_against_float64(dtype, shape, strided):
    gate_up, above = 3 * normal(*shape, dtype=dtype), normal(*shape[:-1], shape[-1] // 2, seed=1)
    gate_up = gate_up.transpose(0, 1).contiguous().transpose(0, 1) if strided else gate_up
    grad = torch.func.grad(lambda x: (swiglu(x).float() * above).sum())(gate_up)
    want = torch.func.grad(lambda x: (reference(x) * above.to(dtype).double()).sum())(gate_up.double())
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, want.to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 7, 63, 64, 384])
def test_aligned(dtype, width):
    assert_aligned(swiglu, 4 * normal(1003, 2 * width, dtype=dtype))


def test_odd_width_is_an_error():
    with pytest.raises(ValueError, match=r"gate_up must have an even last axis, got \[2, 3\]"):
        swiglu(torch.zeros(2, 3))
