import pytest
import torch
from alignment import normal

from rz.ops import combine_experts, expert_order, grouped_linear

EXPERTS = torch.tensor([[2, 0], [0, 3], [2, 3]])


def layer(x, first, second, gates, experts):
    """By its definition, token by token."""
    out = []
    for token, chosen in enumerate(experts.tolist()):
        hidden = [torch.tanh(first[e] @ x[token]) for e in chosen]
        out.append(sum(g * (second[e] @ h) for g, e, h in zip(gates[token], chosen, hidden, strict=True)))
    return torch.stack(out)


def by_ops(x, first, second, gates, experts):
    order = expert_order(experts, count=len(first))
    hidden = torch.tanh(grouped_linear(x, first, order, by_token=True))
    return combine_experts(grouped_linear(hidden, second, order, by_token=False), gates, order)


def inputs():
    return normal(3, 8), normal(4, 16, 8, seed=1), normal(4, 8, 16, seed=2), normal(3, 2, seed=3).exp()


def test_order_by_hand():
    """Expert 0 has token 0 (slot 1) and token 1 (slot 0), 2 has tokens 0 and 2 (slots 0), 3 has tokens 1 and 2."""
    order = expert_order(EXPERTS, count=4)
    assert order.tokens.tolist() == [0, 1, 0, 2, 1, 2]
    assert order.ends.tolist() == [2, 2, 4, 6]
    assert order.places.tolist() == [[2, 0], [1, 4], [3, 5]]


def test_values_and_gradients():
    values = inputs()
    torch.testing.assert_close(by_ops(*values, EXPERTS), layer(*values, EXPERTS))
    grad = lambda op: torch.func.grad(lambda *x: op(*x, EXPERTS).square().sum(), argnums=(0, 1, 2, 3))(*values)
    torch.testing.assert_close(grad(by_ops), grad(layer), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_alone(dtype):
    x, first, second, gates = inputs()
    x, first, second = (value.to(dtype) for value in (x, first, second))
    whole = by_ops(x, first, second, gates, EXPERTS)
    for i in range(3):
        assert torch.equal(by_ops(x[i : i + 1], first, second, gates[i : i + 1], EXPERTS[i : i + 1]), whole[i : i + 1])


def test_what_is_refused():
    x, first, _, gates = inputs()
    order = expert_order(EXPERTS, count=4)
    with pytest.raises(ValueError, match=r"weight, x must be \[4, 'M', 'K'\], \[6, 'K'\], got \[4, 16, 8\], \[3, 8\]"):
        grouped_linear(x, first, order, by_token=False)
    with pytest.raises(TypeError, match="weight must be torch.float32, got torch.bfloat16"):
        grouped_linear(x, first.bfloat16(), order, by_token=True)
    with pytest.raises(ValueError, match=r"gates must be \[3, 2\], got \[2, 2\]"):
        combine_experts(x, gates[:2], order)
