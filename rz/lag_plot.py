"""The picture of the lag experiment."""

from collections.abc import Mapping
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


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """One row a metric, one column a lag; means over seeds. A term of exactly 0 is not on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lags = sorted({cell["lag"] for cell in summary["cells"]})
    figure, axes = pyplot.subplots(
        len(PANELS), len(lags), figsize=(4 * len(lags), 10), sharex=True, sharey="row", squeeze=False,
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
    axes[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
