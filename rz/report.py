"""What a run writes: metrics.jsonl, rollouts.jsonl, TensorBoard events, live progress and a plot."""

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rz.batch import Group, Rollout

METRICS, ROLLOUTS, CONFIG = "metrics.jsonl", "rollouts.jsonl", "run.json"
PROBE, PARTIAL = ".write", ".run.json"  # what a kill may leave of a run that has not begun


def new_run_folder(folder: Path) -> Path:
    """Make the folder of a new run. Raises ValueError if it holds anything, or cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if held := sorted(entry.name for entry in folder.iterdir() if entry.name not in (PROBE, PARTIAL)):
            raise ValueError(f"out must be a new or empty folder, got {folder} with {held[0]}")
        probe = folder / PROBE
        (folder / PARTIAL).unlink(missing_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out must be a folder that can be written, got {folder} ({error.strerror})") from None
    return folder


def rollout_values(rollout: Rollout) -> dict[str, Any]:
    """A response as JSON values. Logprobs read back to the same float32 bits.

    replay_logprobs, where there are any, are null for the tokens that were not replayed.
    """
    values = {
        "prompt": rollout.prompt_index,
        "sample": rollout.sample,
        "seed": rollout.seed,
        "temperature": rollout.temperature,
        "prompt_ids": rollout.prompt_ids,
        "response_ids": rollout.response_ids,
        "behaviour_logprobs": rollout.behaviour_logprobs.tolist(),
        "policy_versions": rollout.policy_versions.tolist(),
        "stop_reason": rollout.stop_reason,
    }
    if rollout.replay_logprobs is not None:
        values["replay_logprobs"] = [None if value != value else value for value in rollout.replay_logprobs.tolist()]
    return values


def rollout_from(values: Mapping[str, Any]) -> Rollout:
    """The response of rollout_values. Raises: KeyError, TypeError or ValueError if it is none."""
    replay = dict(values).get("replay_logprobs")
    if replay is not None:
        replay = torch.tensor([math.nan if value is None else value for value in replay], dtype=torch.float32)
    return Rollout(
        prompt_index=values["prompt"],
        sample=values["sample"],
        prompt_ids=values["prompt_ids"],
        response_ids=values["response_ids"],
        behaviour_logprobs=torch.tensor(values["behaviour_logprobs"], dtype=torch.float32),
        policy_versions=torch.tensor(values["policy_versions"], dtype=torch.int64),
        stop_reason=values["stop_reason"],
        seed=values["seed"],
        temperature=values["temperature"],
        replay_logprobs=replay,
    )


def rollout_line(rollout: Rollout, reward: float | None, version: int | None) -> str:
    """One response as JSON, with its reward and the version that consumed it.

    reward is null for a response that was given none; both are for one not consumed when the run ended.
    """
    return json.dumps({**rollout_values(rollout), "reward": reward, "consumed_at": version})


def read_rollouts(run: Path) -> Iterator[Rollout]:
    """The responses of a run, in the order in which they were consumed.

    Raises: ValueError naming file, line and what is wrong.
    """
    path = run / ROLLOUTS
    if not path.is_file():
        raise ValueError(f"run must be the folder of a run, with {ROLLOUTS}, got {run}")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield rollout_from(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}:{number} must be a response as rz writes it, got {error!r}") from None


def each_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """metrics.jsonl of a run, one object an update, one at a time: a long run's are hundreds of megabytes."""
    with (run / METRICS).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                values = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{run / METRICS}:{number} must be the metrics of an update as rz writes them, got {error}"
                ) from None
            yield values


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run, one object an update."""
    return list(each_metrics(run))


def check_logs(run: Path, places: Mapping[str, int], version: int) -> None:
    """Raises ValueError if the logs are not those of a run that was at these places after this many updates."""
    whole = isinstance(places, Mapping) and places.keys() == {METRICS, ROLLOUTS}
    if not whole or not all(type(place) is int and place >= 0 for place in places.values()):
        raise ValueError(f"logs of the checkpoint must be a place >= 0 in {METRICS} and in {ROLLOUTS}, got {places}")
    for name, place in places.items():
        size = (run / name).stat().st_size if (run / name).is_file() else 0
        if size < place:
            raise ValueError(f"{run / name} must hold at least the {place} bytes it had, got {size}")
        if place:
            with (run / name).open("rb") as opened:
                opened.seek(place - 1)
                if opened.read(1) != b"\n":
                    raise ValueError(f"{run / name} must have the end of a line at byte {place}, got another content")
    versions = [line.get("policy_version") for line in itertools.islice(each_metrics(run), version)] if version else []
    if versions != list(range(1, version + 1)):
        wrong = next((place for place, got in enumerate(versions) if got != place + 1), len(versions))
        got = versions[wrong] if wrong < len(versions) else "the end"
        raise ValueError(f"{run / METRICS}:{wrong + 1} must be of policy_version {wrong + 1}, got {got}")


def remove_logs(run: Path) -> None:
    """Of a run that has made no update: what it may have written before it was killed."""
    for name in (METRICS, ROLLOUTS):
        (run / name).unlink(missing_ok=True)


def write_config(run: Path, values: Mapping[str, Any]) -> None:
    """run.json: the settings of a run; whole, or as it was."""
    partial = run / PARTIAL
    partial.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")
    partial.replace(run / CONFIG)


def read_config(run: Path) -> dict[str, Any]:
    """run.json of a run. Raises ValueError if it is not there or is not JSON."""
    try:
        return dict(json.loads((run / CONFIG).read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError):
        raise ValueError(f"run must be the folder of a run, with {CONFIG}, got {run}") from None


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _summary(values: Mapping[str, float]) -> Any:
    """Scalars as one TensorBoard event, as a hundred events take seven times as long."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])


