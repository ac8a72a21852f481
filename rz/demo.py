"""The first run: a small model learns addition, first from examples, then asynchronously from rewards on real vLLM."""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from rz import report
from rz.batch import Group, Rollout, TrainBatch, stack
from rz.config import TrainConfig
from rz.evaluate import evaluate
from rz.models.dense import DenseConfig
from rz.models.hf import load_config, load_params, save_checkpoint
from rz.models.make import make_tiny
from rz.models.policy import response_logprobs
from rz.run import run
from rz.steps import PolicyState, adamw_init, supervised_update
from rz.tasks import Arithmetic

DIGITS, LENGTH, TOKENS = 2, 16, 5  # of the operands; longest prompt plus response; longest response
WARM_UP_RATE, WARM_UP_BATCH, WARM_UP_LIMIT = 1e-3, 128, 6000
GREEDY = 0.001  # a temperature


@attrs.frozen(kw_only=True)
class DemoConfig:
    """Warm a small Qwen3 model up on sums, then train it by asynchronous RL on real vLLM.

    Args:
        out: folder of the run.
        engine: vllm, or plain: torch alone.
        dtype: of activations: float32 or bfloat16.
        max_lag: largest policy lag of a token.
        updates: at most; the run ends earlier at the target accuracy.
        target: held-out accuracy at which training ends; 0 makes all updates.
        warm_up: held-out accuracy (greedy, as all here) at which supervised learning ends.
        audit_share: part of the responses that is replayed, token by token.
        learning_rate: of the RL updates.
        seed: of model, questions and samples.
    """

    out: Path = Path("runs/demo")
    engine: Literal["vllm", "plain"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_lag: int = 8
    updates: int = 2000
    target: float = 0.9
    warm_up: float = 0.5
    audit_share: float = 0.2
    learning_rate: float = 5e-5
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.warm_up < 1:
            raise ValueError(f"warm_up must be in [0, 1), got {self.warm_up}")
        self.train_config()

    @property
    def start(self) -> Path:
        """Folder of the warmed-up checkpoint, beside the run."""
        return self.out.with_name(self.out.name + "-start")

    def train_config(self) -> TrainConfig:
        """The settings of the RL run."""
        return TrainConfig(
            model=self.start,
            task="arithmetic",
            out=self.out,
            engine=self.engine,
            dtype=self.dtype,
            updates=self.updates,
            group_size=8,
            groups_per_update=16,
            max_lag=self.max_lag,
            slots=256,
            max_tokens=TOKENS,
            max_length=LENGTH,
            learning_rate=self.learning_rate,
            seed=self.seed,
            audit_share=self.audit_share,
            save_every=max(1, self.updates // 20),
            eval_every=25,
            eval_prompts=512,
            stop_accuracy=self.target,
        )


def examples(task: Arithmetic, start: int, count: int) -> TrainBatch:
    """Questions start to start + count of a task with their right answers, as a batch for supervised_update."""
    groups = []
    for index in range(start, start + count):
        prompt, answer = task.prompt(index), task.solution(index)
        rollout = Rollout(
            prompt_index=index,
            sample=0,
            prompt_ids=prompt.token_ids,
            response_ids=answer,
            behaviour_logprobs=torch.zeros(len(answer)),
            policy_versions=torch.zeros(len(answer), dtype=torch.int64),
            stop_reason="stop",
            seed=0,
            temperature=1.0,
        )
        groups.append(Group(prompt=prompt, rollouts=(rollout,), rewards=(1.0,)))
    return stack(groups)


def warm_up(
    params: dict[str, torch.Tensor],
    model: DenseConfig,
    *,
    accuracy: float,
    seed: int,
    digits: int = DIGITS,
    show: Callable[[int, float, float], None] = lambda step, loss, accuracy: None,
) -> tuple[dict[str, torch.Tensor], float]:
    """Supervised learning of sums until `accuracy` of held-out questions are answered right (greedily).

    Returns: (parameters, accuracy reached on held-out questions).
    Raises: RuntimeError if that takes more than WARM_UP_LIMIT steps.
    """
    task = Arithmetic(digits=digits, seed=seed + 1)
    held_out = Arithmetic(digits=digits, seed=seed + 1, split="held_out")
    state = PolicyState(params=params, optimizer=adamw_init(params), version=0)
    loss = math.nan
    for step in range(WARM_UP_LIMIT):
        if step % 20 == 0:
            reached = evaluate(
                state.params, model, held_out, questions=256, temperature=GREEDY, max_tokens=TOKENS, max_length=LENGTH,
                slots=256, dtype=torch.float32, seed=seed,
            ).mean  # fmt: skip
            show(step, loss, reached)
            if reached >= accuracy:
                return state.params, reached
        rate = WARM_UP_RATE * min(1.0, (step + 1) / 100)
        logprobs_fn = partial(_logprobs, model=model)
        batch = examples(task, step * WARM_UP_BATCH, WARM_UP_BATCH)
        state, metrics = supervised_update(
            state, batch, logprobs_fn=logprobs_fn, learning_rate=rate, max_grad_norm=1.0, weight_decay=0.01
        )
        loss = metrics["loss"]
    raise RuntimeError(f"warm_up must reach {accuracy} within {WARM_UP_LIMIT} steps, got {reached}")


def _logprobs(params, batch: TrainBatch, *, model: DenseConfig) -> torch.Tensor:
    return response_logprobs(params, model, batch, dtype=torch.float32)


def demo(config: DemoConfig) -> dict[str, Any]:
    """Make the checkpoint, warm it up, train it; returns the closing table of rz.run.run.

    The run is written to out, the warmed-up checkpoint beside it (out-start), so that `rz train` can start from it too.
    """
    start = report.new_run_folder(config.start)
    report.new_run_folder(config.out)
    began = time.perf_counter()
    make_tiny(
        start, family="qwen3", layers=4, hidden_size=128, heads=4, kv_heads=2, head_dim=32, intermediate_size=512,
        vocab_size=len(Arithmetic.tokenizer), tied=True, max_positions=64, seed=config.seed,
    )  # fmt: skip
    model = load_config(start)
    params = load_params(start, model)
    print(f"A Qwen3 model of {sum(value.numel() for value in params.values()):,} parameters learns two-digit sums.")

    def show(step: int, loss: float, reached: float) -> None:
        known = f"loss {loss:.3f}  " if step else ""
        print(f"warm-up step {step}  {known}right {reached:.3f}", flush=True)

    params, _ = warm_up(params, model, accuracy=config.warm_up, seed=config.seed, show=show)
    save_checkpoint(start, params, model, source=start)
    warm = time.perf_counter() - began
    print(f"Warm-up took {warm:.0f} s. Now asynchronous RL, max_lag {config.max_lag}, on {config.engine}.", flush=True)
    train = config.train_config()
    held_out = Arithmetic(digits=DIGITS, seed=config.seed, split="held_out")
    rows = run(train, Arithmetic(digits=DIGITS, seed=config.seed), held_out)
    return rows | {"warm-up seconds": warm, "seconds in all": time.perf_counter() - began}
