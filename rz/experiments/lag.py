"""The lag experiment: exact policy lags, three ways to weigh old tokens, aligned and stock kernels."""

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from rz.batch import TrainBatch
from rz.engine.interface import Engine
from rz.engine.plain import PlainEngine
from rz.evaluate import evaluate
from rz.experiments.lag_report import plot, rounded, summarise
from rz.experiments.soak import warmed
from rz.loop import UpdateRecord, train
from rz.models.dense import DenseConfig
from rz.models.hf import load_config, load_params
from rz.models.policy import response_logprobs
from rz.schedule import Settings
from rz.setup import require_aligned_model
from rz.steps import (
    PolicyState,
    adamw_init,
    count_nonfinite,
    importance_weights,
    truncated_importance_weights,
    unit_importance_weights,
    update,
)
from rz.tasks import Arithmetic

DTYPE = torch.bfloat16
KERNELS, WEIGHTS = ("aligned", "stock"), ("unclipped", "truncated", "none")
KEPT = (
    "reward_mean", "ess", "ratio_max", "gap_max", "k1", "k3", "lag_term", "kernel_term", "grad_norm", "lag_mean",
    "replayed_tokens", "replayed_differing", "nonfinite_tokens",
)  # fmt: skip
SUMMARY, PLOT = "summary.json", "summary.png"


@attrs.frozen(kw_only=True)
class LagConfig:
    """Train one start checkpoint at exact lags, under each importance weight, with aligned and with stock kernels.

    All in bfloat16, with the same learner, sampler, seeds and budget. Aligned: rz's engine in plain torch, which has
    the bits of rz on vLLM. Stock: vLLM's own model, attention and kernels. A run that is on disk is not made again.

    Args:
        settings: a JSON file with the fields of LagSettings.
        out: folder of the start checkpoint, one JSON file a run, summary.json and summary.png.
        json: print one JSON object.
    """

    settings: Path = Path("experiments/lag.json")
    out: Path = Path("runs/lag")
    json: bool = False


@attrs.frozen(kw_only=True)
class LagSettings:
    """What the runs of the experiment share.

    Args:
        model: sizes of the Qwen3; head_dim as vLLM's own attention takes it, such as 32.
        digits: of the sums.
        warm_up: part of the held-out questions that the start checkpoint answers right, greedily.
        lags, seeds: every combination is run.
        updates, group_size, groups_per_update, learning_rate: of each run.
        cap: of the truncated weights.
        replayed: responses of each update that are replayed for the gap's two terms.
        eval_prompts: held-out questions before and after, a response each, at temperature 1 as in training.
    """

    model: Mapping[str, int]
    digits: int
    warm_up: float
    lags: tuple[int, ...] = attrs.field(converter=tuple)
    seeds: tuple[int, ...] = attrs.field(converter=tuple)
    updates: int
    group_size: int
    groups_per_update: int
    learning_rate: float
    cap: float
    replayed: int
    eval_prompts: int

    @property
    def max_tokens(self) -> int:
        """The longest right response: the digits of the sum, and EOS."""
        return self.digits + 2

    @property
    def max_length(self) -> int:
        """BOS, two numbers, "+", "=" and a response."""
        return 2 * self.digits + 3 + self.max_tokens

    @property
    def slots(self) -> int:
        """A whole update at once."""
        return self.group_size * self.groups_per_update


@attrs.frozen(kw_only=True)
class Cell:
    """One run of the experiment: kernels and weights are among KERNELS and WEIGHTS."""

    kernels: str
    weights: str
    lag: int
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.kernels}-{self.weights}-lag{self.lag}-seed{self.seed}"


def cells(settings: LagSettings) -> list[Cell]:
    """Every run, seed by seed, so that what is there of a stopped experiment is balanced.

    With aligned kernels at lag 0 every ratio is exactly 1 and the weights make one and the same run, made once.
    """
    order = itertools.product(settings.seeds, settings.lags, WEIGHTS, KERNELS)
    every = [Cell(kernels=kernels, weights=weights, lag=lag, seed=seed) for seed, lag, weights, kernels in order]
    return [cell for cell in every if cell.lag or cell.kernels == "stock" or cell.weights == WEIGHTS[0]]


def _reward(params, model: DenseConfig, settings: LagSettings) -> float:
    task = Arithmetic(digits=settings.digits, split="held_out")
    return evaluate(
        params, model, task, questions=settings.eval_prompts, temperature=1.0,
        max_tokens=settings.max_tokens, max_length=settings.max_length, slots=settings.eval_prompts, dtype=DTYPE,
    ).mean  # fmt: skip


