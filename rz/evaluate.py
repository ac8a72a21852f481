"""Accuracy on held-out questions."""

import asyncio
import contextlib
import inspect
from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from rz.batch import Request
from rz.engine.plain import PlainEngine
from rz.models.dense import DenseConfig
from rz.schedule import sample_seed
from rz.tasks import Task


@attrs.frozen(kw_only=True)
class Accuracy:
    """Mean reward of one response a question, and its 95% confidence interval (Wilson's, for rewards of 0 or 1)."""

    mean: float
    low: float
    high: float
    questions: int
    tokens_mean: float


def _wilson(mean: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (mean * (1 - mean) / n + z * z / (4 * n * n)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(
    params: Mapping[str, Tensor],
    config: DenseConfig,
    task: Task,
    *,
    questions: int,
    temperature: float,
    max_tokens: int,
    max_length: int,
    slots: int,
    dtype: torch.dtype,
    seed: int = 0,
) -> Accuracy:
    """Answer the first `questions` questions of a task once each, with the plain engine (the same bits as vLLM).

    A task that has fewer questions is asked all of them, once.

    Args:
        params: float32 masters.
        temperature: > 0; 0.001 is as good as greedy.
    Raises: ValueError if questions is not >= 1 or a question is too long; what score raises.
    """
    if questions < 1:
        raise ValueError(f"questions must be >= 1, got {questions}")
    if hasattr(task, "__len__"):
        with contextlib.suppress(TypeError):  # a task without a last question
            questions = min(questions, len(task))
    prompts = [task.prompt(index) for index in range(questions)]
    engine = PlainEngine(config, params, dtype=dtype, slots=min(slots, questions), max_length=max_length)
    for prompt in prompts:
        engine.submit(
            Request(
                prompt_index=prompt.index,
                sample=0,
                prompt_ids=prompt.token_ids,
                seed=sample_seed(seed, prompt.index, 0),
                max_tokens=max_tokens,
                temperature=temperature,
                stop_ids=task.stop_ids,
            )
        )
    done = {}
    while len(done) < questions:
        done |= {rollout.prompt_index: rollout for rollout in engine.step()}
    engine.close()
    scores = [task.score(prompt, done[prompt.index].response_ids) for prompt in prompts]
    if inspect.iscoroutinefunction(task.score):
        scores = asyncio.run(_gathered(scores))
    mean = sum(scores) / questions
    low, high = _wilson(min(1.0, max(0.0, mean)), questions)
    tokens = sum(len(rollout.response_ids) for rollout in done.values()) / questions
    return Accuracy(mean=mean, low=low, high=high, questions=questions, tokens_mean=tokens)


async def _gathered(scores):
    return await asyncio.gather(*scores)
