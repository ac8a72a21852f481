"""The sums and the picture of the lag experiment."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

COLOURS = {"unclipped": "tab:blue", "truncated": "tab:orange", "none": "tab:red"}
LINES = {"aligned": "-", "stock": "--"}
PANELS = {  # metric: (title, logarithmic)
    "reward_mean": ("reward", False),
    "ess": ("effective sample size", False),
    "lag_term": ("lag term, mean |p - r|, nats", True),
    "kernel_term": ("kernel term, max |r - q|, nats", True),
}


def rounded(value: float) -> float | None:
    """Six digits; None for what JSON cannot hold."""
    return float(f"{value:.6g}") if abs(value) < float("inf") else None


def summarise(results: Iterable[Mapping[str, Any]], *, points: int = 32) -> list[dict[str, Any]]:
    """One object for each (kernels, weights, lag): facts, one value a seed, and curves, means over seeds and updates.

    Args:
        points: of each curve.
    """
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["kernels"], result["weights"], result["lag"]), []).append(result)
    found = []
    for (kernels, weights, exact), members in groups.items():
        facts = [_facts(member) for member in members]
        length = max(len(member["curves"]["ess"]) for member in members)
        size = max(1, length // points)
        curves = {
            name: [
                _mean(itertools.chain.from_iterable(member["curves"][name][first : first + size] for member in members))
                for first in range(0, length, size)
            ]
            for name in ("reward_mean", "ess", "lag_term", "kernel_term", "ratio_max", "k3")
        }
        cell = {"kernels": kernels, "weights": weights, "lag": exact, "seeds": [member["seed"] for member in members]}
        facts_by_name = {name: [one[name] for one in facts] for name in facts[0]}
        found.append(cell | facts_by_name | {"updates_a_point": size, "curves": curves})
    return found


def _facts(result: Mapping[str, Any]) -> dict[str, Any]:
    curves = result["curves"]
    known = lambda name: [value for value in curves[name] if value is not None] or [0.0]
    tail = max(1, len(curves["reward_mean"]) // 6)
    return {
        "reward_after": result["reward_after"],
        "reward_end": _mean(curves["reward_mean"][-tail:]),
        "ess_mean": _mean(curves["ess"]),
        "ess_least": min(known("ess")),
        "ratio_max": max(known("ratio_max")),
        "lag_term": _mean(curves["lag_term"]),
        "kernel_term": max(known("kernel_term")),
        "replayed_tokens": sum(known("replayed_tokens")),
        "replayed_differing": sum(known("replayed_differing")),
        "updates": len(curves["ess"]),
        "ended": result["ended"],
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return rounded(sum(known) / len(known)) if known else None


def rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Reward of the last policy, mean over seeds (least to most), by kernels and weights, one column a lag."""
    table: dict[str, list[str]] = {}
    for cell in summary["cells"]:
        ends = cell["reward_after"]
        text = f"lag {cell['lag']}: {sum(ends) / len(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})"
        table.setdefault(f"{cell['kernels']}, {cell['weights']}", []).append(text)
    return {name: "   ".join(texts) for name, texts in table.items()}


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """One row a metric, one column a lag; means over seeds. A term of exactly 0 is not on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lags = sorted({cell["lag"] for cell in summary["cells"]})
    figure, axes = pyplot.subplots(
        len(PANELS), len(lags), figsize=(3.6 * len(lags), 9), sharex=True, sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for cell in summary["cells"]:
        column = lags.index(cell["lag"])
        for row, (name, (_, logarithmic)) in enumerate(PANELS.items()):
            points = [
                ((place + 1) * cell["updates_a_point"], value)
                for place, value in enumerate(cell["curves"][name])
                if value is not None and (value > 0 or not logarithmic)
            ]
            if points:
                style = {"color": COLOURS[cell["weights"]], "linestyle": LINES[cell["kernels"]], "linewidth": 1}
                axes[row, column].plot(
                    *zip(*points, strict=True), label=f"{cell['kernels']}, {cell['weights']}", **style
                )
    for row, (title, logarithmic) in enumerate(PANELS.values()):
        axes[row, 0].set_ylabel(title)
        for column, exact in enumerate(lags):
            place = axes[row, column]
            place.grid(alpha=0.3)
            if logarithmic:
                place.set_yscale("log")
            if row == 0:
                place.set_title(f"lag {exact}")
    for place in axes[-1]:
        place.set_xlabel("update")
    axes[0, -1].legend(fontsize=6, ncols=2, loc="lower left")
    figure.savefig(path, dpi=70)
    pyplot.close(figure)
