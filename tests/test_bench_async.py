from statistics import mean

import pytest

from rz.bench.asynchronous import PARTS, bench_async, length, start_worker
from rz.models.make import make_tiny
from rz.ops.probe import ProbeResult


def test_lengths_are_heavy_tailed_and_a_function_of_the_seed():
    # Quantiles of the lognormal with mean 40 and sigma 1: 40 * exp(-1/2 + z) is 24.3 at z = 0 and 248.4 at z = 2.326.
    of = lambda seed, longest=512: length(seed, sigma=1.0, longest=longest)
    lengths = sorted(of(place * 2**32 // 10_000) for place in range(10_000))
    assert lengths[5_000] == 24 and abs(lengths[9_900] - 248) <= 2
    assert lengths[0] == 1 and lengths[-1] == 512 and 38 < mean(lengths) < 40
    assert of(7) == of(7 + 2**32)
    # With sigma 1.25: 40 * exp(-0.78125) is 18.3 at z = 0, 335.3 at z = 2.326.
    lengths = sorted(length(place * 2**32 // 10_000, sigma=1.25, longest=1024) for place in range(10_000))
    assert lengths[5_000] == 18 and abs(lengths[9_900] - 335) <= 2 and lengths[-1] == 1024


def test_a_round_that_ended_between_two_publishes_is_followed_by_another(tmp_path):
    make_tiny(tmp_path, vocab_size=64, layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16)
    changes = {"engine": "plain", "publish_every": 2, "max_lag": 1, "group_size": 2, "groups_per_update": 1, "slots": 4}
    worker = start_worker(tmp_path, 11, 1.0, 1.0, 512, changes)
    try:
        for number in range(2):
            seconds, steps, differing, lag, largest, *parts = (float(value) for value in worker.ask(number).split())
            assert seconds > 0 and steps > 0 and differing == 0 and len(parts) == len(PARTS)
            assert 0 < lag <= largest == 1
    finally:
        worker.close()


def test_a_worker_that_dies_says_why(tmp_path):
    worker = start_worker(tmp_path / "none", 11, 1.0, 1.0, 512, {"engine": "plain"})
    try:
        with pytest.raises(RuntimeError, match=r"worker must time round 0, got its end: (?s:.*)none"):
            worker.ask(0)
    finally:
        worker.close()


def test_a_machine_that_is_not_aligned_is_refused(tmp_path, monkeypatch):
    make_tiny(tmp_path, vocab_size=64, layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16)
    found = (ProbeResult(name="linear", passed=False, detail="row 3 differs"),)
    monkeypatch.setattr("rz.ops.probe.probe", lambda *arguments, **settings: found)
    with pytest.raises(RuntimeError, match="this machine is not aligned in float32: linear: row 3 differs"):
        bench_async(
            model=tmp_path, updates=26, rounds=1, modes=("sync", "turns"), audit_share=0.0, sigma=1.0, longest=512
        )


def test_a_round_too_short_to_time_is_refused():
    with pytest.raises(ValueError, match=r"updates must be >= 26 for responses of up to 512 tokens, got 25"):
        bench_async(model=None, updates=25, rounds=1, modes=("sync", "turns"), audit_share=0.0, sigma=1.0, longest=512)
