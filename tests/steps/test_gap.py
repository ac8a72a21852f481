import math

import attrs
import pytest
import torch
from batches import batch_of, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.steps import gap_metrics, lag_kernel_split

LN3 = math.log(3)
SUFFIXES = ["_lag_0", "_lag_1", "_lag_2_3", "_lag_4_7", "_lag_8_15", "_lag_16_32", "_lag_33_64", "_lag_65_up"]


def test_values_by_hand():
    # d = 0, ln 3 and a masked token: k1 = -ln3/2, k2 = ln3^2/4, k3 = (0 + (3 - 1 - ln3))/2, ess = (1+3)^2/(1+9)/2
    batch = batch_of([[-2.0, -2.0, torch.nan]], [[True, True, False]], versions=[[4, 1, 99]])
    got = gap_metrics(torch.tensor([[-2.0, LN3 - 2, torch.inf]], dtype=torch.float64), batch, policy_version=4)
    whole = {name: value for name, value in got.items() if "_lag_" not in name}
    assert whole == pytest.approx({
        "k1": -LN3 / 2, "k2": LN3**2 / 4, "k3": (2 - LN3) / 2, "gap_max": LN3, "ratio_max": 3.0, "ess": 0.8,
        "tokens": 2.0, "lag_mean": 1.5, "lag_max": 3.0,
    })  # fmt: skip
    assert got["k1_lag_2_3"] == pytest.approx(-LN3) and got["k3_lag_2_3"] == pytest.approx(2 - LN3)
    assert (got["k2_lag_0"], got["ess_lag_0"], got["tokens_lag_0"], got["ratio_max_lag_0"]) == (0.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "lag, suffix",
    [(0, "_lag_0"), (1, "_lag_1"), (2, "_lag_2_3"), (3, "_lag_2_3"), (4, "_lag_4_7"), (7, "_lag_4_7")]
    + [(8, "_lag_8_15"), (15, "_lag_8_15"), (16, "_lag_16_32"), (32, "_lag_16_32"), (33, "_lag_33_64")]
    + [(64, "_lag_33_64"), (65, "_lag_65_up"), (1000, "_lag_65_up")],
)
def test_every_lag_has_one_bucket(lag, suffix):
    batch = batch_of([[-1.0]], versions=[[1000 - lag]])
    got = gap_metrics(torch.tensor([[-0.5]]), batch, policy_version=1000)
    assert {name: got[f"tokens{name}"] for name in SUFFIXES} == {name: float(name == suffix) for name in SUFFIXES}
    assert got[f"gap_max{suffix}"] == 0.5 and got["lag_max"] == lag


def test_lag_is_per_token_within_a_response():
    batch = batch_of([[-1.0, -1.0, -1.0]], versions=[[3, 4, 5]])
    got = gap_metrics(torch.tensor([[-1.0, -1.5, -3.0]]), batch, policy_version=5)
    assert (got["gap_max_lag_2_3"], got["gap_max_lag_1"], got["gap_max_lag_0"]) == (0.0, 0.5, 2.0)
    assert (got["lag_mean"], got["lag_max"]) == (1.0, 2.0)


def test_equal_logprobs_give_exactly_zero_and_ess_one():
    behaviour = -torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) * 20
    got = gap_metrics(behaviour.clone(), batch_of(behaviour), policy_version=0)
    for name, value in {"k1": 0.0, "k2": 0.0, "k3": 0.0, "gap_max": 0.0, "ratio_max": 1.0, "ess": 1.0}.items():
        assert got[name] == value and math.copysign(1, got[name]) == 1  # no -0.0 in a log


def test_one_ulp_shows():  # below 1/64 a float32 ulp is 2^-30
    behaviour = torch.full((1, 1000), -1 / 64)
    current = behaviour.clone()
    current[0, 7] = torch.nextafter(current[0, 7], torch.tensor(0.0))
    got = gap_metrics(current, batch_of(behaviour), policy_version=0)
    assert got["gap_max"] == 2**-30 and got["k1"] == pytest.approx(-(2**-30) / 1000, rel=1e-9, abs=0)
    assert got["k3"] == pytest.approx(2**-61 / 1000, rel=1e-6, abs=0)  # d^2/2; exp(d) - 1 - d would give 0


@settings(max_examples=50, deadline=None)
@given(case=cases())
def test_bounds_and_empty_conventions(case):
    logprobs, batch, _, _ = case
    got = gap_metrics(logprobs.masked_fill(~batch.mask, torch.nan), batch, policy_version=2)
    assert len(got) == 10 + 7 * len(SUFFIXES) and all(type(value) is float for value in got.values())
    assert 0 < got["ess"] <= 1 and got["k3"] >= 0 and got["k2"] >= 0
    assert got["tokens"] == got["tokens_lag_2_3"] == float(batch.mask.sum())
    for suffix in ["_lag_0", "_lag_65_up"]:
        empty = {name: got[name + suffix] for name in ("k1", "k2", "k3", "gap_max", "ratio_max", "tokens")}
        assert set(empty.values()) == {0.0} and got["ess" + suffix] == 1.0


