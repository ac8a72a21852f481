"""What a run needs before it begins: an engine, shapes to probe, a task that fits, settings that may not change."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import torch

from rz.config import TrainConfig
from rz.engine.interface import Engine
from rz.engine.plain import PlainEngine
from rz.models.compute import has_narrow_products
from rz.models.dense import DenseConfig
from rz.ops.probe import ProbeResult, require_aligned
from rz.snapshot import Snapshot
from rz.tasks import Task
from rz.verify.alignment import require_device_aligned

FREE = ("model", "out", "updates", "keep", "save_every", "engine_process", "engine_threads")


def _engine(config: TrainConfig, model: DenseConfig, params: Mapping[str, torch.Tensor], version: int) -> Engine:
    settings = {
        "dtype": config.torch_dtype,
        "slots": config.slots,
        "max_length": config.max_length,
        "step_tokens": config.step_tokens,
        "version": version,
    }
    if config.engine == "plain":
        return PlainEngine(model, params, **settings)
    from rz.engine.vllm import VllmEngine

    return VllmEngine(config.model, model, params, cache_tokens=config.cache_tokens, **settings)


def open_engine(config: TrainConfig, model: DenseConfig, start: Snapshot) -> Engine:
    """The engine that config names, serving what the run goes on from."""
    params, version = start.history[0], start.plan.served
    if not config.engine_process:
        return _engine(config, model, params, version)
    from rz.engine.process import ProcessEngine

    make = partial(_engine, config, model)
    return ProcessEngine(make, params, version=version, threads=config.engine_threads, limit_s=config.engine_timeout_s)


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


def require_aligned_model(model: DenseConfig, dtype: torch.dtype, device: str = "cpu") -> tuple[ProbeResult, ...]:
    """What was probed of this machine for a model; RuntimeError if it lacks a property that the ops rely on."""
    if device == "cpu":
        return require_aligned(dtype, product_shapes(model), **probe_settings(model, dtype))
    heads = (model.heads, model.kv_heads, model.head_dim)
    return require_device_aligned(dtype, product_shapes(model), heads, torch.device(device))


def check_task(config: TrainConfig, model: DenseConfig, task: Task, held_out: Task | None) -> None:
    """Raises ValueError if the first prompts of a task do not fit the model or the settings."""
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


def fixed_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that change what a run computes."""
    values = attrs.asdict(config).items()
    return {name: value for name, value in values if name not in FREE and not name.endswith("_timeout_s")}


def check_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first setting that is not as the run began with."""
    for name, value in now.items():
        if name in before and before[name] != value:
            raise ValueError(f"{name} of run.json must be as the run began with ({before[name]}), got {value}")
