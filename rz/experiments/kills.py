"""Runs that are killed at random moments, again and again, and go on: the proof that a resumed run is the whole run."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from rz import checkpoint, report
from rz.batch import Prompt
from rz.config import TrainConfig
from rz.models.make import make_tiny
from rz.run import resume, run
from rz.tasks import Arithmetic

SIZES = {"vocab_size": 15, "hidden_size": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "max_positions": 64}
LIMIT_S = 600.0  # of a run of a few updates, start-up included
MODES: dict[str, dict[str, Any]] = {  # how the runs differ
    "turns": {},
    "beside": {"overlap_steps": 3},
    "seldom": {"publish_every": 2, "overlap_steps": 1},
    "exact": {"exact_lag": 2},
    "synchronous": {"max_lag": 0},
}
TIMES = ("memory_mb", "seconds")  # what two equal runs differ in: memory, and all that ends in seconds


def config_of(model: Path, out: Path, engine: str, mode: str) -> TrainConfig:
    """A run of 16 small updates with an audit and a checkpoint every other one."""
    settings = dict(
        updates=16, group_size=2, groups_per_update=2, max_lag=4, slots=10, max_tokens=8, max_length=16,
        audit_share=0.5, eval_prompts=0, save_every=2, keep=2, learning_rate=1e-3,
    )  # fmt: skip
    return TrainConfig(model=model, task="arithmetic", out=out, engine=engine, **(settings | MODES[mode]))


def outcome(run: Path) -> dict[str, Any]:
    """All that a run computed: metrics but for time and memory, responses, and its last checkpoint."""
    metrics = [
        {name: value for name, value in line.items() if not name.endswith(TIMES)} for line in report.read_metrics(run)
    ]
    last = list(checkpoint.kept_versions(run).values())[-1]
    sums = json.loads((last / checkpoint.CHECKSUMS).read_text(encoding="utf-8"))
    state = json.loads((last / checkpoint.STATE).read_text(encoding="utf-8"))
    state["extra"].pop("logs")  # the bytes of metrics.jsonl, times included
    return {
        "metrics": metrics,
        "rollouts": (run / report.ROLLOUTS).read_text(encoding="utf-8"),
        "kept": sorted(checkpoint.kept_versions(run)),
        "weights": {name: digest for name, digest in sums.items() if name.endswith(".safetensors")},
        "state": state,
    }


class Anything(Arithmetic):
    """Sums, rewarded for anything, so that every update moves the weights."""

    def score(self, prompt: Prompt, response_ids: tuple[int, ...]) -> float:
        return sum((place + 1) * token for place, token in enumerate(response_ids)) % 7 / 7


def _tasks(config: TrainConfig) -> tuple[Anything, None]:
    return Anything(seed=config.seed), None


def _in_child(work: Callable[[], Any], kill_after_s: float | None, has_begun: Callable[[], bool], log: Path) -> bool:
    """Do work in a forked process with its output in a file; whether it ended by itself.

    Else it was killed by SIGKILL, so many seconds after has_begun was first true.

    Raises: RuntimeError, with the last of the output, if it ends with another exit status than 0; TimeoutError if it
        neither ends nor is killed within LIMIT_S.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            torch.set_num_threads(1)  # a fork has none of this process's OpenMP threads, and would wait for them
            work()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    with contextlib.suppress(PermissionError, ProcessLookupError):  # the child has done it, or has ended
        os.setpgid(child, child)
    forked, began, ended, status = time.monotonic(), None, 0, 0
    try:
        while not ended and (kill_after_s is None or began is None or time.monotonic() - began < kill_after_s):
            if began is None and has_begun():
                began = time.monotonic()
            if time.monotonic() - forked > LIMIT_S:
                raise TimeoutError(f"a run must end within {LIMIT_S} s, got none: {_last_words(log)}")
            time.sleep(0.002)
            ended, status = os.waitpid(child, os.WNOHANG)
    finally:  # at its moment, or because this process is to end
        if not ended:
            os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status:
        raise RuntimeError(f"a run must end with exit status 0, got wait status {status}: {_last_words(log)}")
    return True


