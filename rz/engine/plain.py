"""Rollouts in plain torch: the same interface and the same bits as vLLM, for notebooks, tests and other machines."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rz.batch import Request, Rollout
from rz.engine.record import Record, check_publish, check_request, check_sizes
from rz.engine.sampling import sample_tokens, uniforms
from rz.models.compute import compute_params
from rz.models.dense import DenseConfig, check_params, forward, head_weight
from rz.ops import linear, paged_attention, paged_plan, tempered_logprobs, write_cache

BLOCK = 128


class PlainEngine:
    """rz.engine.interface.Engine with continuous batching and chunked prefill over a paged cache.

    Each running response owns a slot with room for max_length tokens, so nothing is ever preempted.

    Args:
        params: also say by where they are on which device to compute.
        config, dtype, slots, max_length, step_tokens, version: as in rz.engine.vllm.VllmEngine.
    """

    def __init__(
        self,
        config: DenseConfig,
        params: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        slots: int,
        max_length: int,
        step_tokens: int = 2048,
        version: int = 0,
    ) -> None:
        check_sizes(config, slots=slots, max_length=max_length, step_tokens=step_tokens)
        check_params(params, config)
        self._blocks = -(-max_length // BLOCK)
        shape = (slots * self._blocks, config.kv_heads, BLOCK, 2 * config.head_dim)
        self._device = next(iter(params.values())).device
        self._cache = [torch.zeros(shape, dtype=dtype, device=self._device) for _ in range(config.layers)]
        self._free = list(range(slots - 1, -1, -1))
        self._running: dict[tuple[int, int], _Sequence] = {}
        self._waiting: dict[tuple[int, int], Record] = {}
        self._shapes = {name: value.shape for name, value in params.items()}
        self._dtype, self._step_tokens, self._open = dtype, step_tokens, True
        self.config, self.max_length, self.version = config, max_length, version - 1
        self.publish(params, version)

    def submit(self, request: Request, sampled: Rollout | None = None) -> None:
        self._require_open()
        check_request(
            request,
            sampled,
            self._running.keys() | self._waiting.keys(),
            vocab_size=self.config.vocab_size,
            max_length=self.max_length,
        )
        self._waiting[request.id] = Record(request, sampled)

    @torch.no_grad()
    def step(self) -> list[Rollout]:
        self._require_open()
        while self._waiting and self._free:
            request_id, record = next(iter(self._waiting.items()))
            del self._waiting[request_id]
            self._running[request_id] = _Sequence(record, self._free.pop())
        work = self._schedule()
        if not work:
            return []
        logits = self._forward(work)
        ready = [sequence for sequence, count in work if sequence.computed == sequence.length]
        requests = [sequence.record.request for sequence in ready]
        temperatures = torch.tensor([request.temperature for request in requests], device=self._device)
        logprobs = tempered_logprobs(logits, temperature=temperatures)
        uniform = uniforms([r.seed for r in requests], [len(sequence.record.tokens) for sequence in ready])
        tokens = sample_tokens(logprobs, uniform)
        drawn = logprobs.gather(1, tokens[:, None])[:, 0]
        finished = []
        for sequence, token, logprob in zip(ready, tokens.tolist(), drawn.tolist(), strict=True):
            record = sequence.record
            record.append(token, logprob, self.version)
            stopped = token in record.request.stop_ids
            if stopped or len(record.tokens) == record.request.max_tokens:
                self._release(record.request.id)
                finished.append(record.rollout("stop" if stopped else "length"))
        return sorted(finished, key=lambda rollout: (rollout.prompt_index, rollout.sample))

    def running(self) -> list[Rollout]:
        self._require_open()
        records = self._waiting | {request_id: sequence.record for request_id, sequence in self._running.items()}
        return [records[request_id].rollout("running") for request_id in sorted(records)]

    def publish(self, params: Mapping[str, Tensor], version: int) -> None:
        self._require_open()
        check_publish(self._shapes, params, self.version, version)
        used = compute_params(params, dtype=self._dtype)
        self._params = {name: value.clone() if value is params.get(name) else value for name, value in used.items()}
        for sequence in self._running.values():
            sequence.computed = 0
        self.version = version

    def weights(self) -> dict[str, Tensor]:
        """The parameters that the next step uses, as compute_params names them; not copies."""
        self._require_open()
        return dict(self._params)

    def abort(self, ids: Iterable[tuple[int, int]]) -> None:
        self._require_open()
        for request_id in ids:
            if request_id in self._running:
                self._release(request_id)
            self._waiting.pop(request_id, None)

    def close(self) -> None:
        self._open = False
        self._cache, self._params, self._running, self._waiting = [], {}, {}, {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """The past of `forward`: this engine's cache, for the tokens of the step under way."""
        write_cache(self._cache[layer], k, v, self._slots)
        return paged_attention(q, self._cache[layer], self._plan, window=window)

    def _schedule(self) -> list[tuple["_Sequence", int]]:
        """(sequence, tokens to compute now), oldest first, within the budget of a step."""
        left, work = self._step_tokens, []
        for sequence in self._running.values():
            if count := min(left, sequence.length - sequence.computed):
                work.append((sequence, count))
                left -= count
        return work

    def _forward(self, work: list[tuple["_Sequence", int]]) -> Tensor:
        """Logits [sequences whose last token was computed, V]."""
        tokens, positions, slots, last = [], [], [], []
        for sequence, count in work:
            span = range(sequence.computed, sequence.computed + count)
            ids = sequence.record.request.prompt_ids + tuple(sequence.record.tokens)
            tokens += ids[span.start : span.stop]
            positions += span
            slots += (sequence.slot * self._blocks * BLOCK + position for position in span)
            sequence.computed = span.stop
            if span.stop == len(ids):
                last.append(len(tokens) - 1)
        table = torch.tensor([sequence.slot for sequence, _ in work])[:, None] * self._blocks + torch.arange(
            self._blocks
        )
        self._slots = torch.tensor(slots, device=self._device)
        self._plan = paged_plan(
            [count for _, count in work],
            [sequence.computed for sequence, _ in work],
            table.to(self._device),
            block_size=BLOCK,
            heads=self.config.heads,
            kv_heads=self.config.kv_heads,
            windows=tuple(set(self.config.windows)),
            head_dim=self.config.head_dim,
            dtype=self._dtype,
        )
        hidden = forward(
            self._params,
            self.config,
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            self,
        )
        return linear(hidden[last], head_weight(self._params))

    def _release(self, request_id: tuple[int, int]) -> None:
        self._free.append(self._running.pop(request_id).slot)

    def _require_open(self) -> None:
        if not self._open:
            raise RuntimeError("engine must be open, got one that was closed")


class _Sequence:
    """A running response: its record, its place in the cache, and how many of its tokens are in it."""

    def __init__(self, record: Record, slot: int) -> None:
        self.record, self.slot, self.computed = record, slot, 0

    @property
    def length(self) -> int:
        return len(self.record.request.prompt_ids) + len(self.record.tokens)
