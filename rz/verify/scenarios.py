"""Ways of sampling on real vLLM, each followed by a replay of every token, and two controls that must differ."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from rz.audit import AuditResult, replay
from rz.batch import Request, Rollout

TEMPERATURES = (0.6, 1.0)  # by turns, so mixed in every batch


@attrs.frozen(kw_only=True)
class Scenario:
    """One way of sampling.

    Args:
        batch: responses in flight at once.
        prompts, responses: (least, most) tokens.  long: (prompt, response) tokens of the first responses, as they are.
        shared: tokens that all prompts begin with, before those of `prompts`.
        share: of the tokens to be sampled.
        publish_every: engine steps between two publishes, or None.
        shows: fact of the result and the least it must be, or the scenario did not do what it is for.
    """

    name: str
    batch: int
    prompts: tuple[int, int]
    responses: tuple[int, int]
    long: tuple[tuple[int, int], ...] = ()
    shared: int = 0
    share: float = 0.0
    publish_every: int | None = None
    shows: Mapping[str, int] = attrs.field(factory=dict)


LONG = ((1, 1100), (2000, 1050), (1999, 40), (1, 1), (640, 1040), (1153, 129))
ROOMY = (
    Scenario(name="one at a time", batch=1, prompts=(1, 40), responses=(20, 60), share=0.01),
    Scenario(name="batches of 64", batch=64, prompts=(1, 120), responses=(40, 200), share=0.43, shows={"batch": 64}),
    Scenario(name="long", batch=6, prompts=(1, 1), responses=(1, 1), long=LONG,
             shows={"longest_prompt": 2000, "longest_response": 1001}),
    Scenario(name="shared prefix", batch=32, prompts=(1, 60), responses=(10, 60), shared=300, share=0.12,
             shows={"cached_tokens": 256}),
    Scenario(name="publishes", batch=48, prompts=(1, 100), responses=(60, 200), share=0.2, publish_every=40,
             shows={"versions": 3, "across_versions": 1}),
)  # fmt: skip
CUT = (
    Scenario(name="small chunks", batch=9, prompts=(1, 700), responses=(20, 80), share=0.08, shows={"cut_prompts": 1}),
)
SMALL = (
    Scenario(name="preempted", batch=24, prompts=(1, 200), responses=(60, 300), share=0.11,
             shows={"preemptions": 1, "cut_prompts": 1}),
    Scenario(name="preempted, with publishes", batch=24, prompts=(1, 200), responses=(60, 300), share=0.05,
             publish_every=60, shows={"preemptions": 1, "versions": 2, "across_versions": 1}),
)  # fmt: skip


CONTROL = Scenario(name="control", batch=16, prompts=(1, 60), responses=(20, 60), share=1.0)


def engines(turn: int) -> list[tuple[dict[str, Any], tuple[Scenario, ...]]]:
    """(settings of an engine, the scenarios that it runs); chunk budgets and block sizes differ from turn to turn."""
    roomy = {"slots": 64, "max_length": 3200, "step_tokens": (2048, 1023, 777, 512)[turn % 4], "cache_tokens": 24576}
    cut = {"slots": 9, "max_length": 800, "step_tokens": (37, 16, 61, 113)[turn % 4], "block_size": (128, 32)[turn % 2]}
    small = {"slots": 24, "max_length": 512, "step_tokens": (129, 251, 97, 300)[turn % 4], "cache_tokens": 1536}
    return [(roomy, ROOMY), (cut, CUT), (small, SMALL)]


def requests(scenario: Scenario, *, tokens: int, vocab_size: int, seed: int) -> Iterator[Request]:
    """The long ones of a scenario, then as many as are needed for `tokens` sampled tokens, at least `batch`."""
    rng = torch.Generator().manual_seed(seed)
    integer = lambda least, most: int(torch.randint(least, most + 1, (), generator=rng))
    draw = lambda length: torch.randint(0, vocab_size, (length,), generator=rng).tolist()
    shared, index = draw(scenario.shared), 0
    while index < len(scenario.long) or scenario.share and (tokens > 0 or index < scenario.batch):
        if index < len(scenario.long):
            prompt, response = scenario.long[index]
        else:
            prompt, response = integer(*scenario.prompts), integer(*scenario.responses)
        yield Request(
            prompt_index=index,
            sample=0,
            prompt_ids=shared + draw(prompt),
            seed=integer(0, 2**62),
            max_tokens=response,
            temperature=TEMPERATURES[index % 2],
        )
        tokens, index = tokens - response, index + 1


def weights_of(params: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """The weights of a version: params for 0; otherwise every weight moved by about 2%, a function of the version."""
    if version == 0:
        return dict(params)
    rng = torch.Generator().manual_seed(version)
    return {name: value * (1 + 0.02 * torch.randn(value.shape, generator=rng)) for name, value in params.items()}


def sample(
    engine: Any, params: Mapping[str, Tensor], wanted: Sequence[Request], *, batch: int, publish_every: int | None
) -> tuple[list[Rollout], dict[str, int]]:
    """Run requests to their end on a VllmEngine, at most `batch` in flight; (responses, what vLLM did with them).

    The weights published are those of weights_of, under the next versions of the engine.
    """
    queue, flying, done, steps = list(reversed(wanted)), 0, [], 0
    preempted: dict[str, int] = {}
    cut: set[str] = set()
    most = forced = 0
    cached = engine.cached_tokens

    def look() -> None:
        for name, request in engine.scheduler.requests.items():
            preempted[name] = request.num_preemptions
            if 0 < request.num_computed_tokens < request.num_prompt_tokens:
                cut.add(name)

    while queue or flying:
        while queue and flying < batch:
            engine.submit(queue.pop())
            flying += 1
        finished = engine.step()
        steps, flying, done = steps + 1, flying - len(finished), done + finished
        most = max(most, len(engine.scheduler.running) + len(finished))
        look()
        if publish_every and steps % publish_every == 0:
            forced += len(engine.scheduler.running)
            engine.publish(weights_of(params, engine.version + 1), engine.version + 1)
            look()
    return done, {
        "batch": most,
        "cut_prompts": len(cut),
        "preemptions": sum(preempted.values()) - forced,
        "cached_tokens": engine.cached_tokens - cached,
    }


def prove_scenario(
    engine: Any, params: Mapping[str, Tensor], scenario: Scenario, *, dtype: torch.dtype, tokens: int, seed: int
) -> tuple[dict[str, Any], list[Rollout]]:
    """Sample a scenario, then replay every token under its own version.

    Returns: (facts and counts, the responses).
    Raises: RuntimeError if the scenario did not do what it is for.
    """
    wanted = list(requests(scenario, tokens=tokens, vocab_size=engine.config.vocab_size, seed=seed))
    rollouts, facts = sample(engine, params, wanted, batch=scenario.batch, publish_every=scenario.publish_every)
    spans = [rollout.policy_versions.unique().tolist() for rollout in rollouts]
    versions = sorted({version for span in spans for version in span})
    result = AuditResult()
    for version in versions:
        result += replay(weights_of(params, version), engine.config, rollouts, version=version, dtype=dtype)
    facts = {
        "tokens": result.tokens,
        "differing": result.differing,
        "max_abs": result.max_abs,
        "responses": len(rollouts),
        "shortest_prompt": min(len(rollout.prompt_ids) for rollout in rollouts),
        "longest_prompt": max(len(rollout.prompt_ids) for rollout in rollouts),
        "longest_response": max(len(rollout.response_ids) for rollout in rollouts),
        "versions": len(versions),
        "across_versions": sum(len(span) > 1 for span in spans),
        "temperatures": sorted({rollout.temperature for rollout in rollouts}),
        **facts,
    }
    if result.tokens != sum(request.max_tokens for request in wanted):
        raise RuntimeError(f"{scenario.name} must sample and replay every token asked for, got {result.tokens}")
    for name, least in scenario.shows.items():
        if facts[name] < least:
            raise RuntimeError(f"{name} of {scenario.name} must be >= {least}, got {facts[name]}")
    return {"scenario": scenario.name, **facts}, rollouts


def moved_by_one_ulp(params: Mapping[str, Tensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """params with one weight, of the first norm, moved to the next number of dtype."""
    name = "layers.0.input_norm.weight"
    moved = params[name].to(dtype, copy=True)
    moved[0] = torch.nextafter(moved[0], torch.tensor(torch.inf, dtype=dtype))
    return {**params, name: moved.float()}


def stock_rollouts(folder: Path, *, dtype: torch.dtype, wanted: Sequence[Request]) -> list[Rollout]:
    """The same requests sampled by vLLM's own model, attention and sampler, with logprobs after temperature.

    Without their seeds: vLLM's sampler on CPU cannot take one under chunked prefill.
    """
    from rz.engine.vllm import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams, TokensPrompt

    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    llm = LLM(
        str(folder), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=512, max_num_seqs=64,
        kv_cache_memory_bytes=2**28, logprobs_mode="processed_logprobs", generation_config="vllm", seed=0,
    )  # fmt: skip
    torch.set_num_threads = set_threads  # vLLM's worker puts one that does nothing in its place
    torch.set_num_threads(threads)
    common = {"logprobs": 0, "detokenize": False, "ignore_eos": True}
    settings = [SamplingParams(max_tokens=r.max_tokens, temperature=r.temperature, **common) for r in wanted]
    prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in wanted]
    with torch.compiler.set_stance("force_eager"):  # its sampler compiles one function, for 20 s
        outputs = [output.outputs[0] for output in llm.generate(prompts, settings, use_tqdm=False)]
    llm.llm_engine.engine_core.shutdown()
    return [
        Rollout(
            prompt_index=request.prompt_index,
            sample=request.sample,
            prompt_ids=request.prompt_ids,
            response_ids=output.token_ids,
            behaviour_logprobs=torch.tensor(
                [logprobs[token].logprob for token, logprobs in zip(output.token_ids, output.logprobs, strict=True)]
            ),
            policy_versions=torch.zeros(len(output.token_ids), dtype=torch.int64),
            stop_reason=output.finish_reason,
            seed=request.seed,
            temperature=request.temperature,
        )
        for request, output in zip(wanted, outputs, strict=True)
    ]
