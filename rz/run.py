"""A whole run: checkpoint, task, engine, steps, loop and log, put together from a TrainConfig."""

import asyncio
import resource
import signal
import time
from functools import partial
from typing import Any

import attrs
import torch

from rz import checkpoint, report
from rz.audit import online_audit
from rz.batch import Rollout
from rz.config import TrainConfig
from rz.device_alignment import require_device_aligned
from rz.engine.interface import Engine
from rz.engine.plain import PlainEngine
from rz.evaluate import Accuracy, evaluate
from rz.loop import UpdateRecord, train
from rz.models.compute import has_narrow_products
from rz.models.dense import DenseConfig
from rz.models.hf import load_config, load_params
from rz.models.policy import response_logprobs
from rz.ops.probe import require_aligned
from rz.schedule import Settings
from rz.steps import PolicyState, adamw_init, count_nonfinite, drop_nonfinite, require_finite, update
from rz.tasks import Task

CHECKS = {"raise": require_finite, "drop": drop_nonfinite, "count": count_nonfinite}


def open_engine(config: TrainConfig, model: DenseConfig, state: PolicyState) -> Engine:
    """The engine that config names, serving the version of state."""
    settings = {
        "dtype": config.torch_dtype,
        "slots": config.slots,
        "max_length": config.max_length,
        "step_tokens": config.step_tokens,
        "version": state.version,
    }
    if config.engine == "plain":
        return PlainEngine(model, state.params, **settings)
    from rz.engine.vllm import VllmEngine

    return VllmEngine(config.model, model, state.params, cache_tokens=config.cache_tokens, **settings)


def product_shapes(model: DenseConfig) -> list[tuple[int, int]]:
    """(inputs, outputs) of every matrix product of a model."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return [
        (model.hidden_size, queries + 2 * keys),
        (queries, model.hidden_size),
        (model.hidden_size, 2 * model.intermediate_size),
        (model.intermediate_size, model.hidden_size),
        (model.hidden_size, model.vocab_size),
    ]


def probe_settings(model: DenseConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What rz.ops.probe needs to know of a model beside its product_shapes."""
    return {
        "attention": (model.heads, model.kv_heads, model.head_dim),
        "weight_dtype": dtype if has_narrow_products(dtype) else torch.float32,
    }