class Log:
    """The files of a run, appended to once an update; each update is one axis step, its policy version.

    JSON has no NaN and no infinity: in metrics.jsonl such a value is null.

    Args:
        places: of `places()` when the run was at `version`: what was written later is cut off, so that a run that goes
            on from there leaves the log of one that was never interrupted. None: a new run.
    Raises: ValueError, and changes nothing, if a file is shorter than its place.
    """

    def __init__(self, run: Path, *, places: Mapping[str, int] | None = None, version: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        for name, place in ({} if places is None else places).items():
            size = (run / name).stat().st_size if (run / name).exists() else 0
            if size < place:
                raise ValueError(f"{run / name} must hold at least the {place} bytes it had, got {size}")
        self._files = {name: (run / name).open("ab") for name in (METRICS, ROLLOUTS)}
        for name, place in ({} if places is None else places).items():
            self._files[name].truncate(place)
            self._files[name].seek(place)
        purge = None if places is None else version + 1
        self._events = SummaryWriter(str(run / "tensorboard"), purge_step=purge)

    def _write(self, name: str, lines: Iterable[str]) -> None:
        self._files[name].write("".join(line + "\n" for line in lines).encode())
        self._files[name].flush()

    def update(self, metrics: Mapping[str, Any], groups: Iterable[Group]) -> None:
        """Write the metrics of an update and the responses it consumed or left out, at the version before it."""
        version = metrics["policy_version"]
        strict = {name: None if _is_nonfinite(value) else value for name, value in metrics.items()}
        self._write(METRICS, [json.dumps(strict)])
        pairs = [pair for group in groups for pair in zip(group.rollouts, group.rewards, strict=True)]
        known = lambda reward: None if _is_nonfinite(reward) else reward
        self._write(ROLLOUTS, (rollout_line(rollout, known(reward), version - 1) for rollout, reward in pairs))
        finite = {name: value for name, value in metrics.items() if not _is_nonfinite(value)}
        self._events.file_writer.add_summary(_summary(finite), version)

    def unused(self, rollouts: Iterable[Rollout]) -> None:
        """Write the responses that finished but were not consumed when the run ended."""
        self._write(ROLLOUTS, (rollout_line(rollout, None, None) for rollout in rollouts))

    def places(self) -> dict[str, int]:
        """The bytes of each file so far."""
        return {name: opened.tell() for name, opened in self._files.items()}

    def sync(self) -> None:
        """Put what was written onto the disk, as a checkpoint that relies on it must not outlive it."""
        for opened in self._files.values():
            os.fsync(opened.fileno())
        self._events.flush()

    def close(self) -> None:
        for opened in self._files.values():
            opened.close()
        self._events.close()


class Totals:
    """Sums over the updates of a run, those before a resume included."""

    def __init__(self, metrics: Iterable[Mapping[str, Any]]) -> None:
        self.tokens = self.audited = self.differing = self.lag_max = 0
        self.lag = 0.0
        for line in metrics:
            self.add(line)

    def add(self, metrics: Mapping[str, Any]) -> None:
        """One more update."""
        self.tokens += metrics["tokens"]
        self.lag += metrics["lag_mean"] * metrics["tokens"]
        self.lag_max = max(self.lag_max, metrics["lag_max"])
        self.audited += metrics["audited_tokens"]
        self.differing += metrics["differing_tokens"]


class Progress:
    """One live line on a terminal, a plain line now and then elsewhere.

    Args:
        updates: of the run.
        done, audited, differing: updates made and tokens counted before, of a run that goes on.
    """

    def __init__(self, updates: int, *, done: int = 0, audited: int = 0, differing: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._console = Console()
        self._every = max(1, updates // 20)
        text = TextColumn("{task.fields[text]}")
        self._bar = Bar(
            TextColumn("update"), MofNCompleteColumn(), BarColumn(20), text, TimeElapsedColumn(), console=self._console
        )
        self._task = self._bar.add_task("", total=updates, completed=done, text="")
        self._audited, self._differing = audited, differing
        if self._console.is_terminal:
            self._bar.start()

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show an update."""
        self._audited += metrics["audited_tokens"]
        self._differing += metrics["differing_tokens"]
        text = (
            f"reward {metrics['reward_mean']:.3f}  lag {metrics['lag_mean']:.1f}/{metrics['lag_max']}  "
            f"ess {metrics['ess']:.3f}  max ratio {metrics['ratio_max']:.2f}  "
            f"{metrics['tokens'] / metrics['seconds']:.0f} tok/s  "
            f"audited {self._audited}, differing {self._differing}"
        )
        if "accuracy" in metrics:
            text += f"  held-out {metrics['accuracy']:.3f}"
        self._bar.update(self._task, advance=1, text=text)
        done = int(self._bar.tasks[0].completed)
        if not self._console.is_terminal and (done % self._every == 0 or "accuracy" in metrics):
            print(f"update {done}/{int(self._bar.tasks[0].total)}  {text}", flush=True)

    def close(self) -> None:
        self._bar.stop()


def table(title: str, rows: Mapping[str, Any]) -> None:
    """Print names and values in two columns."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, show_header=False)
    for name, value in rows.items():
        shown.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(shown)


def plot(run: Path) -> Path:
    """plot.png of a run: reward and accuracy, effective sample size, the gap's k3, and lag, by update."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = (("reward_mean",), ("ess", "ratio_max"), ("k1", "k3"), ("lag_mean", "lag_max"))
    wanted = {"policy_version", "accuracy", "differing_tokens", "audited_tokens", *itertools.chain(*shown)}
    metrics = [{name: line[name] for name in wanted & line.keys()} for line in each_metrics(run)]
    axis = [line["policy_version"] for line in metrics]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    for place, names in zip(axes.flat, shown, strict=True):
        for name in names:
            place.plot(axis, [line[name] for line in metrics], label=name, linewidth=1)
    held = [(line["policy_version"], line["accuracy"]) for line in metrics if "accuracy" in line]
    if held:
        axes.flat[0].plot(*zip(*held, strict=True), "o-", label="held-out accuracy", markersize=3)
    differing = sum(line["differing_tokens"] for line in metrics)
    audited = sum(line["audited_tokens"] for line in metrics)
    figure.suptitle(f"{run.name}: {audited} tokens audited, {differing} differing")
    for place in axes.flat:
        place.legend(fontsize=8)
        place.grid(alpha=0.3)
    for place in axes[1]:
        place.set_xlabel("policy version")
    figure.savefig(run / "plot.png", dpi=110)
    pyplot.close(figure)
    return run / "plot.png"
