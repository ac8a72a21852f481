import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.steps import AdamWState, adamw, adamw_init, clip_by_global_norm, global_norm


def tensors(seed, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng, dtype=dtype) for name, shape in {"a": (7, 33), "b": (5,)}.items()}


def clones(params):
    return {name: tensor.clone() for name, tensor in params.items()}


def equal(left, right):
    """Bit for bit, -0.0 apart from 0.0."""
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(bits[left[name].dtype]), right[name].view(bits[right[name].dtype])) for name in left
    )


def test_two_updates_by_hand():
    # betas 0.5, 0.75, rate 1, epsilon 1, decay 0.1, x = 2, g = 4 then 0.
    # 1: m = 2, v = 4; m/(1-.5) = 4, sqrt(v/(1-.75)) = 4; x = 2*0.9 - 4/5 = 1
    # 2: m = 1, v = 3; m/(1-.25) = 4/3, sqrt(3/(1-.5625)) = sqrt(48/7); x = 0.9 - (4/3)/(sqrt(48/7) + 1)
    params, state = {"x": torch.tensor([2.0], dtype=torch.float64)}, None
    state = adamw_init(params)
    for grad, expected in ((4.0, 1.0), (0.0, 0.9 - (4 / 3) / (math.sqrt(48 / 7) + 1))):
        params, state = adamw(
            params, {"x": torch.tensor([grad], dtype=torch.float64)}, state,
            learning_rate=1.0, betas=(0.5, 0.75), epsilon=1.0, weight_decay=0.1,
        )  # fmt: skip
        torch.testing.assert_close(params["x"], torch.tensor([expected], dtype=torch.float64))
    assert state.step == 2 and state.first["x"] == 1 and state.second["x"] == 3


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_of_torch_over_ten_updates(weight_decay, dtype):
    params = tensors(0, dtype)
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in params.values()]
    settings = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-7, "weight_decay": weight_decay}
    optimizer, state = torch.optim.AdamW(theirs, **settings), adamw_init(params)
    for step in range(10):
        grads = tensors(step + 1, dtype)
        for parameter, grad in zip(theirs, grads.values(), strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        params, state = adamw(
            params, grads, state, learning_rate=3e-3, betas=(0.9, 0.95), epsilon=1e-7, weight_decay=weight_decay
        )
        assert equal(params, dict(zip(params, [parameter.detach() for parameter in theirs], strict=True)))


def test_arguments_stay_as_they_are():
    params, grads = tensors(0), tensors(1)
    state = adamw(params, grads, adamw_init(params), learning_rate=0.1)[1]
    before = clones(params), clones(grads), clones(state.first), clones(state.second)
    after, moved = adamw(params, grads, state, learning_rate=0.1, weight_decay=0.1)
    for old, now in zip(before, (params, grads, state.first, state.second), strict=True):
        assert equal(old, now)
    assert state.step == 1 and moved.step == 2
    for old, new in ((params, after), (state.first, moved.first), (state.second, moved.second)):
        assert not any(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("donate_params", [False, True])
def test_donated_memory_is_used_again_and_the_bits_are_the_same(weight_decay, donate_params):
    params, grads = tensors(0), tensors(1)
    state = adamw(params, grads, adamw_init(params), learning_rate=0.1)[1]
    settings = {"learning_rate": 0.1, "weight_decay": weight_decay}
    expected, moved = adamw(params, grads, state, **settings)
    before, places = clones(params), [id(x) for x in (*state.first.values(), *state.second.values())]
    after, donated = adamw(params, grads, state, **settings, donate=True, donate_params=donate_params)
    assert equal(after, expected) and equal(donated.first, moved.first) and equal(donated.second, moved.second)
    assert [id(x) for x in (*donated.first.values(), *donated.second.values())] == places
    assert all((after[name] is params[name]) == donate_params for name in params)
    assert donate_params or equal(params, before)


def test_nothing_donated_is_touched_where_an_argument_is_bad():
    params, state = tensors(0), adamw_init(tensors(0))
    before = clones(params)
    with pytest.raises(ValueError, match="grads must have the names of params"):
        adamw(params, {}, state, learning_rate=0.1, donate=True, donate_params=True)
    assert equal(params, before) and not any(x.any() for x in state.first.values())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_learning_rate_zero_leaves_every_bit(weight_decay):
    start = {"x": torch.tensor([1.0, -0.0, 0.0, 1e-45, -3e38])}
    params, state = start, adamw_init(start)
    for step in range(5):
        grads = {"x": torch.randn(5, generator=torch.Generator().manual_seed(step))}
        params, state = adamw(params, grads, state, learning_rate=0.0, weight_decay=weight_decay)
    assert equal(params, start) and state.step == 5 and state.first["x"].all()


def test_composes_under_torch_func():
    # the first update moves x by -rate * g / (|g| + epsilon); its derivative by x is 1, by g -rate*epsilon/(|g|+eps)^2
    x, g = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([0.5, 3.0], dtype=torch.float64)
    after = lambda x, g: adamw({"x": x}, {"x": g}, adamw_init({"x": x}), learning_rate=0.1, epsilon=0.5)[0]["x"].sum()
    by_x, by_g = torch.func.grad(after, argnums=(0, 1))(x, g)
    torch.testing.assert_close(by_x, torch.ones_like(x))
    torch.testing.assert_close(by_g, -0.1 * 0.5 / (g + 0.5) ** 2)
    norm = lambda g: clip_by_global_norm({"g": g}, max_norm=1.0)[1]
    torch.testing.assert_close(torch.func.grad(norm)(g), g / g.norm())


def test_global_norm_by_hand_and_wide():
    got = global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])})
    assert got.dtype == torch.float64 and got == 5
    assert global_norm({"a": torch.full((3,), 1e30), "b": torch.zeros(0)}) == pytest.approx(math.sqrt(3) * 1e30)
    assert global_norm({}) == 0
    # 1 + 2^20 * 2^-30 = 1 + 2^-10: in float32 each of the small squares is lost beside the 1
    many = torch.cat([torch.ones(1), torch.full((2**20,), 2.0**-15)])
    assert float(global_norm({"a": many})) == pytest.approx(math.sqrt(1 + 2**-10), rel=1e-14)
    assert global_norm({"a": torch.tensor([torch.nan])}).isnan()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_clipping_bounds_the_norm_and_keeps_the_direction(seed, scale):
    grads = {name: tensor * scale for name, tensor in tensors(seed).items()}
    before = clones(grads)
    clipped, norm = clip_by_global_norm(grads, max_norm=2.0)
    assert equal(grads, before) and norm == global_norm(grads)
    if norm <= 2:
        assert equal(clipped, grads)
    else:
        assert float(global_norm(clipped)) == pytest.approx(2.0, rel=1e-6)  # float32 rounds each entry
        for name in grads:
            torch.testing.assert_close(clipped[name], grads[name] * (2 / float(norm)))


