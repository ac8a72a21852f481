"""Speed of rollouts: rz's model and stock vLLM on the same checkpoint, by turns in one run."""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rz.batch import Request
from rz.bench.worker import Worker
from rz.config import DTYPES
from rz.models.hf import load_config, load_params


def prompts(round_number: int, *, sequences: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """The random prompts of a round: new in each, so that no prefix is cached."""
    generator = torch.Generator().manual_seed(round_number)
    return torch.randint(vocabulary, (sequences, tokens), generator=generator).tolist()


def _rz(folder: Path, dtype: str, sequences: int, length: int, response_tokens: int) -> Callable[[list], None]:
    from rz.engine.vllm import VllmEngine

    config = load_config(folder)
    params = load_params(folder, config)
    engine = VllmEngine(folder, config, params, dtype=DTYPES[dtype], slots=sequences, max_length=length)

    def rollouts(batch: list[list[int]]) -> None:
        for index, prompt in enumerate(batch):
            engine.submit(
                Request(prompt_index=index, sample=0, prompt_ids=prompt, seed=index, max_tokens=response_tokens)
            )
        done = 0
        while done < len(batch):
            done += len(engine.step())

    return rollouts


def _stock(folder: Path, dtype: str, sequences: int, length: int, response_tokens: int) -> Callable[[list], None]:
    """vLLM's own model, attention, sampler and compilation; asked for the sampled token's logprob, as RL needs it."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=length,
        max_num_seqs=sequences,
        kv_cache_memory_bytes=1 << 30,
    )
    sampling = SamplingParams(
        max_tokens=response_tokens, temperature=1.0, logprobs=0, detokenize=False, ignore_eos=True
    )

    def rollouts(batch: list[list[int]]) -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in batch], sampling, use_tqdm=False)

    return rollouts


ENGINES = {"rz": _rz, "stock": _stock}


def work(kind: str, folder: str, dtype: str, sequences: str, prompt_tokens: str, response_tokens: str) -> None:
    """A worker process: for each round number on standard input, one line with the seconds that the round took."""
    count, prompt_length, response_length = int(sequences), int(prompt_tokens), int(response_tokens)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to standard error
    rollouts = ENGINES[kind](Path(folder), dtype, count, prompt_length + response_length, response_length)
    vocabulary = load_config(Path(folder)).vocab_size
    for line in sys.stdin:
        batch = prompts(int(line), sequences=count, tokens=prompt_length, vocabulary=vocabulary)
        began = time.perf_counter()
        rollouts(batch)
        print(time.perf_counter() - began, file=answer, flush=True)


def bench_rollout(
    folder: Path, *, dtype: str, sequences: int, prompt_tokens: int, response_tokens: int, rounds: int
) -> dict[str, Any]:
    """Tokens per second of both, each in a process of its own, measured by turns after round 0, a warm-up
    (stock vLLM compiles in it, which can take minutes). Progress goes to standard error.

    Returns: ratio (rz / stock, of the medians), and for each the median, lowest and highest tokens per second.
    Raises: ValueError if the checkpoint or a number is bad; RuntimeError with the worker's last words if one dies.
    """
    for name, value in (("sequences", sequences), ("prompt_tokens", prompt_tokens), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    if response_tokens < 1:
        raise ValueError(f"response_tokens must be >= 1, got {response_tokens}")
    config = load_config(folder)
    if prompt_tokens + response_tokens > config.max_positions:
        raise ValueError(
            f"prompt_tokens + response_tokens must be <= max_positions {config.max_positions}, "
            f"got {prompt_tokens + response_tokens}"
        )
    arguments = [str(folder), dtype, str(sequences), str(prompt_tokens), str(response_tokens)]
    workers = {kind: Worker("rz.bench.rollout", kind, *arguments) for kind in ENGINES}
    speeds: dict[str, list[float]] = {kind: [] for kind in ENGINES}
    try:
        for number in range(rounds + 1):
            for kind, worker in workers.items():
                seconds = float(worker.ask(number))
                print(f"round {number} of {rounds}: {kind} {seconds:.2f} s", file=sys.stderr, flush=True)
                if number:
                    speeds[kind].append(sequences * response_tokens / seconds)
    finally:
        for worker in workers.values():
            worker.close()
    medians = {kind: statistics.median(values) for kind, values in speeds.items()}
    facts = {"dtype": dtype, "sequences": sequences, "prompt_tokens": prompt_tokens}
    facts |= {"response_tokens": response_tokens, "rounds": rounds}
    spread = {f"{kind}_{name.__name__}": name(values) for kind, values in speeds.items() for name in (min, max)}
    return {
        "ratio": medians["rz"] / medians["stock"],
        "rz_tokens_per_second": medians["rz"],
        "stock_tokens_per_second": medians["stock"],
        **spread,
        **facts,
    }
