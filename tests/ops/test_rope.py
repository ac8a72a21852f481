import math

import pytest
import torch
from alignment import assert_aligned, normal
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.ops import inverse_frequencies, rope, rope_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def frequencies(head_dim, scaling=None, theta=10000.0, max_position=8192):
    return inverse_frequencies(head_dim, theta=theta, scaling=scaling, max_position=max_position)


def test_quarter_turn_by_hand():  # pairs are (0, 2) and (1, 3); a quarter turn takes (a, b) to (-b, a)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    got = rope(x, torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    assert got.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_default_frequencies_by_hand():  # 10000^(-2i/4) = 1, 1/100; with linear scaling by 4 a quarter of it
    got, factor = frequencies(4)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.01]))
    assert factor == 1.0
    torch.testing.assert_close(frequencies(4, {"type": "linear", "factor": 4.0})[0], torch.tensor([0.25, 0.0025]))


def test_llama3_by_hand():
    # theta = 10000, D = 8: speeds 1, 1/10, 1/100, 1/1000, wavelengths 6.28, 62.8, 628, 6283.
    # original 1024, high 4, low 1: below 256 unchanged, above 1024 divided by 8, 628 between:
    # smooth = (1024/628.3185 - 1) / 3 = 0.2099155; 0.01 * (0.7900845/8 + 0.2099155) = 0.003086761
    got, factor = frequencies(8, LLAMA3 | {"original_max_position_embeddings": 1024})
    torch.testing.assert_close(got, torch.tensor([1.0, 0.1, 0.003086761, 0.001 / 8]))
    assert factor == 1.0


def test_yarn_by_hand():
    # theta = 10000, D = 8, original 64: a dimension that turns r times within 64 positions is
    # 8 ln(64 / (2 pi r)) / (2 ln 10000): r = 1 -> 1.008, up to 2; r = 32 -> -0.497, floor -1, clipped to 0.
    # The ramp over dimensions 0..3 from 0 to 2 is 0, 1/2, 1, 1; factor 4: speed * (ramp / 4 + 1 - ramp).
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    got, factor = frequencies(8, scaling)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.1 * 0.625, 0.0025, 0.00025]))
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    assert frequencies(8, scaling | {"attention_factor": 0.5})[1] == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "head_dim"), [(0, 16), (1, 2), (63, 16), (257, 64)])
def test_value_against_float64(dtype, rows, head_dim):
    x, positions = normal(rows, 3, head_dim, dtype=dtype), torch.arange(rows) * 31
    speeds, _ = frequencies(head_dim)
    got = rope(x, *rope_tables(positions, speeds))
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.polar(
        torch.ones(rows, 1, head_dim // 2).double(), (positions.float()[:, None] * speeds).double()[:, None]
    )
    torch.testing.assert_close(got, torch.cat((turned.real, turned.imag), -1).to(dtype))


def test_rounded_once():
    x, tables = normal(40, 2, 16, dtype=torch.bfloat16), rope_tables(torch.arange(40), frequencies(16)[0])
    assert torch.equal(rope(x, *tables), rope(x.float(), *tables).bfloat16())


def test_factor_multiplies_both_tables():
    speeds, positions = frequencies(8)[0], torch.arange(5)
    cos, sin = rope_tables(positions, speeds)
    assert all(torch.equal(a, b * 1.5) for a, b in zip(rope_tables(positions, speeds, 1.5), (cos, sin), strict=True))


@given(st.integers(0, 2000), st.integers(0, 2000), st.integers(0, 2000))
@settings(max_examples=40, deadline=None)
def test_products_depend_on_distance_alone(first, second, shift):
    q, k = normal(1, 1, 16), normal(1, 1, 16, seed=1)
    turn = lambda x, position: rope(x, *rope_tables(torch.tensor([position]), frequencies(16)[0]))
    near = (turn(q, first) * turn(k, second)).sum()
    # float32 angles up to 4,000 are rounded to 2.4e-4
    torch.testing.assert_close((turn(q, first + shift) * turn(k, second + shift)).sum(), near, rtol=0, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_turns_back(dtype):
    x, above = normal(9, 2, 16, dtype=dtype), normal(9, 2, 16, dtype=dtype, seed=1)
    cos, sin = rope_tables(torch.arange(9), frequencies(16)[0])
    grad = torch.func.grad(lambda x: (rope(x, cos, sin).float() * above.float()).sum())(x)
    torch.testing.assert_close(grad, rope(above, cos, -sin))
    wide = x.double().requires_grad_()
    first, second = wide.chunk(2, -1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    torch.testing.assert_close(grad, torch.autograd.grad(exact, wide, above.double())[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 10), (2, 128)])
def test_aligned(dtype, heads, head_dim):
    tables = [torch.cat((table, table), 1) for table in rope_tables(torch.arange(1003) * 37, frequencies(head_dim)[0])]
    rows = torch.cat((*(table[:, None] for table in tables), normal(1003, heads, head_dim)), 1)
    half = head_dim // 2
    assert_aligned(lambda rows: rope(rows[:, 2:].to(dtype), rows[:, 0, :half], rows[:, 1, :half]), rows)


@pytest.mark.parametrize("head_dim", [2, 10, 64, 256])
def test_tables_are_aligned(head_dim):
    speeds, factor = frequencies(head_dim, LLAMA3, theta=5e5, max_position=131072)
    tables = lambda positions: torch.stack(rope_tables(positions[:, 0], speeds, factor), 1)
    assert_aligned(tables, torch.arange(1003)[:, None] * 131 % (1 << 17))


def test_errors_name_field_rule_and_value():
    with pytest.raises(ValueError, match=r"head_dim must be even and >= 2, got 7"):
        frequencies(7)
    with pytest.raises(ValueError, match=r"theta must be > 1, got 1.0"):
        frequencies(8, theta=1.0)
    with pytest.raises(ValueError, match=r"rope_scaling.rope_type must be one of .*, got 'longrope'"):
        frequencies(8, {"rope_type": "longrope"})
    for missing in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        with pytest.raises(ValueError, match=rf"rope_scaling.{missing} must be a number > 0, got None"):
            frequencies(8, {name: value for name, value in LLAMA3.items() if name != missing})
    with pytest.raises(ValueError, match=r"rope_scaling.factor must be a number > 0, got -1"):
        frequencies(8, {"rope_type": "yarn", "factor": -1})
    with pytest.raises(ValueError, match=r"high_freq_factor must be > low_freq_factor 1.0, got 0.5"):
        frequencies(8, LLAMA3 | {"high_freq_factor": 0.5})
    with pytest.raises(ValueError, match=r"cos and sin must be \[3, 4\], got \[3, 4\] and \[2, 4\]"):
        rope(normal(3, 1, 8), torch.zeros(3, 4), torch.zeros(2, 4))