def test_clipping_zero_gradients_gives_zero():
    clipped, norm = clip_by_global_norm({"a": torch.zeros(3)}, max_norm=1.0)
    assert norm == 0 and torch.equal(clipped["a"], torch.zeros(3))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"learning_rate": -1.0}, "learning_rate must be >= 0 and finite, got -1.0"),
        ({"learning_rate": math.nan}, "learning_rate must be >= 0 and finite, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be >= 0 and finite, got -0.1"),
        ({"betas": (0.9, 1.0)}, r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
        ({"epsilon": 0.0}, "epsilon must be > 0, got 0.0"),
    ],
)
def test_numbers_out_of_range_are_refused(change, message):
    params = tensors(0)
    with pytest.raises(ValueError, match=message):
        adamw(params, tensors(1), adamw_init(params), **({"learning_rate": 0.1} | change))


def test_tensors_that_disagree_are_refused():
    params = tensors(0)
    state = adamw_init(params)
    with pytest.raises(ValueError, match="grads must have the names of params, got a difference at b"):
        adamw(params, {"a": params["a"]}, state, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"grads b must be \[5\], got \[1\]"):
        adamw(params, params | {"b": torch.zeros(1)}, state, learning_rate=0.1)
    with pytest.raises(TypeError, match="grads b must be torch.float32, got torch.float64"):
        adamw(params, params | {"b": torch.zeros(5).double()}, state, learning_rate=0.1)
    with pytest.raises(ValueError, match="state.second must have the names of params, got a difference at a"):
        adamw(params, params, AdamWState(step=0, first=state.first, second={}), learning_rate=0.1)
    with pytest.raises(ValueError, match="max_norm must be > 0, got 0"):
        clip_by_global_norm(params, max_norm=0)
