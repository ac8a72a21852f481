"""Speed and memory of learning: rz's forward and backward and those of transformers, by turns in one run."""

import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rz.batch import TrainBatch
from rz.bench.worker import Worker
from rz.config import DTYPES
from rz.heap import keep_freed_memory
from rz.models.hf import load_config, load_params
from rz.models.make import make_tiny
from rz.models.policy import response_logprobs
from rz.steps import reinforce_zero_loss

MODELS: dict[str, dict[str, int]] = {
    "2x128": dict(layers=2, hidden_size=128, heads=4, kv_heads=2, head_dim=32, intermediate_size=512, vocab_size=512),
    "8x768": dict(
        layers=8, hidden_size=768, heads=12, kv_heads=4, head_dim=64, intermediate_size=3072, vocab_size=8192
    ),
}
DEFAULT_DTYPES = {"2x128": "float32", "8x768": "bfloat16"}
BOUND = {"OMP_PROC_BIND": "true"}  # else where the threads happen to run moves a whole process by up to 17%
SHORTEST = 0.3  # seconds of a measurement: small passes are repeated


def whole_sequences(number: int, *, sequences: int, length: int, vocabulary: int) -> TrainBatch:
    """Random sequences of equal length; all tokens but the first of each are trained on."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(vocabulary, (sequences, length), generator=generator)
    rest = tokens[:, 1:]
    return TrainBatch(
        prompt_ids=tokens[:, :1],
        prompt_lengths=torch.ones(sequences, dtype=torch.int64),
        response_ids=rest,
        mask=torch.ones(rest.shape, dtype=torch.bool),
        behaviour_logprobs=torch.full(rest.shape, -math.log(vocabulary)),
        policy_versions=torch.zeros(rest.shape, dtype=torch.int64),
        rewards=torch.randn(sequences, generator=generator),
        group_ids=torch.arange(sequences),
        temperature=1.0,
    )


def _loss(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    weights = torch.ones_like(logprobs)
    return reinforce_zero_loss(
        logprobs, batch, advantages=batch.rewards, weights=weights, denominator=len(batch.rewards)
    )


def _rz(folder: Path, dtype: torch.dtype) -> Callable[[TrainBatch], float]:
    """What an update runs, casts of the float32 masters included, with the heap as a run sets it."""
    keep_freed_memory()
    config = load_config(folder)
    params = load_params(folder, config)

    def step(batch: TrainBatch) -> float:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        loss = _loss(response_logprobs(leaves, config, batch, dtype=dtype), batch)
        loss.backward(inputs=list(leaves.values()))
        return float(loss.detach())

    return step


def _transformers(folder: Path, dtype: torch.dtype) -> Callable[[TrainBatch], float]:
    """Qwen3 of transformers in dtype throughout, with SDPA; a batch without padding, no cache, whole logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")

    def step(batch: TrainBatch) -> float:
        model.zero_grad(set_to_none=True)
        tokens = torch.cat((batch.prompt_ids, batch.response_ids), 1)
        logits = model(tokens, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), -1).gather(2, batch.response_ids[..., None])[..., 0]
        loss = _loss(logprobs, batch)
        loss.backward()
        return float(loss.detach())

    return step


LEARNERS = {"rz": _rz, "transformers": _transformers}


def _memory(field: str) -> float:
    """VmRSS or VmHWM (its peak) of this process, in MB."""
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))[1]) / 1024


def work(kind: str, folder: str, dtype: str, sequences: str, length: str) -> None:
    """A worker process: for each round number on standard input, one line with the seconds of a pass, its seconds of
    processor time, its loss, and the peak memory in MB so far above what was held before the first pass."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    step = LEARNERS[kind](Path(folder), DTYPES[dtype])
    vocabulary = load_config(Path(folder)).vocab_size
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    held, repeats = _memory("VmRSS"), 1
    for line in sys.stdin:
        batch = whole_sequences(int(line), sequences=int(sequences), length=int(length), vocabulary=vocabulary)
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            loss = step(batch)
        seconds = (time.perf_counter() - began) / repeats
        cpu_seconds = (time.process_time() - cpu_began) / repeats
        print(seconds, cpu_seconds, loss, _memory("VmHWM") - held, file=answer, flush=True)
        if int(line) == 1:
            repeats = max(1, math.ceil(SHORTEST / seconds))


def _case(folder: Path, dtype: str, sequences: int, length: int, rounds: int) -> dict[str, Any]:
    workers = {
        kind: Worker("rz.bench.learner", kind, str(folder), dtype, str(sequences), str(length), environment=BOUND)
        for kind in LEARNERS
    }
    seconds, cpu_seconds = ({kind: [] for kind in LEARNERS} for _ in range(2))
    losses, memory = {}, {}
    try:
        for number in range(rounds + 2):  # 0 and 1 are warm-up
            for kind in LEARNERS if number % 2 else reversed(LEARNERS):
                taken, busy, losses[kind], memory[kind] = map(float, workers[kind].ask(number).split())
                if number > 1:
                    seconds[kind].append(taken)
                    cpu_seconds[kind].append(busy)
            if abs(losses["rz"] - losses["transformers"]) > 0.02:
                raise RuntimeError(f"losses of both must agree in round {number}, got {losses}")
    finally:
        for worker in workers.values():
            worker.close()
    medians, cpu = (
        {kind: statistics.median(values) for kind, values in times.items()} for times in (seconds, cpu_seconds)
    )
    return {
        "ratio": medians["rz"] / medians["transformers"],
        "cpu_ratio": cpu["rz"] / cpu["transformers"],
        "memory_ratio": memory["rz"] / memory["transformers"],
        **{f"{kind}_seconds": value for kind, value in medians.items()},
        **{f"{kind}_cpu_seconds": value for kind, value in cpu.items()},
        **{f"{kind}_{name.__name__}": name(values) for kind, values in seconds.items() for name in (min, max)},
        **{f"{kind}_peak_mb": value for kind, value in memory.items()},
    }


def bench_learner(
    *, models: Sequence[str], lengths: Sequence[int], dtype: str | None, tokens: int, rounds: int
) -> dict[str, Any]:
    """One case for each model and length, each learner in a process of its own, measured by turns after a warm-up.
    Each thread of both keeps to a processor. Progress goes to standard error.

    Args:
        models: names in MODELS.
        lengths: tokens of a sequence, >= 2.
        dtype: "float32" or "bfloat16"; None: DEFAULT_DTYPES.
        tokens: of a pass, >= the longest length; tokens // length sequences of equal length make one.
        rounds: >= 1.
    Returns: cases, each with ratio (seconds of a pass of rz / transformers, medians over rounds), cpu_ratio (of
        processor time, which other work on the machine disturbs less), memory_ratio of the peaks above what each held
        before its first pass, and what they are made of; and threads.
    Raises: ValueError for a number out of range; RuntimeError if a worker dies, or their losses disagree.
    """
    if not lengths or min(lengths) < 2:
        raise ValueError(f"lengths must be at least one, each >= 2, got {list(lengths)}")
    if tokens < max(lengths):
        raise ValueError(f"tokens must be >= the longest of lengths {max(lengths)}, got {tokens}")
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    cases = []
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            make_tiny(folder, **MODELS[model])
            for length in lengths:
                kind, sequences = dtype or DEFAULT_DTYPES[model], tokens // length
                facts = {"model": model, "dtype": kind, "sequences": sequences, "length": length}
                cases.append(facts | _case(Path(folder), kind, sequences, length, rounds))
                print(f"{model} {kind} {sequences} x {length}: {cases[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    return {"cases": cases, "rounds": rounds, "threads": torch.get_num_threads()}
