"""The lag experiment at a tiny size, with rz's engine; tests/engine/test_stock.py has vLLM's own model."""

import json

import attrs
import pytest
import torch

from rz.engine.plain import PlainEngine
from rz.experiments import lag, lag_report
from rz.models.hf import load_config, load_params

SIZES = {"layers": 1, "hidden_size": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 16}
SETTINGS = {
    "model": SIZES | {"max_positions": 16}, "digits": 1, "warm_up": 0.0, "lags": [0, 2], "seeds": [0], "updates": 6,
    "group_size": 2, "groups_per_update": 2, "learning_rate": 1e-2, "cap": 1.02, "replayed": 2, "eval_prompts": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lag")
    settings = lag.LagSettings(**SETTINGS)
    lag.warmed(folder / "start", settings.model, accuracy=0.0, seed=0)
    model = load_config(folder / "start")
    return settings, model, load_params(folder / "start", model)


def engine_of(shared, **changes):
    settings, model, params = shared
    return PlainEngine(
        model, params, **{"dtype": lag.DTYPE, "slots": settings.slots, "max_length": settings.max_length} | changes
    )


def cell(weights, exact, kernels="aligned"):
    return lag.Cell(kernels=kernels, weights=weights, lag=exact, seed=0)


class Rewarding(lag.Arithmetic):
    """Any digit is worth something, so that an untrained model's rewards differ."""

    def score(self, prompt, response_ids):
        return sum(response_ids) % 5 / 5


@pytest.fixture(autouse=True)
def rewards(monkeypatch):
    monkeypatch.setattr(lag, "Arithmetic", Rewarding)


def test_every_token_has_the_lag_that_was_dialled(shared):
    result = lag.run_cell(cell("unclipped", 2), *shared, engine_of(shared))
    curves = result["curves"]
    assert curves["lag_mean"] == [0, 1, 2, 2, 2, 2] and result["ended"] is None
    assert curves["replayed_differing"] == [0.0] * 6 and min(curves["replayed_tokens"]) > 0
    assert curves["kernel_term"] == [0.0] * 6
    assert curves["lag_term"][0] == 0 and min(curves["lag_term"][1:]) > 0
    assert curves["ess"][0] == 1 and max(curves["ess"][1:]) < 1


def test_other_kernels_show_in_the_kernel_term_alone_at_lag_0(shared):
    """An engine in float32 beside a learner in bfloat16 stands for kernels that round otherwise."""
    curves = lag.run_cell(cell("unclipped", 0), *shared, engine_of(shared, dtype=torch.float32))["curves"]
    assert curves["lag_term"] == [0.0] * 6
    assert 0 < min(curves["kernel_term"]) and max(curves["kernel_term"]) < 0.1
    assert curves["replayed_differing"][0] > 0


def test_at_lag_0_with_aligned_kernels_the_weights_are_one_and_the_same(shared):
    runs = [lag.run_cell(cell(weights, 0), *shared, engine_of(shared)) for weights in lag.WEIGHTS]
    assert runs[0]["curves"] == runs[1]["curves"] == runs[2]["curves"]


def test_the_weights_differ_at_a_lag(shared):
    """One engine serves all of them, one after the other, from the same start."""
    engine = engine_of(shared)
    runs = [lag.run_cell(cell(weights, 2), *shared, engine) for weights in (*lag.WEIGHTS, "unclipped")]
    grads = [run["curves"]["grad_norm"] for run in runs]
    assert grads[0] == grads[3] and grads[0] != grads[1] != grads[2] != grads[0]
    assert grads[0][0] == grads[1][0] == grads[2][0]  # the first update is at lag 0


def test_a_gradient_that_is_not_finite_is_a_result(shared):
    settings = attrs.evolve(shared[0], learning_rate=1e30)
    engine = engine_of(shared)
    result = lag.run_cell(cell("unclipped", 2), settings, *shared[1:], engine)
    assert "must be" in result["ended"] and len(result["curves"]["ess"]) < 6 and engine.running() == []
    json.dumps(result, allow_nan=False)


def test_the_command_makes_what_is_missing_and_sums_up(tmp_path, monkeypatch):
    monkeypatch.setattr(lag, "KERNELS", ("aligned",))
    path = tmp_path / "lag.json"
    path.write_text(json.dumps(SETTINGS | {"seeds": [0, 1]}))
    shown = []
    config = lag.LagConfig(settings=path, out=tmp_path / "out")
    summary = lag.lag(config, show=shown.append)
    assert len(shown) == 2 * (1 + 3)  # seeds, and weights: one and the same at lag 0
    (tmp_path / "out" / "aligned-none-lag2-seed1.json").unlink()
    assert lag.lag(config, show=shown.append) == summary and len(shown) == 9
    assert json.loads((tmp_path / "out" / lag.SUMMARY).read_text()) == summary
    found = [(one["weights"], one["lag"]) for one in summary["cells"]]
    assert found == [("unclipped", 0), *((weights, 2) for weights in lag.WEIGHTS)]
    assert (tmp_path / "out" / lag.PLOT).read_bytes()[:4] == b"\x89PNG"
    assert set(lag_report.rows(summary)) == {"aligned, unclipped", "aligned, truncated", "aligned, none"}


def result(seed, rewards, **changes):
    curves = {name: [1.0] * len(rewards) for name in lag.KEPT} | {"reward_mean": rewards} | changes
    return {
        "kernels": "stock", "weights": "none", "lag": 8, "seed": seed, "curves": curves,
        "reward_after": 0.25 * seed, "ended": None,
    }  # fmt: skip


def test_a_summary_by_hand():
    ratios = [2.0, None, 3.0, 1.0, 1.0, 1.0]  # None was infinite
    (cell,) = lag_report.summarise(
        [result(1, [0.0, 0.0, 0.5, 0.5, 1.0, 1.0], ratio_max=ratios), result(2, [1.0] * 6)], points=3
    )
    assert cell["curves"]["reward_mean"] == [0.5, 0.75, 1.0]  # (0 + 0 + 1 + 1) / 4, (0.5 + 0.5 + 1 + 1) / 4, 1
    assert cell["curves"]["ratio_max"][0] == round(4 / 3, 5)  # (2 + 1 + 1) / 3
    assert cell["reward_end"] == [1.0, 1.0] and cell["ratio_max"] == [3.0, 1.0] and cell["seeds"] == [1, 2]
    assert cell["reward_after"] == [0.25, 0.5] and cell["replayed_tokens"] == [6.0, 6.0]
    assert lag_report.rows({"cells": [cell]}) == {"stock, none": "lag 8: 0.375 (0.250 to 0.500)"}


def test_the_plot_has_every_variant():
    assert set(lag_report.COLOURS) == set(lag.WEIGHTS) and set(lag_report.LINES) == set(lag.KERNELS)
