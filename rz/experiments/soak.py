"""A long run at a large lag, killed or not: 20,000 updates on real vLLM, with a table at the end."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from rz import checkpoint, report
from rz.config import TrainConfig
from rz.demo import DIGITS, LENGTH, TOKENS, warm_up
from rz.experiments.supervise import follow_parent, supervise
from rz.models.hf import load_config, load_params, save_checkpoint
from rz.models.make import make_tiny
from rz.run import resume, run
from rz.tasks import Arithmetic

BEGINS, SUMMARY, PLOT = "begins.jsonl", "summary.json", "summary.png"
WINDOW = 500  # updates of which a reward at the start, middle or end is the mean
POINTS = 100  # of the summary's curves
CURVES = ("reward_mean", "lag_mean", "ess", "k1", "k3", "lag_term", "grad_norm")  # means over the updates of a point
HEIGHTS = ("lag_max", "ratio_max", "gap_max", "kernel_term", "memory_mb")  # the largest
SUMS = ("tokens", "audited_tokens", "differing_tokens", "seconds")


@attrs.frozen(kw_only=True)
class SoakConfig:
    """Train a small model for very many updates at a large lag, go on whenever the run is killed, and sum it up.

    The model is warmed up on two-digit sums first. The run is a process of its own: if it dies by a signal it is
    resumed from its last checkpoint, and so it is if this command is started again on the same folder. Exit status 1
    if a token differs.

    Args:
        settings: a JSON file with model (sizes of the Qwen3), warm_up (held-out accuracy at which training begins),
            tries (deaths without a new checkpoint in between that end the command) and train (fields of rz train).
        out: folder of the start checkpoint, the run, and summary.json and summary.png.
        json: print one JSON object.
    """

    settings: Path = Path("experiments/soak.json")
    out: Path = Path("runs/soak")
    json: bool = False


def train_config(out: Path, settings: Mapping[str, Any]) -> TrainConfig:
    """The run of a soak in folder `out`. Raises TypeError or ValueError if settings are none."""
    fixed = {"model": out / "start", "task": "arithmetic", "out": out / "run"}
    return TrainConfig(**{"max_tokens": TOKENS, "max_length": LENGTH} | dict(settings["train"]) | fixed)


def warmed(folder: Path, sizes: Mapping[str, int], *, accuracy: float, seed: int, digits: int = DIGITS) -> float:
    """Write a Qwen3 of these sizes that answers this part of the held-out sums right; returns the part reached."""
    random = folder.with_name(folder.name + "-random")
    shutil.rmtree(random, ignore_errors=True)
    make_tiny(random, vocab_size=len(Arithmetic.tokenizer), seed=seed, **sizes)
    model = load_config(random)
    show = lambda step, loss, right: step % 200 or print(f"warm-up step {step}  right {right:.3f}", flush=True)
    params = load_params(random, model)
    params, reached = warm_up(params, model, accuracy=accuracy, seed=seed, digits=digits, show=show)
    save_checkpoint(folder, params, model, source=random)
    return reached


def _tasks(config: TrainConfig) -> tuple[Arithmetic, Arithmetic]:
    return tuple(Arithmetic(digits=DIGITS, seed=config.seed, split=split) for split in ("train", "held_out"))


def work(out: Path, settings: Mapping[str, Any]) -> None:
    """The run, from where it stands: from nothing, from the warmed-up model, or from its last checkpoint."""
    config = train_config(out, settings)
    if not config.model.exists():
        warmed(config.model, settings["model"], accuracy=settings["warm_up"], seed=config.seed)
    if checkpoint.kept_versions(config.out):
        resume(config.out, _tasks, updates=None, same_machine=True)
        return
    shutil.rmtree(config.out, ignore_errors=True)
    run(config, *_tasks(config))


def soak(config: SoakConfig) -> dict[str, Any]:
    """Run, and go on, to the end; write and return the summary."""
    settings = json.loads(config.settings.read_text(encoding="utf-8"))
    run_folder = train_config(config.out, settings).out
    config.out.mkdir(parents=True, exist_ok=True)
    last = lambda: max(checkpoint.kept_versions(run_folder), default=-1)

    def begin() -> subprocess.Popen:
        with (config.out / BEGINS).open("a", encoding="utf-8") as opened:
            opened.write(json.dumps({"from": last()}) + "\n")
        command = [sys.executable, "-P", "-m", "rz.experiments.soak", str(config.out), json.dumps(settings)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)

    supervise(begin, last, tries=settings["tries"])
    summary = {"settings": settings, **summarise(config.out)}
    (config.out / SUMMARY).write_text(json.dumps(summary, allow_nan=False) + "\n", encoding="utf-8")
    plot(summary, config.out / PLOT)
    return summary


def _points(lines: Iterator[Mapping[str, Any]], count: int) -> Iterator[dict[str, float]]:
    """One point for each `count` updates."""
    chunk: list[Mapping[str, Any]] = []
    for line in lines:
        chunk.append(line)
        if len(chunk) == count:
            yield _point(chunk)
            chunk = []
    if chunk:
        yield _point(chunk)


def _point(chunk: list[Mapping[str, Any]]) -> dict[str, float]:
    last = chunk[-1]
    point = {"version": last["policy_version"]} | {name: last[name] for name in ("accuracy",) if name in last}
    point |= {name: round(sum(line[name] for line in chunk) / len(chunk), 6) for name in CURVES}
    point |= {name: round(max(line[name] for line in chunk), 6) for name in HEIGHTS}
    return point | {name: sum(line[name] for line in chunk) for name in SUMS}


def summarise(out: Path) -> dict[str, Any]:
    """The table of a soak, and its curves, from what its run logged."""
    run_folder = out / "run"
    updates = sum(1 for _ in report.each_metrics(run_folder))
    window = min(WINDOW, max(1, updates // 3))
    middle = (updates - window) // 2
    rewards: list[float] = []
    lags, memory, accuracy, by_lag = 0.0, {}, {}, Counter()
    for place, line in enumerate(report.each_metrics(run_folder)):
        rewards.append(line["reward_mean"])
        lags += line["lag_mean"] * line["tokens"]
        by_lag.update({name: int(value) for name, value in line.items() if name.startswith("tokens_lag_")})
        if line["policy_version"] in (min(1000, updates), updates):
            memory[str(line["policy_version"])] = line["memory_mb"]
        if "accuracy" in line and abs(place + 1 - updates // 2) < abs(accuracy.get("at", 0) - updates // 2):
            accuracy["at"], accuracy["middle"] = place + 1, line["accuracy"]
        if "accuracy" in line:
            accuracy["end"] = line["accuracy"]
    points = list(_points(report.each_metrics(run_folder), max(1, updates // POINTS)))
    total = {name: sum(point[name] for point in points) for name in SUMS}
    kept = checkpoint.kept_versions(run_folder)
    state = json.loads((kept[max(kept)] / checkpoint.STATE).read_text(encoding="utf-8"))
    if before := state["extra"]["before"]:
        accuracy["start"] = before["mean"]
    with (out / BEGINS).open(encoding="utf-8") as lines:
        begins = [json.loads(line)["from"] for line in lines]
    mean = lambda first: sum(rewards[first : first + window]) / window
    return {
        "updates": updates,
        "reward": {"start": mean(0), "middle": mean(middle), "end": mean(updates - window), "window": window},
        "accuracy": accuracy,
        **total,
        "lag_max": max(point["lag_max"] for point in points),
        "lag_mean": lags / max(1, total["tokens"]),
        **by_lag,
        "ratio_max": max(point["ratio_max"] for point in points),
        "ess_least": min(line["ess"] for line in report.each_metrics(run_folder)),
        "memory_mb": memory,
        "resumed_from": [version for version in begins if version >= 0],
        "points": points,
    }


def rows(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The closing table, by row name."""
    reward, accuracy = summary["reward"], summary["accuracy"]
    places = ("start", "middle", "end")
    return {
        "updates": summary["updates"],
        f"reward at start, middle, end (means of {reward['window']})": ", ".join(f"{reward[p]:.3f}" for p in places),
        "held-out accuracy, greedy": ", ".join(f"{accuracy[p]:.3f}" for p in places if p in accuracy),
        "tokens": summary["tokens"],
        "tokens audited": summary["audited_tokens"],
        "tokens differing": summary["differing_tokens"],
        "lag, largest": summary["lag_max"],
        "lag, mean": summary["lag_mean"],
        "tokens at lag 33 to 64": summary["tokens_lag_33_64"],
        "ratio, largest": summary["ratio_max"],
        "effective sample size, least of an update": summary["ess_least"],
        **{f"peak memory at {version}, MB": value for version, value in summary["memory_mb"].items()},
        "resumed, times": len(summary["resumed_from"]),
        "resumed from": ", ".join(map(str, summary["resumed_from"])),
        "seconds of updates": summary["seconds"],
    }


