import pytest
import torch
from alignment import assert_aligned, normal, placements

from rz.ops import linear

F32, BF16 = torch.float32, torch.bfloat16
TYPES = [(F32, F32), (BF16, BF16), (BF16, F32)]  # x, weight
WIDTHS = [(64, 64), (33, 7), (96, 10), (17, 65), (128, 192)]  # K, M


def weights(outputs, width, dtype):
    return normal(outputs, width, dtype=dtype, seed=1) * width**-0.5


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
def test_value_by_hand(dtype, weight_dtype):  # 1*3 + 2*4 + 1 = 12, 1*5 + 2*6 - 1 = 16
    x, weight = torch.tensor([[1.0, 2.0]], dtype=dtype), torch.tensor([[3.0, 4.0], [5.0, 6.0]], dtype=weight_dtype)
    assert torch.equal(linear(x, weight), torch.tensor([[11.0, 17.0]], dtype=dtype))
    bias = torch.tensor([1.0, -1.0], dtype=dtype)
    assert torch.equal(linear(x, weight, bias), torch.tensor([[12.0, 16.0]], dtype=dtype))


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize("rows", [0, 1, 15, 16, 63, 257])
@pytest.mark.parametrize("outputs", [1, 7, 65])
def test_value_against_float64(dtype, weight_dtype, rows, outputs):
    x, weight, bias = normal(rows, 33, dtype=dtype), weights(outputs, 33, weight_dtype), normal(outputs, dtype=dtype)
    got = linear(x, weight, bias)
    assert got.shape == (rows, outputs) and got.dtype == dtype
    torch.testing.assert_close(got, (x.double() @ weight.double().t() + bias.double()).to(dtype))


def test_wide_weight_is_a_float32_product_rounded_once():
    x, weight, bias = normal(40, 100, dtype=BF16), weights(70, 100, F32), normal(70)
    assert torch.equal(linear(x, weight, bias), linear(x.float(), weight, bias).to(BF16))


def test_wide_bias_is_added_before_rounding():
    # In units of 2^-9 bfloat16 has a step of 4 above 1. 512+1 and a bias of 1.5: 514.5 rounds to 516;
    # rounding the product first gives 512, and 513.5 rounds to 512 again.
    x, weight = torch.tensor([[1.0, 1.0]], dtype=BF16), torch.tensor([[512.0, 1.0]]) / 512
    assert linear(x, weight, torch.tensor([1.5 / 512])).item() == 516 / 512


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize("outputs", [1, 20, 70])
def test_gradients_against_float64(dtype, weight_dtype, outputs):
    x, weight, bias = normal(9, 33, dtype=dtype), weights(outputs, 33, weight_dtype), normal(outputs, dtype=dtype)
    above = normal(9, outputs, seed=2)
    loss = lambda *args: (linear(*args).float() * above).sum()
    grads = torch.func.grad(loss, argnums=(0, 1, 2))(x, weight, bias)
    # The product is linear in each argument: the gradients are the products with what comes from above.
    above = above.to(dtype).double()
    expected = above @ weight.double(), above.t() @ x.double(), above.sum(0)
    for grad, wanted, argument in zip(grads, expected, (x, weight, bias), strict=True):
        assert grad.dtype == argument.dtype
        torch.testing.assert_close(grad, wanted.to(grad.dtype), rtol=2e-2 if dtype == BF16 else 1e-5, atol=1e-5)
    arguments = [argument.clone().requires_grad_() for argument in (x, weight, bias)]
    again = torch.autograd.grad(loss(*arguments), arguments)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_gradient_numerically():
    arguments = [normal(*shape).double().requires_grad_() for shape in ((3, 5), (4, 5))]
    assert torch.autograd.gradcheck(linear, arguments)


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize(("width", "outputs"), WIDTHS)
def test_aligned(dtype, weight_dtype, width, outputs):
    weight, bias = weights(outputs, width, weight_dtype), normal(outputs, dtype=dtype, seed=3)
    assert_aligned(lambda x: linear(x, weight), normal(1003, width, dtype=dtype))
    assert_aligned(lambda x: linear(x, weight, bias), normal(1003, width, dtype=dtype))


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(F32, F32), (BF16, F32)])
@pytest.mark.parametrize(("width", "outputs"), [(577, 192), (576, 1536)])
def test_aligned_at_8192_rows(dtype, weight_dtype, width, outputs):
    weight, x = weights(outputs, width, weight_dtype), normal(8192, width, dtype=dtype)
    whole = linear(x, weight)
    for rows in (1, 2, 3, 5, 9, 16, 17, 40, 63, 257, 1000, 4096):
        for start in (0, 8192 - rows):
            assert torch.equal(linear(x[start : start + rows], weight), whole[start : start + rows]), (rows, start)


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize("outputs", [1, 2, 4, 8, 20, 64])
def test_few_outputs_are_aligned_over_many_rows(dtype, weight_dtype, outputs):
    # Differences here are rare, about one row in 10,000: many rows, in small calls.
    x, weight = normal(12_000, 64, dtype=dtype), weights(outputs, 64, weight_dtype)
    whole = linear(x, weight)
    for rows in (16, 33, 128, 4096):
        assert torch.equal(torch.cat([linear(part, weight) for part in x.split(rows)]), whole), rows


@pytest.mark.parametrize(("dtype", "weight_dtype"), TYPES)
@pytest.mark.parametrize("outputs", [3, 65])
def test_place_of_the_weight_in_memory_does_not_matter(dtype, weight_dtype, outputs):
    x, weight = normal(300, 100, dtype=dtype), weights(outputs, 100, weight_dtype)
    for name, moved in placements(weight):
        for rows in (1, 16, 300):
            assert torch.equal(linear(x[:rows], moved), linear(x[:rows], weight)), (name, rows)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_neighbours_that_are_not_finite_do_not_matter(dtype):
    x, weight = normal(20, 33, dtype=dtype), weights(7, 33, dtype)
    expected = linear(x, weight)
    x[3], x[4] = torch.nan, torch.inf
    assert torch.equal(linear(x, weight)[5:], expected[5:])


def test_splitting_a_weight_by_outputs_changes_nothing():
    x, weight = normal(40, 100), weights(200, 100, F32)
    assert torch.equal(torch.cat((linear(x, weight[:70]), linear(x, weight[70:])), 1), linear(x, weight))


def test_arguments_are_left_alone():
    x, weight, bias = normal(3, 5), normal(4, 5), normal(4)
    before = [argument.clone() for argument in (x, weight, bias)]
    linear(x, weight, bias)
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight, bias), strict=True))


def test_errors_name_argument_rule_and_value():
    x, weight = normal(3, 5), normal(4, 5)
    with pytest.raises(ValueError, match=r"x must be \[N, K\] and weight \[M, K\], got \[3, 5\] and \[4, 6\]"):
        linear(x, normal(4, 6))
    with pytest.raises(ValueError, match=r"x must be \[N, K\]"):
        linear(x[0], weight)
    with pytest.raises(ValueError, match=r"bias must be \[4\], got \[3\]"):
        linear(x, weight, normal(3))
    with pytest.raises(TypeError, match=r"weight must be torch.float32 or torch.float32, got torch.bfloat16"):
        linear(x, weight.bfloat16())
    with pytest.raises(TypeError, match=r"bias must be torch.float32 or torch.float32, got torch.bfloat16"):
        linear(x, weight, normal(4).bfloat16())
