import re

import pytest
import torch
from alignment import assert_aligned, normal

from rz.ops import add_rms_norm, head_rms_norm, rms_norm

TYPES = [torch.float32, torch.bfloat16]


def reference(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def test_value_by_hand():  # mean square (1 + 49) / 2 = 25, plus 11 is 36, root 6
    got = rms_norm(torch.tensor([[1.0, 7.0]]), torch.tensor([2.0, -1.0]), eps=11)
    torch.testing.assert_close(got, torch.tensor([[2 / 6, -7 / 6]]))


def test_quotient_is_rounded_before_the_weight_multiplies():
    # 7/6 = 149.33/128 rounds to 149/128 in bfloat16; times 5 is 5.8203, which rounds to 5.8125.
    # Rounded only at the end, 35/6 = 5.8333 would be 5.84375.
    got = rms_norm(torch.tensor([[1.0, 7.0]]).bfloat16(), torch.tensor([1.0, 5.0]).bfloat16(), eps=11)
    assert got[0, 1].item() == 5.8125


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (1, 1), (3, 63), (257, 64), (5, 4, 32)])
def test_value_against_float64(dtype, shape):
    x, weight = 3 * normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    got = rms_norm(x, weight, eps=1e-5)
    assert got.shape == shape and got.dtype == dtype
    torch.testing.assert_close(got, reference(x.double(), weight.double(), 1e-5).to(dtype))


def test_row_of_zeros_gives_zeros():
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), eps=1e-6).any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(6, 33), (4, 3, 16), (4, 0, 16)])
def test_gradients_against_float64(dtype, shape):
    x, weight, above = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1), normal(*shape, seed=2)
    loss = lambda x, weight: (rms_norm(x, weight, eps=1e-5).float() * above).sum()
    exact = lambda x, weight: (reference(x, weight, 1e-5) * above.to(dtype).double()).sum()
    grads = torch.func.grad(loss, argnums=(0, 1))(x, weight)
    wanted = torch.func.grad(exact, argnums=(0, 1))(x.double(), weight.double())
    for grad, want in zip(grads, wanted, strict=True):
        assert grad.dtype == dtype
        # bfloat16: a step of 2^-8 of values up to 4
        torch.testing.assert_close(grad, want.to(dtype), rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(33,), (9, 33), (40, 1 << 14)])  # the last in chunks of 16 rows
def test_residual_form_is_a_rounded_sum_then_the_norm(dtype, shape):
    x, residual = normal(*shape, dtype=dtype), 50 * normal(*shape, dtype=dtype, seed=1)
    weight = normal(shape[-1], dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, eps=1e-5)
    assert torch.equal(total, residual + x) and total.dtype == dtype
    assert torch.equal(normed, rms_norm(total, weight, eps=1e-5))


def test_the_sum_may_be_changed_in_place_where_the_norm_is_not_used():
    x, residual, weight = (
        normal(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(((4, 8), (4, 8), (8,)))
    )
    normed, total = add_rms_norm(x, residual, weight, eps=1e-5)
    total.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        normed.sum().backward(retain_graph=True)
    assert torch.equal(torch.autograd.grad(total.sum(), x)[0], torch.full((4, 8), 3.0))


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])  # of normed and total
@pytest.mark.parametrize("shape", [(8,), (4, 8), (40, 1 << 14)])  # the last in chunks of 16 rows
def test_residual_form_passes_gradients_of_the_results_that_are_used(used, shape):
    x, residual, weight = normal(*shape), normal(*shape, seed=1), normal(shape[-1], seed=2)
    above = normal(2, *shape, seed=5)
    weighed = lambda results: sum((results[i] * above[i]).sum() for i in used)
    loss = lambda *args: weighed(add_rms_norm(*args, eps=1e-5))
    exact = lambda x, residual, weight: weighed((reference(x + residual, weight, 1e-5), x + residual))
    grads = torch.func.grad(loss, argnums=(0, 1, 2))(x, residual, weight)
    wanted = torch.func.grad(exact, argnums=(0, 1, 2))(x.double(), residual.double(), weight.double())
    leaves = [value.clone().requires_grad_() for value in (x, residual, weight)]
    plain = torch.autograd.grad(loss(*leaves), leaves, materialize_grads=True)
    for grad, want, same in zip(grads, wanted, plain, strict=True):
        torch.testing.assert_close(grad, want.float(), rtol=1e-5, atol=2e-5)
        assert torch.equal(grad, same)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [1, 7, 63, 64, 576])
def test_aligned(dtype, width):
    weight = normal(width, dtype=dtype, seed=1)
    assert_aligned(lambda x: rms_norm(x, weight, eps=1e-6), 3 * normal(1003, width, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "width"), [(1, 16), (3, 33), (2, 64)])
def test_aligned_over_heads(dtype, heads, width):
    weight = normal(width, dtype=dtype, seed=1)
    x = 3 * normal(1003, heads, width, dtype=dtype)
    assert_aligned(lambda x: rms_norm(x, weight, eps=1e-6), x)
    flat = rms_norm(x.view(-1, width), weight, eps=1e-6)
    assert torch.equal(rms_norm(x, weight, eps=1e-6), flat.view(x.shape))


