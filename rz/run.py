"""A whole run: checkpoint, task, engine, steps, loop and log, put together from a TrainConfig."""

import asyncio
import faulthandler
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from rz import checkpoint, report, schedule
from rz.audit import online_audit
from rz.certificate import certificate, check_certificate
from rz.config import TrainConfig
from rz.engine.interface import Engine
from rz.evaluate import Accuracy, evaluate
from rz.heap import keep_freed_memory
from rz.lock import only_process
from rz.loop import UpdateRecord, train
from rz.models.dense import DenseConfig
from rz.models.hf import load_config, load_params
from rz.models.policy import response_logprobs
from rz.setup import check_settings, check_task, fixed_settings, open_engine, require_aligned_model
from rz.snapshot import Snapshot, placed
from rz.steps import PolicyState, adamw_init, count_nonfinite, drop_nonfinite, require_finite, update
from rz.tasks import Task

CHECKS = {"raise": require_finite, "drop": drop_nonfinite, "count": count_nonfinite}


def run(config: TrainConfig, task: Task, held_out: Task | None) -> dict[str, Any]:
    """Train as config says; write the run folder; return the closing table by row name.

    Ctrl-C, once, ends the run after the turn under way, with a checkpoint; a second time, at once.

    Raises: ValueError for what is wrong with config, checkpoint, task or folder, before anything is written.
        RuntimeError if the machine fails a property that the ops rely on.
    """
    model = load_config(config.model)
    _check_device(config)
    params = {name: value.to(config.device) for name, value in load_params(config.model, model).items()}
    check_task(config, model, task, held_out)
    proof = _proof(config, model)
    folder = report.new_run_folder(config.out)
    with only_process(folder):
        report.new_run_folder(folder)  # still empty: another process may have begun there just now
        start = _beginning(config, params)
        try:
            engine = open_engine(config, model, start)
        except Exception:
            folder.rmdir()
            raise
        with _ending(engine):
            report.write_config(folder, attrs.asdict(config))
            return _train(config, model, task, held_out, engine, start, proof, None)


def _beginning(config: TrainConfig, params: Mapping[str, torch.Tensor]) -> Snapshot:
    state = PolicyState(params=params, optimizer=adamw_init(params), version=0)
    return Snapshot(plan=schedule.start(config.schedule), state=state, history=(params,), responses=())


def resume(
    run: Path, open_tasks: Callable[[TrainConfig], tuple[Task, Task | None]], *, updates: int | None, same_machine: bool
) -> dict[str, Any]:
    """Go on with a run from its newest whole checkpoint, as if it had never been interrupted; as `run` otherwise.

    In the closing table seconds, updates per second and peak memory are of this part of the run, all else of the whole.

    Args:
        run: its folder.
        updates: in all, instead of what the run began with.
        same_machine: refuse a machine, or libraries, other than the certificate's: their bits may be others.
        A run that was killed before it wrote a checkpoint begins anew.
    Raises: as `run`; ValueError if the folder holds no run or no whole checkpoint, is in use by another process, its
        settings are not those that the run began with, or the certificate differs. Nothing is written before.
    """
    with only_process(run):
        return _resume(run, open_tasks, updates=updates, same_machine=same_machine)


def _resume(run: Path, open_tasks: Callable, *, updates: int | None, same_machine: bool) -> dict[str, Any]:
    values = report.read_config(run) | {"out": run} | ({} if updates is None else {"updates": updates})
    config = TrainConfig.from_values(values)
    _check_device(config)
    model = load_config(config.model)
    task, held_out = open_tasks(config)
    check_task(config, model, task, held_out)
    proof = _proof(config, model)
    if not checkpoint.has_begun(run):
        params = {name: value.to(config.device) for name, value in load_params(config.model, model).items()}
        start, saved = _beginning(config, params), None
        report.remove_logs(run)
    else:
        saved = checkpoint.load(run, model, on_damaged=lambda text: print(f"rz: {text}", file=sys.stderr))
        if same_machine:
            check_certificate(saved.certificate, proof)
        check_settings(saved.extra.get("config", {}), fixed_settings(config))
        version = saved.snapshot.state.version
        if config.updates < version:
            raise ValueError(f"updates must be >= the {version} that the run has made, got {config.updates}")
        report.check_logs(run, saved.extra.get("logs"), version)
        start = placed(saved.snapshot, config.device)
    engine = open_engine(config, model, start)
    with _ending(engine):
        if updates is not None:
            report.write_config(run, attrs.asdict(config))
        return _train(config, model, task, held_out, engine, start, proof, saved)