def test_a_token_at_lag_0_whose_bits_differ_is_counted():
    # versions are 0: at policy_version 0 the lag is 0 and p must be q; the second token is one ulp away, and at
    # policy_version 1 there is no lag 0.
    reported = torch.tensor([[-1.0, -2.0]])
    moved = torch.nextafter(reported, torch.tensor(0.0)).where(torch.tensor([[False, True]]), reported)
    batch = batch_of(reported.tolist())
    assert gap_metrics(reported, batch, policy_version=0)["differing_lag_0"] == 0.0
    assert gap_metrics(moved, batch, policy_version=0)["differing_lag_0"] == 1.0
    assert gap_metrics(moved, batch, policy_version=1)["differing_lag_0"] == 0.0


def test_no_token_at_all():
    batch = batch_of([[torch.nan]], [[False]])
    got = gap_metrics(torch.tensor([[torch.nan]]), batch, policy_version=0)
    assert {value for name, value in got.items() if not name.startswith("ess")} == {0.0} and got["ess"] == 1.0


def test_a_large_log_ratio_does_not_overflow_ess():
    got = gap_metrics(torch.tensor([[-1.0, -1.0]]), batch_of([[-801.0, -801.0]]), policy_version=0)
    assert got["ess"] == 1.0 and got["ratio_max"] == math.inf and got["gap_max"] == 800.0


def test_a_live_nan_shows():
    got = gap_metrics(torch.tensor([[torch.nan, -1.0]]), batch_of([[-1.0, -1.0]]), policy_version=0)
    assert all(math.isnan(got[name]) for name in ("k1", "k2", "k3", "gap_max", "ratio_max", "ess"))


def test_a_token_from_the_future_is_refused():
    with pytest.raises(ValueError, match="policy_version must be >= .* got 3 and a token of version 4"):
        gap_metrics(torch.zeros(1, 1), batch_of([[0.0]], versions=[[4]]), policy_version=3)


def replayed(batch, replay):
    return attrs.evolve(batch, replay_logprobs=torch.as_tensor(replay, dtype=torch.float32))


def test_split_by_hand():
    # token 0 (lag 1): p - r = 0.5, r - q = 0; token 1 (lag 5): p - r = -1, r - q = 0.25; 2 not replayed; 3 masked
    batch = batch_of([[-1.0, -2.0, -3.0, -1.0]], [[True, True, True, False]], versions=[[4, 0, 4, 4]])
    batch = replayed(batch, [[-1.0, -1.75, torch.nan, -7.0]])
    got = lag_kernel_split(torch.tensor([[-0.5, -2.75, -9.0, torch.nan]]), batch, policy_version=5)
    shown = {
        "lag_term": 0.75, "kernel_term": 0.25, "replayed_tokens": 2.0, "replayed_differing": 1.0,
        "lag_term_lag_1": 0.5, "kernel_term_lag_1": 0.0, "replayed_tokens_lag_1": 1.0,
        "lag_term_lag_4_7": 1.0, "kernel_term_lag_4_7": 0.25, "replayed_tokens_lag_4_7": 1.0,
    }  # fmt: skip
    assert {name: value for name, value in got.items() if value} == {name: v for name, v in shown.items() if v}
    assert got.keys() == lag_kernel_split(torch.zeros(1, 1), batch_of([[0.0]]), policy_version=0).keys() > shown.keys()


@settings(max_examples=50, deadline=None)
@given(case=cases(), flips=st.integers(0, 2**16))
def test_differing_bits_are_counted_and_nothing_else(case, flips):
    logprobs, batch, _, _ = case
    flipped = torch.tensor([(flips >> i) & 1 for i in range(batch.mask.numel())]).view(batch.mask.shape).bool()
    q = batch.behaviour_logprobs
    replay = torch.where(flipped, torch.nextafter(q, torch.tensor(-torch.inf)), q)
    got = lag_kernel_split(logprobs, replayed(batch, replay), policy_version=0)
    assert got["replayed_differing"] == float((flipped & batch.mask).sum())
    assert got["replayed_tokens"] == got["replayed_tokens_lag_0"] == float(batch.mask.sum())
    assert (got["kernel_term"] > 0) == (got["replayed_differing"] > 0)


def test_bits_are_compared_as_integers():
    batch = replayed(batch_of([[0.0, -0.0, torch.inf, -1.0]]), [[-0.0, 0.0, -1.0, -1.0]])
    got = lag_kernel_split(torch.zeros(1, 4), batch, policy_version=0)
    assert got["replayed_differing"] == 3.0 and got["kernel_term"] == math.inf


def test_nothing_replayed_gives_zeros():
    for batch in (batch_of([[0.0, 0.0]]), replayed(batch_of([[0.0, 0.0]]), torch.full((1, 2), torch.nan))):
        assert set(lag_kernel_split(torch.zeros(1, 2), batch, policy_version=0).values()) == {0.0}


def test_wrong_types_and_shapes_are_refused():
    batch, zeros = batch_of(torch.zeros(1, 2)), torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"logprobs must have the shape of mask \[1, 2\], got \[1, 1\]"):
        gap_metrics(zeros[:, :1], batch, policy_version=0)
    with pytest.raises(ValueError, match=r"replay_logprobs must have the shape of mask \[1, 2\], got \[2\]"):
        attrs.evolve(batch, replay_logprobs=torch.zeros(2))
