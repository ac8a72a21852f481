import pytest
import torch
from examples import DTYPES, ODD, assert_near, assert_rows_alone, gradients, normal

from rz.ops import add_rms_norm, device, head_rms_norm, linear, rms_norm, rope, rope_tables, swiglu

pytestmark = pytest.mark.usefixtures("on_kernels")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, inner, outputs", [(1, 16, 16), (17, 33, 63), (63, 64, 15), (257, 17, 1), (3, 257, 65)])
def test_linear(rows, inner, outputs, dtype):
    x, weight, bias = normal(rows, inner, dtype=dtype), normal(outputs, inner, dtype=dtype), normal(outputs).to(dtype)
    exact = lambda x, weight, bias: x @ weight.t() + bias
    assert_near(linear(x, weight, bias), exact(x.double(), weight.double(), bias.double()), dtype, inner**0.5)
    assert_near(linear(x, weight), x.double() @ weight.double().t(), dtype, inner**0.5)
    got = gradients(linear, x, weight, bias)
    for value, expected in zip(got, gradients(exact, x.double(), weight.double(), bias.double()), strict=True):
        assert_near(value, expected, dtype, max(rows, outputs) ** 0.5 * 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_rows(dtype):
    weight, bias = normal(40, 33, dtype=dtype), normal(40, dtype=dtype)
    assert_rows_alone(lambda x: linear(x, weight, bias), normal(40, 33, dtype=dtype, seed=1))


def test_linear_of_no_rows():
    assert linear(torch.zeros(0, 8), torch.ones(4, 8)).shape == (0, 4)
    to_x, to_weight = gradients(linear, torch.zeros(0, 8), torch.ones(4, 8))
    assert to_x.shape == (0, 8) and torch.equal(to_weight, torch.zeros(4, 8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match=f"kernels take float32, bfloat16 and float16, got {dtype}"):
        linear(normal(3, 8).to(dtype), normal(4, 8).to(dtype))


def test_linear_by_float32_weights_is_rounded_once():
    x, weight = normal(5, 32, dtype=torch.bfloat16), normal(9, 32)
    got = linear(x, weight)
    assert got.dtype == torch.bfloat16 and torch.equal(got, linear(x.float(), weight).to(torch.bfloat16))


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of the interpreter
def test_linear_of_inf_and_nan():
    x = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [1.0, 2.0]], dtype=torch.bfloat16)
    got = linear(x, torch.ones(1, 2, dtype=torch.bfloat16))[:, 0]
    assert got[0] == torch.inf and got[1].isnan() and got[2] == 3


def _norm(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 257])
def test_rms_norm(width, dtype):
    x, weight = normal(5, width, dtype=dtype), normal(width, dtype=dtype, seed=1)
    op = lambda x, weight: rms_norm(x, weight, eps=1e-6)
    assert_near(op(x, weight), _norm(x.double(), weight.double()), dtype, 4)
    for got, exact in zip(gradients(op, x, weight), gradients(_norm, x.double(), weight.double()), strict=True):
        assert_near(got, exact, dtype, 16)


@pytest.mark.parametrize("width", [15, 64])
def test_rms_norm_rows(width):
    weight = normal(width, dtype=torch.bfloat16)
    op = lambda x: rms_norm(x, weight, eps=1e-6)
    assert_rows_alone(op, normal(20, width, dtype=torch.bfloat16))
    heads = normal(4, 3, width, dtype=torch.bfloat16)
    assert torch.equal(op(heads), op(heads.flatten(0, 1)).view_as(heads))
    runs = head_rms_norm(heads, (weight, 2 * weight), (2, 1), eps=1e-6)
    assert torch.equal(runs, torch.cat((op(heads[:, :2]), 2 * op(heads[:, 2:])), 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype):
    x, residual = normal(5, 48, dtype=dtype), normal(5, 48, dtype=dtype, seed=1)
    weight = normal(48, dtype=dtype, seed=2)
    normed, total = add_rms_norm(x, residual, weight, eps=1e-6)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, rms_norm(total, weight, eps=1e-6))
    op = lambda *values: torch.cat(add_rms_norm(*values, eps=1e-6), 1)
    exact = lambda x, residual, weight: torch.cat((_norm(x + residual, weight), x + residual), 1)
    wide = [value.double() for value in (x, residual, weight)]
    for got, expected in zip(gradients(op, x, residual, weight), gradients(exact, *wide), strict=True):
        assert_near(got, expected, dtype, 16)


def test_add_rms_norm_rows():
    weight = normal(48)
    op = lambda both: torch.cat(add_rms_norm(both[:, :48], both[:, 48:], weight, eps=1e-6), 1)
    assert_rows_alone(op, normal(20, 96))


def test_add_rms_norm_of_more_axes():
    normed, total = add_rms_norm(normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(8), eps=1e-6)
    assert normed.shape == total.shape == (2, 3, 8)


def test_rms_norm_rounds_where_the_torch_reference_does(monkeypatch):
    x, weight = normal(50, 256, dtype=torch.bfloat16), normal(256, dtype=torch.bfloat16, seed=1)
    kernel = rms_norm(x, weight, eps=1e-6)
    monkeypatch.setattr(device, "has_kernels", lambda x: False)
    assert (kernel != rms_norm(x, weight, eps=1e-6)).float().mean() < 1e-3  # another order of the mean, seldom seen
    assert (kernel != _norm(x.float(), weight.float()).to(torch.bfloat16)).float().mean() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads, width", [(1, 32), (3, 80)])
def test_rope(heads, width, dtype):
    x, positions = normal(5, heads, width, dtype=dtype), torch.arange(5) * 31
    cos, sin = rope_tables(positions, 10000.0 ** (-torch.arange(width // 2) / (width // 2)))

    def exact(x):
        first, second = x.chunk(2, -1)
        c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        return torch.cat((first * c - second * s, second * c + first * s), -1)

    op = lambda x: rope(x, cos, sin)
    assert_near(op(x), exact(x.double()), dtype, 4)
    assert_near(gradients(op, x)[0], gradients(exact, x.double())[0], dtype, 4)
    assert torch.equal(rope(x[2:4], cos[2:4], sin[2:4]), op(x)[2:4])


@pytest.mark.parametrize("shape", [(2, 2, 7), (2, 8)])
def test_rope_of_other_shapes_is_refused(shape):
    with pytest.raises(ValueError, match=r"x must be \[N, H, D\] with an even D, got \["):
        rope(normal(*shape), normal(2, shape[-1] // 2), normal(2, shape[-1] // 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*ODD, 1030])
def test_swiglu(width, dtype):
    x = normal(5, 2 * width, dtype=dtype)

    def exact(x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    assert_near(swiglu(x), exact(x.double()), dtype, 4)
    assert_near(gradients(swiglu, x)[0], gradients(exact, x.double())[0], dtype, 4)
    assert torch.equal(swiglu(x[1:3]), swiglu(x)[1:3])


def test_swiglu_of_more_axes():
    x = normal(2, 3, 8)
    assert torch.equal(swiglu(x), swiglu(x.flatten(0, 1)).view(2, 3, 4))
    assert torch.equal(gradients(swiglu, x)[0].isnan(), torch.zeros(2, 3, 8, dtype=torch.bool))


@pytest.mark.filterwarnings("ignore:overflow")
def test_swiglu_of_a_gate_that_overflows():
    assert torch.equal(swiglu(torch.tensor([[-200.0, 3.0]])), torch.tensor([[-0.0]]))