def run(config: TrainConfig, task: Task, held_out: Task | None) -> dict[str, Any]:
    """Train as config says; write the run folder; return the closing table by row name.

    Ctrl-C, once, ends the run after the turn under way, with a checkpoint of the weights it had by then.

    Raises: ValueError for what is wrong with config, checkpoint, task or folder, before anything is written.
        RuntimeError if the machine fails a property that the ops rely on.
    """
    model = load_config(config.model)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be one that torch finds, got cuda")
    state_params = {name: value.to(config.device) for name, value in load_params(config.model, model).items()}
    for prompt in (task.prompt(0), *([held_out.prompt(0)] if held_out else ())):
        if (highest := max(*prompt.token_ids, *task.stop_ids)) >= model.vocab_size:
            raise ValueError(
                f"token ids of the task must be < the model's vocab_size {model.vocab_size}, got {highest}"
            )
        if (length := len(prompt.token_ids)) + config.max_tokens > config.max_length:
            raise ValueError(
                f"max_length must be >= the tokens of the task's prompt {prompt.index} ({length}) + max_tokens "
                f"({config.max_tokens}), got {config.max_length}"
            )
    if config.device == "cpu":
        require_aligned(config.torch_dtype, product_shapes(model), **probe_settings(model, config.torch_dtype))
    else:
        heads = (model.heads, model.kv_heads, model.head_dim)
        require_device_aligned(config.torch_dtype, product_shapes(model), heads, torch.device(config.device))
    folder = report.new_run_folder(config.out)
    state = PolicyState(params=state_params, optimizer=adamw_init(state_params), version=0)
    try:
        engine = open_engine(config, model, state)
    except Exception:
        folder.rmdir()
        raise
    report.write_config(folder, attrs.asdict(config))
    log, progress = report.Log(folder), report.Progress(config.updates)
    totals = {"tokens": 0, "lag": 0.0, "lag_max": 0, "audited": 0, "differing": 0}
    stop, latest, held = asyncio.Event(), [state], []
    unused: dict[tuple[int, int], Rollout] = {}  # finished, not consumed by an update yet
    began = time.perf_counter()

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

    def save(state: PolicyState) -> None:
        checkpoint.save_version(
            folder, state.version, state.params, model, source=config.model, keep=config.keep or None
        )

    def on_update(record: UpdateRecord) -> None:
        metrics, latest[0] = dict(record.metrics), record.state
        if config.eval_every and record.state.version % config.eval_every == 0 and config.eval_prompts and held_out:
            held.append(measure(record.state.params))
            metrics["accuracy"] = held[-1].mean
            if config.stop_accuracy and held[-1].mean >= config.stop_accuracy:
                stop.set()
        # At lag 0 the learner's own forward is a replay: its bits must be the engine's.
        metrics["differing_tokens"] += int(metrics["differing_lag_0"])
        metrics["memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        log.update(metrics, record.groups)
        for rollout in (rollout for group in record.groups for rollout in group.rollouts):
            del unused[rollout.prompt_index, rollout.sample]
        progress.update(metrics)
        totals["tokens"] += metrics["tokens"]
        totals["lag"] += metrics["lag_mean"] * metrics["tokens"]
        totals["lag_max"] = max(totals["lag_max"], metrics["lag_max"])
        totals["audited"] += metrics["audited_tokens"]
        totals["differing"] += metrics["differing_tokens"]
        if config.save_every and record.state.version % config.save_every == 0:
            save(record.state)

    try:
        save(state)
        before = measure(state.params)
        began = time.perf_counter()
        asyncio.run(
            _interruptible(
                stop,
                state=state,
                engine=engine,
                task=task,
                settings=Settings(
                    group_size=config.group_size,
                    groups_per_update=config.groups_per_update,
                    max_lag=config.max_lag,
                    exact_lag=config.exact_lag,
                    slots=config.slots,
                    updates=config.updates,
                ),
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
                ),
                audit=online_audit(
                    model,
                    dtype=config.torch_dtype,
                    share=config.audit_share,
                    run_seed=config.seed,
                    version=lambda: engine.version,
                ),
                on_update=on_update,
                on_response=lambda rollout: unused.__setitem__((rollout.prompt_index, rollout.sample), rollout),
                reward_timeout_s=config.reward_timeout_s,
            )
        )
    finally:
        seconds = time.perf_counter() - began
        try:
            progress.close()
            log.unused(unused.values())
            log.close()
            if checkpoint.kept_versions(folder).get(latest[0].version) is None:
                save(latest[0])
        finally:
            engine.close()
    updates = latest[0].version
    after = measure(latest[0].params)
    if updates:
        report.plot(folder)
    shown = lambda accuracy: f"{accuracy.mean:.3f}  (95% interval {accuracy.low:.3f} to {accuracy.high:.3f})"
    rows = (
        {} if before is None else {"held-out accuracy before": shown(before), "held-out accuracy after": shown(after)}
    )
    return rows | {
        "updates": updates,
        "tokens trained on": totals["tokens"],
        "lag mean": totals["lag"] / max(1, totals["tokens"]),
        "lag max": totals["lag_max"],
        "tokens audited": totals["audited"],
        "tokens differing": totals["differing"],
        "updates per second": updates / seconds,
        "seconds": seconds,
        "peak memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "run folder": str(folder),
    }


async def _interruptible(stop: asyncio.Event, **arguments: Any) -> PolicyState:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        return await train(stop=stop, **arguments)
    finally:
        loop.remove_signal_handler(signal.SIGINT)
