"""What the commands that measure do: benchmarks, the large proof and the experiments. Each returns the exit status."""

import contextlib
import json
import sys
from typing import Any

import attrs

from rz.commands import BenchAsyncCommand, BenchLearnerCommand, BenchRolloutCommand, BenchStepCommand
from rz.experiments.kills import KillsCommand
from rz.experiments.lag import LagConfig
from rz.experiments.soak import SoakConfig
from rz.verify.prove import ProveConfig


def show(values: dict[str, Any], as_json: bool, title: str) -> None:
    """Print one JSON object, or a table."""
    from rz.report import table

    if as_json:
        print(json.dumps(values))
    else:
        table(title, values)


def run_bench_rollout(command: BenchRolloutCommand) -> int:
    from rz.bench.rollout import bench_rollout

    values = bench_rollout(
        command.model,
        dtype=command.dtype,
        sequences=command.sequences,
        prompt_tokens=command.prompt_tokens,
        response_tokens=command.response_tokens,
        rounds=command.rounds,
    )
    show(values, command.json, "rz bench rollout")
    return 0


def run_bench_learner(command: BenchLearnerCommand) -> int:
    from rz.bench.learner import bench_learner
    from rz.report import table

    values = bench_learner(
        models=command.models,
        lengths=command.lengths,
        dtype=None if command.dtype == "default" else command.dtype,
        tokens=command.tokens,
        rounds=command.rounds,
    )
    if command.json:
        print(json.dumps(values))
        return 0
    for case in values["cases"]:
        table(f"rz bench learner, {case['model']} {case['dtype']}, {case['sequences']} x {case['length']} tokens", case)
    return 0


def run_bench_async(command: BenchAsyncCommand) -> int:
    from rz.bench.asynchronous import bench_async

    settings = attrs.asdict(command)
    as_json = settings.pop("json")
    values = bench_async(**settings)
    show(values, as_json, "rz bench async")
    return 1 if any(value for name, value in values.items() if name.endswith("_differing")) else 0


def run_bench_step(command: BenchStepCommand) -> int:
    from rz.bench.step import bench_step

    settings = attrs.asdict(command)
    as_json = settings.pop("json")
    with contextlib.redirect_stdout(sys.stderr):  # the progress of the runs
        values = bench_step(**settings)
    show(values, as_json, "rz bench step")
    return 1 if values["differing_tokens"] else 0


def run_prove(config: ProveConfig) -> int:
    from rz.verify.prove import prove

    values = prove(config)
    show(values if config.json else {n: v for n, v in values.items() if n != "results"}, config.json, "rz prove")
    return 0 if values["passed"] else 1


def run_kills(command: KillsCommand) -> int:
    from rz.experiments.kills import kills

    said = lambda text: print(text, file=sys.stderr, flush=True)
    values = kills(engine=command.engine, count=command.count, seed=command.seed, show=said)
    show(values, command.json, "rz experiment kills")
    return 1 if values["differing"] else 0


def run_soak(config: SoakConfig) -> int:
    from rz.experiments.soak import rows, soak

    summary = soak(config)
    show(summary if config.json else rows(summary), config.json, "rz experiment soak")
    return 1 if summary["differing_tokens"] else 0


def run_lag(config: LagConfig) -> int:
    from rz.experiments.lag import lag
    from rz.experiments.lag_report import rows

    summary = lag(config, show=lambda text: print(text, file=sys.stderr, flush=True))
    show(summary if config.json else rows(summary), config.json, "rz experiment lag: reward of the last policy")
    return 0