def _check_device(config: TrainConfig) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be one that torch finds, got cuda")


def _proof(config: TrainConfig, model: DenseConfig) -> dict[str, Any]:
    probes = require_aligned_model(model, config.torch_dtype, config.device)
    return certificate(probes, engine=config.engine, dtype=config.dtype)


def _train(config: TrainConfig, *parts: Any) -> dict[str, Any]:
    keep_freed_memory()
    stop = asyncio.Event()
    with _interruptible(stop, config.out):  # the closing too: a second Ctrl-C there is as any other
        return _train_until(stop, config, *parts)


def _train_until(
    stop: asyncio.Event,
    config: TrainConfig,
    model: DenseConfig,
    task: Task,
    held_out: Task | None,
    engine: Engine,
    start: Snapshot,
    proof: Mapping[str, Any],
    saved: checkpoint.Saved | None,
) -> dict[str, Any]:
    folder, first = config.out, start.state.version
    log = report.Log(folder, places=None if saved is None else saved.extra["logs"], version=first)
    totals = report.Totals(report.each_metrics(folder))
    progress = report.Progress(config.updates, done=first, audited=totals.audited, differing=totals.differing)
    latest, due = start.state, False  # due: a checkpoint is, at the next update with a publish
    unused = {  # finished, not consumed by an update yet
        (r.rollout.prompt_index, r.rollout.sample): attrs.evolve(r.rollout, replay_logprobs=None)
        for r in start.responses
        if r.rollout.stop_reason != "running"
    }

    def measure(params) -> Accuracy | None:
        if held_out is None or not config.eval_prompts:
            return None
        return evaluate(
            params,
            model,
            held_out,
            questions=config.eval_prompts,
            temperature=config.eval_temperature,
            max_tokens=config.max_tokens,
            max_length=config.max_length,
            slots=config.slots,
            dtype=config.torch_dtype,
            seed=config.seed,
        )

    def mark() -> dict[str, Any]:
        """What a checkpoint of the moment says of the logs."""
        audited = {"tokens_audited": totals.audited, "tokens_differing": totals.differing}
        return {"version": latest.version, "places": log.places(), "audited": audited}

    def save(snapshot: Snapshot) -> None:
        extra = {"logs": logged["places"], "before": before and attrs.asdict(before), "config": fixed_settings(config)}
        log.sync()
        checkpoint.save(
            folder,
            snapshot,
            model,
            source=config.model,
            keep=config.keep or None,
            extra=extra,
            certificate=proof | logged["audited"],
        )

    def watch() -> None:
        if config.stall_timeout_s:
            faulthandler.dump_traceback_later(config.stall_timeout_s, exit=True, file=sys.__stderr__)

    def on_update(record: UpdateRecord) -> None:
        nonlocal latest, due, logged
        metrics, latest = dict(record.metrics), record.state
        if config.eval_every and record.state.version % config.eval_every == 0 and config.eval_prompts and held_out:
            metrics["accuracy"] = measure(record.state.params).mean
            if config.stop_accuracy and metrics["accuracy"] >= config.stop_accuracy:
                stop.set()
        # At lag 0 the learner's own forward is a replay: its bits must be the engine's.
        metrics["differing_tokens"] += int(metrics["differing_lag_0"])
        metrics["memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        groups = (*record.groups, *record.left_out)
        log.update(metrics, groups)
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            del unused[rollout.prompt_index, rollout.sample]
        progress.update(metrics)
        totals.add(metrics)
        due |= bool(config.save_every) and record.state.version % config.save_every == 0
        if record.snapshot is not None:
            logged = mark()
            if due:
                save(record.snapshot())
                due = False
        watch()

    def on_end(snapshot: Callable[[], Snapshot]) -> None:
        """A checkpoint of the last publish, if it can still be had: an engine that died takes its responses along, and
        an update that failed to be logged would be missing from the log for ever."""
        try:
            last = snapshot()
        except (RuntimeError, OSError):
            return
        if last.state.version == logged["version"] and last.state.version not in checkpoint.kept_versions(folder):
            save(last)

    before = None if saved is None or saved.extra.get("before") is None else Accuracy(**saved.extra["before"])
    logged = mark()  # at the last snapshot
    # Elsewhere the snapshot of the last publish needs the optimizer's old state while an update runs.
    donate = not config.overlap_steps and config.publish_every == 1 and config.schedule.exact_lag is None
    began = time.perf_counter()
    watch()
    try:
        if saved is None:
            before = measure(start.state.params)
            save(start)
        began = time.perf_counter()
        watch()
        asyncio.run(
            train(
                state=start.state,
                engine=engine,
                task=task,
                settings=config.schedule,
                run_seed=config.seed,
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                update=partial(
                    update,
                    logprobs_fn=lambda params, batch: response_logprobs(params, model, batch, dtype=config.torch_dtype),
                    learning_rate=config.learning_rate,
                    weight_decay=config.weight_decay,
                    max_grad_norm=config.max_grad_norm or None,
                    microbatch_size=config.microbatch_size or None,
                    check=CHECKS[config.nonfinite],
                    donate=donate,
                ),
                donates=donate,
                audit=online_audit(model, dtype=config.torch_dtype, share=config.audit_share, run_seed=config.seed),
                on_update=on_update,
                on_response=lambda rollout: unused.__setitem__((rollout.prompt_index, rollout.sample), rollout),
                on_end=on_end,
                stop=stop,
                reward_timeout_s=config.reward_timeout_s,
                drop_unscored=config.drop_unscored,
                overlap_steps=config.overlap_steps,
                resume=start,
            )
        )
    finally:
        seconds = time.perf_counter() - began
        progress.close()
        with closing(log):
            log.unused(unused.values())
    engine.close()  # its memory, before the evaluation
    watch()
    after = measure(latest.params)
    faulthandler.cancel_dump_traceback_later()
    if latest.version:
        report.plot(folder)
    shown = lambda accuracy: f"{accuracy.mean:.3f}  (95% interval {accuracy.low:.3f} to {accuracy.high:.3f})"
    rows = (
        {} if before is None else {"held-out accuracy before": shown(before), "held-out accuracy after": shown(after)}
    )
    return rows | {
        "updates": latest.version,
        "tokens trained on": totals.tokens,
        "lag mean": totals.lag / max(1, totals.tokens),
        "lag max": totals.lag_max,
        "tokens audited": totals.audited,
        "tokens differing": totals.differing,
        "updates per second": (latest.version - first) / seconds,
        "seconds": seconds,
        "peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "run folder": str(folder),
    }


@contextmanager
def _ending(engine: Engine) -> Iterator[None]:
    """Close the engine and watch for stalls no longer, however the block ends."""
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        engine.close()


@contextmanager
def _interruptible(stop: asyncio.Event, folder: Path) -> Iterator[None]:
    """Ctrl-C sets stop; once more, it ends the process at once, wherever it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupted(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        text = "stopping after the turn under way, with a checkpoint; Ctrl-C again stops at once"
        print(f"rz: {text}; `rz resume {folder}` goes on", file=sys.stderr, flush=True)

    old = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