def run_cell(
    cell: Cell, settings: LagSettings, model: DenseConfig, params: Mapping[str, torch.Tensor], engine: Engine
) -> dict[str, Any]:
    """One run from params on.

    Args:
        engine: with nothing running; it ends so, with other weights and a higher version.
    Returns: the cell; curves, a list over updates for each of KEPT; reward_after, of the last policy; ended,
        None or why the run stopped before its end (a gradient that is not finite).
    """
    engine.publish(params, engine.version + 1)
    start, records = engine.version, []
    weights_fn = {
        "unclipped": importance_weights,
        "truncated": partial(truncated_importance_weights, cap=settings.cap),
        "none": unit_importance_weights,
    }[cell.weights]
    logprobs_fn = lambda params, batch: response_logprobs(params, model, batch, dtype=DTYPE)
    step = partial(
        update,
        logprobs_fn=logprobs_fn,
        learning_rate=settings.learning_rate,
        weights_fn=weights_fn,
        check=count_nonfinite,
        max_grad_norm=1.0,
    )
    latest, ended = [PolicyState(params=dict(params), optimizer=adamw_init(params), version=start)], None

    def on_update(record: UpdateRecord) -> None:
        latest[0] = record.state
        records.append({name: record.metrics[name] for name in KEPT})

    served = {start: params}  # by version, as far back as a batch can be

    def learn(state: PolicyState, batch: TrainBatch) -> tuple[PolicyState, dict[str, float]]:
        """An update that knows what the learner gave for some of the tokens under their own weights."""
        some = batch.rows(0, settings.replayed)
        with torch.no_grad():
            values = logprobs_fn(served[int(some.policy_versions[some.mask][0])], some)
        replay = torch.full_like(batch.behaviour_logprobs, torch.nan)
        replay[: settings.replayed] = values.masked_fill(~some.mask, torch.nan)
        after, metrics = step(state, attrs.evolve(batch, replay_logprobs=replay))
        served[after.version] = after.params
        served.pop(after.version - cell.lag - 1, None)
        return after, metrics

    work = train(
        state=latest[0],
        engine=engine,
        task=Arithmetic(digits=settings.digits, seed=cell.seed),
        settings=Settings(
            group_size=settings.group_size,
            groups_per_update=settings.groups_per_update,
            max_lag=cell.lag,
            exact_lag=cell.lag,
            slots=settings.slots,
            updates=settings.updates,
        ),
        run_seed=cell.seed,
        max_tokens=settings.max_tokens,
        temperature=1.0,
        update=learn,
        on_update=on_update,
        reward_timeout_s=60.0,
    )
    try:
        asyncio.run(work)
    except ValueError as error:  # such as a gradient that is not finite: a result, not a fault of the experiment
        ended = str(error)
        engine.abort([(rollout.prompt_index, rollout.sample) for rollout in engine.running()])
    return attrs.asdict(cell) | {
        "curves": {name: [rounded(record[name]) for record in records] for name in KEPT},
        "reward_after": _reward(latest[0].params, model, settings),
        "ended": ended,
    }


def lag(config: LagConfig, *, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Make the runs that are missing; write and return the summary of all."""
    values = json.loads(config.settings.read_text(encoding="utf-8"))
    settings = LagSettings(**values)
    config.out.mkdir(parents=True, exist_ok=True)
    start = config.out / "start"
    if not start.exists():
        warmed(start, settings.model, accuracy=settings.warm_up, seed=0, digits=settings.digits)
    model = load_config(start)
    require_aligned_model(model, DTYPE)
    params = load_params(start, model)
    made, stock = {}, None
    sizes = {"dtype": DTYPE, "slots": settings.slots, "max_length": settings.max_length}
    try:
        for place, cell in enumerate(todo := cells(settings)):
            path = config.out / f"{cell.name}.json"
            if not path.exists():
                if cell.kernels == "stock" and stock is None:
                    from rz.engine.stock import stock_engine

                    stock = stock_engine(start, model, params, **sizes)
                engine = stock if cell.kernels == "stock" else PlainEngine(model, params, **sizes)
                result = run_cell(cell, settings, model, params, engine)
                partial_path = path.with_suffix(".partial")
                partial_path.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")
                partial_path.rename(path)
                show(f"{place + 1}/{len(todo)} {cell.name}: {result['reward_after']:.3f} {result['ended'] or ''}")
            made[cell] = json.loads(path.read_text(encoding="utf-8"))
    finally:
        if stock is not None:
            stock.close()
    before = _reward(params, model, settings)
    summary = {"settings": values, "reward_before": before, "cells": summarise(made.values())}
    (config.out / SUMMARY).write_text(json.dumps(summary, allow_nan=False) + "\n", encoding="utf-8")
    plot(summary, config.out / PLOT)
    return summary
