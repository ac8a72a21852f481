"""The settings of a run: one frozen value, which is also the command line."""

import math
import numbers
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs
import torch

from rz.schedule import Settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LONGEST_S = 1e6  # more is beyond what the clocks of the system take
IRREPRODUCIBLE = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # and the value that is none


def _check_kind(name: str, kind: Any, value: Any) -> None:
    if get_origin(kind) is Literal:
        if not (isinstance(value, str) and value in get_args(kind)):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return
    if get_origin(kind) is types.UnionType:
        if value is None:
            return
        (kind,) = (part for part in get_args(kind) if part is not types.NoneType)
    rule, kinds = {
        int: ("an integer", numbers.Integral),
        float: ("a number", numbers.Real),
        bool: ("true or false", bool),
        str: ("text", str),
        Path: ("a path", (str, Path)),
    }[kind]
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be {rule}, got {value!r}")


@attrs.frozen(kw_only=True)
class TrainConfig:
    """Train a checkpoint by asynchronous REINFORCE Zero.

    Args:
        model: folder of a Hugging Face checkpoint (Qwen3, Llama 3 or Qwen2.5, dense).
        task: arithmetic, reasoning-gym:NAME?KEY=VALUE or jsonl:FILE?verifier=number.
        out: new folder of the run.
        engine: vllm, or plain: torch alone, the same bits, slower.
        device: of the learner and the plain engine: cpu, or cuda (CUDA or ROCm); vLLM has its own.
        dtype: of activations in engine and learner; masters and optimizer are float32.
        updates: optimizer applications.
        group_size: responses to one prompt, at least 2; their mean reward is the baseline.
        groups_per_update: prompts of one update.
        max_lag: no token is trained on at a policy lag above this; 0 is synchronous.
        exact_lag: serve weights exactly this many versions behind, for lag experiments; at most max_lag.
        publish_every: updates between two publishes to the engine, at most max_lag + 1.
        overlap_steps: engine steps that each update runs beside; 0 takes turns.
        engine_process: run the engine in a process of its own, so that it and the update use two cores.
        engine_threads: of that process.
        engine_timeout_s: seconds that a call to that process may take.
        slots: responses that the engine runs at once.
        max_tokens: longest response.
        max_length: longest prompt plus response.
        step_tokens: tokens of one engine step; longer prompts are cut.
        cache_tokens: size of vLLM's cache; without it, enough that nothing is preempted.
        temperature: responses are drawn from softmax(logits / temperature), and trained under the same.
        top_p: must stay 1: the learner cannot reproduce what is left of the distribution.
        top_k: must stay 0 (off), for the same reason.
        min_p: must stay 0 (off), for the same reason.
        repetition_penalty: must stay 1 (off), for the same reason.
        learning_rate: of AdamW.
        weight_decay: of AdamW, decoupled.
        max_grad_norm: the gradient is scaled down to this norm; 0 leaves it.
        microbatch_size: responses of one forward and backward pass; 0 takes all at once.
        nonfinite: what a non-finite ratio does: raise ends the run, drop leaves the response out, count counts it.
        seed: every sample's seed is a hash of it, the prompt and the sample number.
        audit_share: part of the responses that is replayed during the run, token by token.
        save_every: updates between two checkpoints; 0 writes the first and the last only.
        keep: newest checkpoints to hold; 0 holds all.
        eval_every: updates between two evaluations on held-out questions; 0 evaluates before and after only.
        eval_prompts: held-out questions of an evaluation; 0 leaves evaluation out.
        eval_temperature: of evaluation; the default is as good as greedy.
        stop_accuracy: end the run once an evaluation reaches this; 0 never does.
        reward_timeout_s: seconds that an update waits for a reward.
        stall_timeout_s: seconds without an update (or, before the first and after the last one, for the evaluation)
            after which the process shows where each thread is and exits with status 1, whatever hangs; the last
            checkpoint resumes. 0 never does.
        drop_unscored: leave a group out whose reward is late, fails or is no number, instead of ending the run; which
            are late is a matter of time, so such a run need not repeat.
        chat_template: render prompts with the tokenizer's chat template where it has one.
    Raises: ValueError naming the field, the rule and the value.
    """

    model: Path
    task: str
    out: Path
    engine: Literal["vllm", "plain"] = "vllm"
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    updates: int = 100
    group_size: int = 8
    groups_per_update: int = 8
    max_lag: int = 8
    exact_lag: int | None = None
    publish_every: int = 1
    overlap_steps: int = 0
    engine_process: bool = False
    engine_threads: int = 1
    engine_timeout_s: float = 600.0
    slots: int = 64
    max_tokens: int = 64
    max_length: int = 1024
    step_tokens: int = 2048
    cache_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    microbatch_size: int = 0
    nonfinite: Literal["raise", "drop", "count"] = "raise"
    seed: int = 0
    audit_share: float = 0.1
    save_every: int = 50
    keep: int = 3
    eval_every: int = 0
    eval_prompts: int = 128
    eval_temperature: float = 0.001
    stop_accuracy: float = 0.0
    reward_timeout_s: float = 60.0
    stall_timeout_s: float = 3600.0
    drop_unscored: bool = False
    chat_template: bool = True

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):
            _check_kind(field.name, field.type, getattr(self, field.name))
        least = {"updates": 1, "group_size": 2, "groups_per_update": 1, "max_lag": 0, "slots": 1, "max_tokens": 1}
        least |= {"max_length": 2, "step_tokens": 1, "microbatch_size": 0, "save_every": 0, "keep": 0, "seed": 0}
        least |= {"eval_every": 0, "eval_prompts": 0, "publish_every": 1, "overlap_steps": 0, "engine_threads": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"{name} must be >= {value}, got {getattr(self, name)}")
        if self.exact_lag is not None and not 0 <= self.exact_lag <= self.max_lag:
            raise ValueError(f"exact_lag must be in [0, max_lag {self.max_lag}], got {self.exact_lag}")
        _ = self.schedule  # its own rules
        if self.overlap_steps and self.exact_lag is not None:
            raise ValueError(f"overlap_steps must be 0 with exact_lag, got {self.overlap_steps}")
        for name in ("temperature", "learning_rate", "eval_temperature", "reward_timeout_s", "engine_timeout_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf and not (name == "learning_rate" and value == 0):
                raise ValueError(f"{name} must be > 0 and finite, got {value}")
        if self.engine == "vllm" and self.temperature < 0.01:
            raise ValueError(f"temperature must be >= 0.01, which vLLM raises lower ones to, got {self.temperature}")
        for name in ("weight_decay", "max_grad_norm", "stall_timeout_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)}")
        for name in ("reward_timeout_s", "engine_timeout_s", "stall_timeout_s"):
            if getattr(self, name) > LONGEST_S:
                raise ValueError(f"{name} must be <= {LONGEST_S:.0f}, got {getattr(self, name)}")
        for name in ("audit_share", "stop_accuracy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        for name, off in IRREPRODUCIBLE.items():
            if getattr(self, name) != off:
                raise ValueError(
                    f"{name} must be {off}, got {getattr(self, name)}: the learner cannot reproduce the distribution "
                    "that it leaves"
                )
        if self.max_tokens >= self.max_length:
            raise ValueError(f"max_tokens must be < max_length {self.max_length}, got {self.max_tokens}")
        if self.stop_accuracy and not (self.eval_every and self.eval_prompts):
            raise ValueError(f"stop_accuracy must be 0 without evaluations, got {self.stop_accuracy}")

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """The config of a run.json. Raises ValueError if it is none."""
        kinds = {field.name: field.type for field in attrs.fields(cls)}
        if unknown := sorted(values.keys() ^ kinds.keys()):
            raise ValueError(f"run.json must hold the fields of a run, got a difference at {unknown[0]}")
        is_path = lambda name, value: kinds[name] is Path and isinstance(value, str)
        return cls(**{name: Path(value) if is_path(name, value) else value for name, value in values.items()})

    @property
    def schedule(self) -> Settings:
        """How the run is paced."""
        return Settings(
            group_size=self.group_size,
            groups_per_update=self.groups_per_update,
            max_lag=self.max_lag,
            exact_lag=self.exact_lag,
            publish_every=self.publish_every,
            slots=self.slots,
            updates=self.updates,
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype as torch names it."""
        return DTYPES[self.dtype]