@pytest.mark.parametrize("dtype", TYPES)
def test_residual_form_is_aligned(dtype):
    weight, residual = normal(48, dtype=dtype, seed=1), normal(1003, 48, dtype=dtype, seed=2)
    both = lambda x: torch.cat(add_rms_norm(x[:, :48], x[:, 48:], weight, eps=1e-6), 1)
    assert_aligned(both, torch.cat((3 * normal(1003, 48, dtype=dtype), residual), 1))


def test_errors_name_argument_rule_and_value():
    x = normal(3, 8)
    with pytest.raises(ValueError, match=r"weight must be \[8\], got \[7\]"):
        rms_norm(x, normal(7), eps=1e-6)
    with pytest.raises(TypeError, match=r"weight must be torch.float32, got torch.bfloat16"):
        rms_norm(x, normal(8).bfloat16(), eps=1e-6)
    with pytest.raises(ValueError, match=r"residual must have the shape of x \[3, 8\], got \[2, 8\]"):
        add_rms_norm(x, normal(2, 8), normal(8), eps=1e-6)
    with pytest.raises(TypeError, match=r"residual must be torch.float32, got torch.bfloat16"):
        add_rms_norm(x, x.bfloat16(), normal(8), eps=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [16, 33, 128])
def test_heads_that_lie_apart_have_the_bits_of_heads_side_by_side(dtype, width):
    x, weight = normal(1003, 5, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    for part in (x[:, :3], x[:, 3:], x[::2]):
        assert torch.equal(rms_norm(part, weight, eps=1e-5), rms_norm(part.contiguous(), weight, eps=1e-5))
        alone = torch.cat([rms_norm(row[None], weight, eps=1e-5) for row in part[:9]])
        assert torch.equal(rms_norm(part, weight, eps=1e-5)[:9], alone)


RUNS = (4, 2)  # heads of queries and of keys


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 1003])
def test_runs_of_heads_have_the_bits_of_each_alone(dtype, rows):
    x, weights = normal(rows, 6, 32, dtype=dtype), [normal(32, dtype=dtype, seed=seed) for seed in (1, 2)]
    alone = [rms_norm(part, weight, eps=1e-5) for part, weight in zip(x.split(RUNS, 1), weights, strict=True)]
    assert torch.equal(head_rms_norm(x, weights, RUNS, eps=1e-5), torch.cat(alone, 1))


@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_of_runs_of_heads_against_float64(dtype):
    x, above = normal(9, 6, 16, dtype=dtype), normal(9, 6, 16, seed=3)
    first, second = (normal(16, dtype=dtype, seed=seed) for seed in (1, 2))
    loss = lambda x, *weights: (head_rms_norm(x, weights, RUNS, eps=1e-5).float() * above).sum()
    every = lambda first, second: torch.cat((first.expand(4, -1), second.expand(2, -1)))
    exact = lambda x, *weights: (reference(x, every(*weights), 1e-5) * above.to(dtype).double()).sum()
    grads = torch.func.grad(loss, argnums=(0, 1, 2))(x, first, second)
    wanted = torch.func.grad(exact, argnums=(0, 1, 2))(x.double(), first.double(), second.double())
    leaves = [value.clone().requires_grad_() for value in (x, first, second)]
    assert all(map(torch.equal, torch.autograd.grad(loss(*leaves), leaves), grads))
    for grad, want in zip(grads, wanted, strict=True):
        assert grad.dtype == dtype and grad.shape == want.shape
        # bfloat16: a step of 2^-8 of values up to 8
        torch.testing.assert_close(grad, want.to(dtype), rtol=2e-2, atol=4e-2 if dtype == torch.bfloat16 else 1e-5)


def test_a_weights_gradient_is_rounded_once_over_all_its_heads():
    x, above = normal(200, 16, 64, dtype=torch.bfloat16), normal(200, 16, 64, dtype=torch.bfloat16, seed=3)
    weight = normal(64, dtype=torch.bfloat16, seed=1)
    loss = lambda weight: (head_rms_norm(x, (weight,), (16,), eps=1e-5) * above).sum()
    alone = lambda weight: (rms_norm(x, weight, eps=1e-5) * above).sum()
    grad, want = torch.func.grad(loss)(weight), torch.func.grad(alone)(weight)
    assert (grad != want).sum() <= 1  # float32 sums of another order may fall on two sides of a half


def test_runs_that_do_not_fit_are_named():
    x, weight = normal(3, 6, 8), normal(8)
    for counts, weights in (((4, 3), (weight, weight)), ((6,), (weight, weight)), ((4, 2), (weight,))):
        rule = rf"counts must be one a weight \({len(weights)}\) and sum to the heads of x \[3, 6, 8\], got "
        with pytest.raises(ValueError, match=rule + re.escape(str(list(counts)))):
            head_rms_norm(x, weights, counts, eps=1e-6)
    with pytest.raises(ValueError, match=r"weight must be \[8\], got \[7\]"):
        head_rms_norm(x, (weight, normal(7)), (4, 2), eps=1e-6)
    with pytest.raises(TypeError, match=r"weight must be torch.float32, got torch.bfloat16"):
        head_rms_norm(x, (weight, weight.bfloat16()), (4, 2), eps=1e-6)
