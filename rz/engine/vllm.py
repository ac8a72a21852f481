"""Rollouts by real vLLM, in this process, with rz's forward inside."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rz.batch import Request, Rollout
from rz.engine.record import Record, check_publish, check_request, check_sizes
from rz.models.compute import compute_params
from rz.models.dense import DenseConfig, check_params

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner shares the cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
}

GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}  # no torch.compile


def own_model() -> dict[str, Any]:
    """The settings of vllm.LLM under which it runs rz's forward; weights come by `write_own`."""
    from vllm import ModelRegistry

    from rz.engine.vllm_model import ARCHITECTURE, RzForCausalLM

    ModelRegistry.register_model(ARCHITECTURE, RzForCausalLM)
    return {"load_format": "dummy", "hf_overrides": {"architectures": [ARCHITECTURE]}}


@torch.no_grad()
def write_own(model: Any, params: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
    """Copy float32 masters into a loaded RzForCausalLM, cast as the learner casts them."""
    device = next(iter(model.own.values())).device
    placed = {name: value.to(device) for name, value in params.items()}
    for name, value in compute_params(placed, dtype=dtype).items():
        model.own[name].copy_(value)


class VllmEngine:
    """rz.engine.interface.Engine over vLLM 0.32.

    vLLM keeps scheduling, continuous batching, the paged cache, chunked prefill, prefix caching and preemption. The
    model class, attention backend and sampler are rz's, so a token's logprob has the learner's bits.

    Have one open at a time in a process: vLLM's process groups are global, and closing one engine ends those of all.

    Args:
        folder: a Hugging Face checkpoint folder; only its config is read here.
        config: of that folder.
        params: float32 masters by name; published as `version` before the first step.
        dtype: of activations and cache.
        slots: responses that run at once.
        max_length: the longest prompt plus response.
        step_tokens: tokens of one step at most, >= slots; a longer prompt is cut into chunks.
        cache_tokens: size of the paged cache, at least max_length; None: enough that nothing is ever preempted.
        block_size: of the cache, a multiple of 32.
        prefix_caching: reuse equal prefixes under the same weights.
        model, write: settings of vllm.LLM that choose its model, and how weights get into that: rz's forward, unless
            rz.engine.stock says otherwise.
    Attributes: cached_tokens, the prompt tokens that came from the prefix cache, over all responses.
    Raises: ValueError naming the field, the rule and the value.
    """

    def __init__(
        self,
        folder: Path,
        config: DenseConfig,
        params: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        slots: int,
        max_length: int,
        step_tokens: int = 2048,
        cache_tokens: int | None = None,
        block_size: int = 128,
        prefix_caching: bool = True,
        version: int = 0,
        model: Callable[[], dict[str, Any]] = own_model,
        write: Callable[..., None] = write_own,
    ) -> None:
        check_sizes(config, slots=slots, max_length=max_length, step_tokens=step_tokens)
        if step_tokens < slots:
            raise ValueError(f"step_tokens must be >= slots {slots}, got {step_tokens}")
        if block_size < 32 or block_size % 32:
            raise ValueError(f"block_size must be a multiple of 32, got {block_size}")
        blocks = -(-max_length // block_size)
        if cache_tokens is not None and cache_tokens < blocks * block_size:
            raise ValueError(
                f"cache_tokens must hold one response of max_length ({blocks * block_size}), got {cache_tokens}"
            )
        blocks = slots * blocks if cache_tokens is None else cache_tokens // block_size
        check_params(params, config)
        os.environ.update(ENVIRONMENT)
        from vllm import LLM, SamplingParams, TokensPrompt
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        from rz.engine.vllm_model import SeededSampler

        self._make_prompt = TokensPrompt
        self._make_sampling = lambda **settings: SamplingParams(
            detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA, **settings
        )
        threads, set_threads = torch.get_num_threads(), torch.set_num_threads
        self._llm = LLM(
            str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            **(GRAPHS if current_platform.is_cuda_alike() else {"enforce_eager": True}),
            async_scheduling=False,
            max_model_len=max_length,
            max_num_seqs=slots,
            max_num_batched_tokens=step_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=prefix_caching,
            block_size=block_size,
            kv_cache_memory_bytes=_block_bytes(config, block_size, dtype) * (blocks + 1),
            num_gpu_blocks_override=blocks + 1,
            disable_log_stats=True,
            generation_config="vllm",
            seed=0,
            **model(),
        ).llm_engine
        torch.set_num_threads = set_threads  # vLLM's worker puts one that does nothing in its place
        torch.set_num_threads(threads)
        worker = self._llm.model_executor.driver_worker
        runner = getattr(worker, "worker", worker).model_runner
        runner.sampler = self._sampler = SeededSampler(runner)
        self._model = runner.model
        self._write = partial(write, self._model, dtype=dtype)
        self._shapes = {name: value.shape for name, value in params.items()}
        self._records: dict[tuple[int, int], Record] = {}
        self.config, self.max_length, self.version, self.cached_tokens = config, max_length, version - 1, 0
        self.publish(params, version)

    def submit(self, request: Request, sampled: Rollout | None = None) -> None:
        llm = self._open()
        check_request(request, sampled, self._records, vocab_size=self.config.vocab_size, max_length=self.max_length)
        if request.temperature < 0.01:
            raise ValueError(f"temperature must be >= 0.01, which vLLM raises lower ones to, got {request.temperature}")
        record = Record(request, sampled)
        begun = len(record.tokens)
        sampling = self._make_sampling(
            max_tokens=request.max_tokens - begun,
            temperature=request.temperature,
            stop_token_ids=list(request.stop_ids),
            extra_args={"seed": request.seed, "begun": begun},
        )
        prompt = self._make_prompt(prompt_token_ids=[*request.prompt_ids, *record.tokens])
        llm.add_request(_name(request.id), prompt, sampling)
        self._records[request.id] = record

    def step(self) -> list[Rollout]:
        finished = []
        for output in self._open().step():
            request_id = tuple(int(part) for part in output.request_id.split("."))
            record, (completion,) = self._records[request_id], output.outputs
            if not record.tokens:
                self.cached_tokens += output.num_cached_tokens
            for token in completion.token_ids:  # one
                record.append(token, self._sampler.drawn[output.request_id], self.version)
            if output.finished:
                del self._records[request_id]
                finished.append(record.rollout(completion.finish_reason))
        return sorted(finished, key=lambda rollout: (rollout.prompt_index, rollout.sample))

    def running(self) -> list[Rollout]:
        self._open()
        return [self._records[request_id].rollout("running") for request_id in sorted(self._records)]

    def publish(self, params: Mapping[str, Tensor], version: int) -> None:
        llm = self._open()
        check_publish(self._shapes, params, self.version, version)
        self._write(params)
        # A token must be a function of (weights, prefix): every prefix is computed anew under the new weights.
        llm.reset_prefix_cache(reset_running_requests=True)
        self.version = version

    def weights(self) -> dict[str, Tensor]:
        """The parameters that the next step uses, as compute_params names them; not copies."""
        self._open()
        return dict(self._model.own)

    @property
    def scheduler(self):
        """vLLM's own scheduler, to look at: what it runs, has computed and has preempted."""
        return self._open().engine_core.engine_core.scheduler

    def abort(self, ids: Iterable[tuple[int, int]]) -> None:
        known = [request_id for request_id in dict.fromkeys(ids) if request_id in self._records]
        self._open().abort_request([_name(request_id) for request_id in known])
        for request_id in known:
            del self._records[request_id]

    def close(self) -> None:
        if self._llm is not None:
            self.abort(list(self._records))
            self._llm.engine_core.shutdown()
            self._llm = self._model = self._write = self._sampler = None

    def _open(self):
        if self._llm is None:
            raise RuntimeError("engine must be open, got one that was closed")
        return self._llm


def _name(request_id: tuple[int, int]) -> str:
    return f"{request_id[0]}.{request_id[1]}"


def _block_bytes(config: DenseConfig, block_size: int, dtype: torch.dtype) -> int:
    return 2 * block_size * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
