"""Speed of training: the synchronous loop and the asynchronous ones on the same work, by turns in one run."""

import asyncio
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any

import attrs
import torch

from rz.audit import online_audit
from rz.batch import Prompt, Request, Rollout
from rz.bench.worker import Worker
from rz.config import TrainConfig
from rz.engine.interface import Engine
from rz.loop import UpdateRecord, train
from rz.models.hf import load_config, load_params
from rz.models.make import make_tiny
from rz.models.policy import response_logprobs
from rz.schedule import start
from rz.setup import open_engine, require_aligned_model
from rz.snapshot import Snapshot
from rz.steps import PolicyState, adamw_init, update

VOCABULARY, PROMPT_TOKENS, MEAN = 64, 8, 40.0
FACTS = ("engine_steps", "differing_tokens", "lag_mean", "lag_max")
PARTS = ("rollout", "update", "audit", "publish")  # of the seconds of an update, as they are shown
SETTLE = 4  # updates at the start of a round, and beside the drain at its end, that are not timed
DRAIN_TOKENS = 32  # a response gains at least as many during an update, so it is done so many updates later
MODES: dict[str, dict[str, Any]] = {
    "sync": {"max_lag": 0},
    "turns": {},
    "turns_2": {"publish_every": 2},
    "turns_4": {"publish_every": 4},
    "turns_8": {"publish_every": 8},
    "thread": {"overlap_steps": 32},
    "process": {"overlap_steps": 32, "engine_process": True},
    "process_2": {"overlap_steps": 32, "engine_process": True, "publish_every": 2},
    "process_4": {"overlap_steps": 32, "engine_process": True, "publish_every": 4},
}


def length(seed: int, *, sigma: float, longest: int) -> int:
    """Tokens of the response with this seed: lognormal of mean 40, cut at longest. With sigma 1 the median is 24, and
    one in a hundred is above 248."""
    quantile = NormalDist().inv_cdf((seed % 2**32 + 0.5) / 2**32)
    return max(1, min(longest, round(MEAN * math.exp(sigma * quantile - sigma**2 / 2))))