def _last_words(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-2000:] if log.exists() else "nothing was said"


def _chain(config: TrainConfig, moments: Iterator[tuple[bool, float]]) -> dict[str, int]:
    """Start a run and kill it at each moment until it ends by itself.

    A moment is (True, seconds after the first update since its start or resume) or (False, seconds after that itself).
    """
    log = config.out / report.METRICS
    size = lambda: log.stat().st_size if log.exists() else 0
    counts, ended = {"kills": 0, "while_writing": 0, "begun_anew": 0}, False
    while not ended:
        if checkpoint.kept_versions(config.out):
            work = lambda: resume(config.out, _tasks, updates=None, same_machine=True)
        else:
            if config.out.exists():
                counts["begun_anew"] += 1
                shutil.rmtree(config.out)
            work = lambda: run(config, *_tasks(config))
        updating, seconds = next(moments, (False, None))
        before = size()
        has_begun = lambda before=before, updating=updating: not updating or size() != before
        ended = _in_child(work, seconds, has_begun, config.out.with_name(f"{config.out.name}.log"))
        counts["kills"] += not ended
        counts["while_writing"] += not ended and any((config.out / "checkpoints").glob(".*"))
    return counts


def kills(*, engine: str, count: int, seed: int = 0, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Kill runs with SIGKILL at random moments, `count` times in all, and compare each with one that was left alone.

    A run is started, killed, resumed, killed, ... until it ends. Three moments of four are uniform over the time of its
    updates, the others over that of a whole run, start-up included. A run without a checkpoint yet is begun anew.

    Args:
        engine: plain or vllm.
    Returns: kills, of them those while a checkpoint was written or removed; begun_anew; runs; differing, the runs whose
        outcome is not that of the reference.
    """
    import matplotlib.pyplot  # noqa: F401  what every run imports, once, before the forks
    import torch.utils.tensorboard  # noqa: F401

    if engine == "vllm":
        import vllm  # noqa: F401
    draw, totals, references = random.Random(seed), Counter(), {}
    differing: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        make_tiny(root / "model", **SIZES)
        for number in itertools.count():
            mode = list(MODES)[number % len(MODES)]
            if mode not in references:
                whole, began = config_of(root / "model", root / mode, engine, mode), time.monotonic()
                _chain(whole, iter(()))
                updates_s = sum(line["seconds"] for line in report.read_metrics(whole.out)[1:])
                references[mode] = outcome(whole.out), time.monotonic() - began, updates_s
            reference, whole_s, updates_s = references[mode]
            config = config_of(root / "model", root / f"run-{number}", engine, mode)
            kinds = (draw.random() < 0.75 for _ in range(count - totals["kills"]))
            moments = ((updating, draw.uniform(0, updates_s if updating else whole_s)) for updating in kinds)
            totals.update(_chain(config, moments))
            if outcome(config.out) != reference:
                differing.append((number, mode))
            shutil.rmtree(config.out)
            show(f"{totals['kills']} kills, {number + 1} runs ({mode}), {len(differing)} differing")
            if totals["kills"] >= count:
                return {**totals, "runs": number + 1, "differing": len(differing), "engine": engine}


@attrs.frozen(kw_only=True)
class KillsCommand:
    """Kill small runs with SIGKILL at random moments, resume them, and compare each with one that was left alone.

    Exit status 1 if one differs in weights, optimizer, metrics (but for time) or responses.

    Args:
        engine: plain or vllm.
        count: kills in all.
        seed: of the moments.
        json: print one JSON object.
    """

    engine: Literal["plain", "vllm"] = "plain"
    count: int = 180
    seed: int = 0
    json: bool = False

    def __attrs_post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"count must be >= 1, got {self.count}")