def plot(summary: Mapping[str, Any], path: Path) -> None:
    """The curves of a summary as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = summary["points"]
    axis = [point["version"] for point in points]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), sharex=True, layout="constrained")
    shown = (
        ("reward_mean",), ("ess",), ("ratio_max", "gap_max"),
        ("lag_mean", "lag_max"), ("lag_term", "kernel_term"), ("memory_mb",),
    )  # fmt: skip
    for place, names in zip(axes.flat, shown, strict=True):
        for name in names:
            place.plot(axis, [point[name] for point in points], label=name, linewidth=1)
    held = [(point["version"], point["accuracy"]) for point in points if "accuracy" in point]
    if held:
        axes.flat[0].plot(*zip(*held, strict=True), "o-", label="held-out accuracy", markersize=3, linewidth=1)
    axes.flat[5].set_ylim(0, 1.2 * max(point["memory_mb"] for point in points))
    for place in axes.flat:
        for version in summary["resumed_from"]:
            place.axvline(version, color="grey", linestyle=":", linewidth=1)
        place.legend(fontsize=8)
        place.grid(alpha=0.3)
    for place in axes[1]:
        place.set_xlabel("policy version (dotted: resumed from)")
    text = f"{summary['tokens']:,} tokens, {summary['audited_tokens']:,} audited"
    figure.suptitle(f"{summary['updates']:,} updates: {text}, {summary['differing_tokens']} differing")
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


if __name__ == "__main__":
    follow_parent()
    work(Path(sys.argv[1]), json.loads(sys.argv[2]))