@attrs.define(eq=False)
class OfLength:
    """An engine whose responses end after length(seed) tokens, since a random model has no lengths of its own."""

    inner: Engine
    sigma: float
    longest: int

    def submit(self, request: Request, sampled: Rollout | None = None) -> None:
        tokens = length(request.seed, sigma=self.sigma, longest=self.longest)
        self.inner.submit(attrs.evolve(request, max_tokens=tokens), sampled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@attrs.frozen
class Random:
    """Random prompts and rewards; nothing stops a response but its length."""

    stop_ids: tuple[int, ...] = ()

    def prompt(self, index: int) -> Prompt:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist()
        return Prompt(index=index, token_ids=ids)

    async def score(self, prompt: Prompt, response_ids: tuple[int, ...]) -> float:
        return sum(response_ids) % 11 / 10


def config_of(model: Path, longest: int, settings: Mapping[str, Any]) -> TrainConfig:
    """The run of a mode: 64 responses an update, 64 slots."""
    common = dict(group_size=8, groups_per_update=8, slots=64, max_tokens=longest, max_length=longest + PROMPT_TOKENS)
    common |= dict(model=model, task="arithmetic", out=model / "none", engine="vllm", max_lag=64)
    return TrainConfig(**(common | dict(settings)))


def work(folder: str, updates: str, threads: str, audit_share: str, sigma: str, longest: str, **settings: Any) -> None:
    """A worker process: for each line on standard input a round, and one line with its seconds an update, engine steps
    an update, differing tokens, mean and largest lag, and seconds an update of each of PARTS."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    torch.set_num_threads(int(threads))
    count, share = int(updates), float(audit_share)
    config = config_of(Path(folder), int(longest), {**settings, "updates": count, "audit_share": share})
    model = load_config(config.model)
    params = load_params(config.model, model)
    state = PolicyState(params=params, optimizer=adamw_init(params), version=0)
    first = Snapshot(plan=start(config.schedule), state=state, history=(params,), responses=())
    engine = OfLength(open_engine(config, model, first), float(sigma), int(longest))
    learn = partial(
        update,
        logprobs_fn=lambda params, batch: response_logprobs(params, model, batch, dtype=config.torch_dtype),
        learning_rate=1e-5,
    )
    audit = online_audit(model, dtype=config.torch_dtype, share=share, run_seed=0) if share else None
    for _ in sys.stdin:
        if engine.version < state.version:  # the last round ended between two publishes
            engine.publish(state.params, state.version)
        rows: list[tuple[float, ...]] = []  # of an update: moment, FACTS and PARTS

        def note(record: UpdateRecord, rows=rows) -> None:
            facts = (record.metrics[fact] for fact in FACTS)
            rows.append((time.perf_counter(), *facts, *(record.seconds[part] for part in PARTS)))

        state = asyncio.run(
            train(
                state=state,
                engine=engine,
                task=Random(),
                settings=config.schedule,
                run_seed=0,
                max_tokens=config.max_tokens,
                temperature=1.0,
                update=learn,
                audit=audit,
                on_update=note,
                reward_timeout_s=60.0,
                overlap_steps=config.overlap_steps,
                first_prompt=state.version * config.groups_per_update,
            )
        )
        timed = rows[SETTLE : count - min(config.max_lag, config.max_tokens // DRAIN_TOKENS) - SETTLE + 1]
        seconds = (timed[-1][0] - timed[0][0]) / (len(timed) - 1)
        _, steps, _, lag, _, *parts = (statistics.mean(column) for column in zip(*timed[1:], strict=True))
        differing, largest = sum(row[2] for row in rows), max(row[4] for row in rows)
        print(seconds, steps, differing, lag, largest, *parts, file=answer, flush=True)


def bench_async(
    *,
    model: Path | None,
    updates: int,
    rounds: int,
    modes: tuple[str, ...],
    audit_share: float,
    sigma: float,
    longest: int,
) -> dict[str, Any]:
    """Updates per second of the loops, each in a process of its own, measured by turns after a round 0.

    All sample on real vLLM with rz's aligned model; 64 responses an update of lognormal length (mean 40 before the
    longest are cut), 64 slots, the same model, batch and number of cores, and for the asynchronous loops max_lag 64.
    Start-up and the tail of each round are not timed.

    Args:
        model: checkpoint folder; None: a random Qwen3 of 2 layers x 128.
        updates: of each round.
        sigma: of the logarithm of the lengths.  longest: tokens.
    Returns: ratio (best asynchronous mode / sync, of the medians of updates per second), best, and for each mode the
        median, lowest and highest updates per second, engine steps an update, mean and largest lag, and seconds of
        its parts.
    Raises: ValueError if no update of a round could be timed; RuntimeError if this machine is not aligned, or with a
        worker's last words if one dies.
    """
    if updates < (least := 2 * SETTLE + longest // DRAIN_TOKENS + 2):
        raise ValueError(f"updates must be >= {least} for responses of up to {longest} tokens, got {updates}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = model or Path(scratch) / "model"
        if model is None:
            make_tiny(folder, vocab_size=VOCABULARY, layers=2, hidden_size=128, heads=4, kv_heads=2, head_dim=32)
        require_aligned_model(load_config(folder), config_of(folder, longest, {}).torch_dtype)
        facts = (updates, audit_share, sigma, longest)
        workers = {mode: start_worker(folder, *facts, MODES[mode]) for mode in modes}
        seconds: dict[str, list[list[float]]] = {mode: [] for mode in modes}
        try:
            for number in range(rounds + 1):
                for mode, worker in workers.items():
                    values = [float(value) for value in worker.ask(number).split()]
                    print(
                        f"round {number} of {rounds}: {mode} {values[0]:.3f} s an update", file=sys.stderr, flush=True
                    )
                    if number:
                        seconds[mode].append(values)
        finally:
            for worker in workers.values():
                worker.close()
    result: dict[str, Any] = {}
    for mode, rows in seconds.items():
        speeds = [1 / row[0] for row in rows]
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        result |= {
            f"{mode}_updates_per_second": statistics.median(speeds),
            f"{mode}_min": min(speeds),
            f"{mode}_max": max(speeds),
            f"{mode}_engine_steps": middle[1],
            f"{mode}_differing": sum(row[2] for row in rows),
            f"{mode}_lag_mean": middle[3],
            f"{mode}_lag_max": max(row[4] for row in rows),
            **{f"{mode}_{part}_s": value for part, value in zip(PARTS, middle[5:], strict=True)},
        }
    speed = {mode: result[f"{mode}_updates_per_second"] for mode in modes}
    best = max((mode for mode in modes if mode != "sync"), key=speed.get)
    return {
        "ratio": speed[best] / speed["sync"],
        "best": best,
        **result,
        "updates": updates,
        "rounds": rounds,
        "sigma": sigma,
        "longest": longest,
    }


def start_worker(
    folder: Path, updates: int, audit_share: float, sigma: float, longest: int, settings: Mapping[str, Any]
) -> Worker:
    """Where rollout and learner run side by side, each has a thread; where they take turns, each has all."""
    threads = 1 if settings.get("overlap_steps") else torch.get_num_threads()
    arguments = map(str, (folder, updates, threads, audit_share, sigma, longest))
    return Worker("rz.bench.asynchronous", *arguments, settings=settings, threads=threads)
