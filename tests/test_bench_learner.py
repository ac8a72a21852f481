import pytest
import torch

from rz.bench.learner import MODELS, bench_learner, whole_sequences


def test_both_learners_are_measured_and_agree():
    values = bench_learner(models=("2x128",), lengths=(16, 5), dtype="bfloat16", tokens=40, rounds=2)
    assert values["rounds"] == 2 and values["threads"] == torch.get_num_threads()
    assert [(case["sequences"], case["length"], case["dtype"]) for case in values["cases"]] == [
        (2, 16, "bfloat16"),
        (8, 5, "bfloat16"),
    ]
    for case in values["cases"]:
        for kind in ("rz", "transformers"):
            assert 0 < case[f"{kind}_min"] <= case[f"{kind}_seconds"] <= case[f"{kind}_max"]
            assert case[f"{kind}_peak_mb"] > 0
        assert case["ratio"] == case["rz_seconds"] / case["transformers_seconds"]
        assert case["cpu_ratio"] == case["rz_cpu_seconds"] / case["transformers_cpu_seconds"]
        assert case["memory_ratio"] == case["rz_peak_mb"] / case["transformers_peak_mb"]


def test_sequences_are_new_in_each_round_and_whole():
    first, again, other = (whole_sequences(number, sequences=3, length=7, vocabulary=50) for number in (1, 1, 2))
    assert first.response_ids.shape == (3, 6) and first.mask.all() and first.prompt_ids.shape == (3, 1)
    assert torch.equal(first.response_ids, again.response_ids)
    assert not torch.equal(first.response_ids, other.response_ids)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lengths": (1,)}, r"lengths must be at least one, each >= 2, got \[1\]"),
        ({"lengths": ()}, r"lengths must be at least one"),
        ({"tokens": 63}, "tokens must be >= the longest of lengths 64, got 63"),
        ({"rounds": 0}, "rounds must be >= 1, got 0"),
    ],
)
def test_errors_name_argument_rule_and_value(wrong, says):
    given = {"models": tuple(MODELS), "lengths": (64,), "dtype": None, "tokens": 128, "rounds": 1}
    with pytest.raises(ValueError, match=says):
        bench_learner(**given | wrong)
