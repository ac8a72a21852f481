from statistics import mean

import pytest

from rz.bench.asynchronous import LONGEST, PARTS, length, start_worker
from rz.models.make import make_tiny


def test_lengths_are_heavy_tailed_and_a_function_of_the_seed():
    # Quantiles of the lognormal with mean 40 and sigma 1: 40 * exp(-1/2 + z) is 24.3 at z = 0 and 248.4 at z = 2.326.
    lengths = sorted(length(place * 2**32 // 10_000) for place in range(10_000))
    assert lengths[5_000] == 24 and abs(lengths[9_900] - 248) <= 2
    assert lengths[0] == 1 and lengths[-1] == LONGEST and 38 < mean(lengths) < 40
    assert length(7) == length(7 + 2**32)


def test_a_round_that_ended_between_two_publishes_is_followed_by_another(tmp_path):
    make_tiny(tmp_path, vocab_size=64, layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16)
    changes = {"engine": "plain", "publish_every": 2, "max_lag": 1, "group_size": 2, "groups_per_update": 1, "slots": 4}
    worker = start_worker(tmp_path, 11, 1.0, changes)
    try:
        for number in range(2):
            seconds, steps, differing, lag, largest, *parts = (float(value) for value in worker.ask(number).split())
            assert seconds > 0 and steps > 0 and differing == 0 and len(parts) == len(PARTS)
            assert 0 < lag <= largest == 1
    finally:
        worker.close()


def test_a_worker_that_dies_says_why(tmp_path):
    worker = start_worker(tmp_path / "none", 11, 1.0, {"engine": "plain"})
    try:
        with pytest.raises(RuntimeError, match=r"worker must time round 0, got its end: (?s:.*)none"):
            worker.ask(0)
    finally:
        worker.close()
