import pytest
import torch
from examples import assert_near, gradients, normal

from rz.ops import combine_experts, expert_order, grouped_linear

pytestmark = pytest.mark.usefixtures("on_kernels")


def layer(x, first, second, gates, experts):
    order = expert_order(experts, count=len(first))
    hidden = grouped_linear(x, first, order, by_token=True)
    return combine_experts(grouped_linear(hidden, second, order, by_token=False), gates, order)


def exact(x, first, second, gates, experts):
    chosen = torch.einsum("nkmi,ni->nkm", first[experts], x)
    return torch.einsum("nkom,nkm,nk->no", second[experts], chosen, gates)


def inputs(tokens, dtype):
    scaled = lambda *shape, seed: (normal(*shape, seed=seed) * shape[-1] ** -0.5).to(dtype)
    gates = normal(tokens, 2, seed=4).softmax(-1)
    experts = normal(tokens, 3, seed=5).argsort(-1)[:, :2] * 2  # of 5: the odd ones get no row
    return (normal(tokens, 33, dtype=dtype), scaled(5, 17, 33, seed=2), scaled(5, 33, 17, seed=3), gates), experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 40])
def test_values_and_gradients(tokens, dtype):
    values, experts = inputs(tokens, dtype)
    wide = [value.double() for value in values]
    assert_near(layer(*values, experts), exact(*wide, experts), dtype, 4)
    got = gradients(lambda *x: layer(*x, experts), *values)
    for value, expected in zip(got, gradients(lambda *x: exact(*x, experts), *wide), strict=True):
        assert_near(value, expected, dtype, 16)
    assert not got[1][1].any()


def test_a_token_has_the_same_bits_in_any_company():
    (x, first, second, gates), experts = inputs(40, torch.bfloat16)
    whole = layer(x, first, second, gates, experts)
    for rows in (slice(0, 1), slice(39, 40), slice(3, 20)):
        assert torch.equal(layer(x[rows], first, second, gates[rows], experts[rows]), whole[rows])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x[order], first, second, gates[order], experts[order]), whole[order])


def test_slots_are_added_in_order():
    """In float32, (2**24 + 1) + 1 is 2**24 and (1 + 1) + 2**24 is 2**24 + 2."""
    order = expert_order(torch.tensor([[0, 1, 2], [0, 1, 2]]), count=3)
    y = torch.tensor([2.0**24, 1, 1, 1, 1, 2.0**24])[:, None]  # rows: expert 0 of both tokens, 1 of both, 2 of both
    assert combine_experts(y, torch.ones(2, 3), order)[:, 0].tolist() == [2**24, 2**24 + 2]


def test_rows_of_another_order_are_refused():
    order = expert_order(torch.tensor([[0, 2], [2, 1]]), count=3)
    with pytest.raises(ValueError, match=r"y must have 4 rows, got \[1, 8\]"):
        combine_experts(normal(1, 8), normal(2, 2), order)
