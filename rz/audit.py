"""Replay of sampled tokens under the very weights that sampled them: the proof that the kernel mismatch is zero."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from rz import report
from rz.batch import Rollout
from rz.checkpoint import kept_versions
from rz.config import DTYPES
from rz.models.compute import compute_params
from rz.models.dense import DenseConfig, forward, head_weight
from rz.models.hf import load_config, load_params
from rz.models.policy import packed_logprobs
from rz.ops import WholeSequences, linear, paged_attention, paged_plan, tempered_logprobs, write_cache

PACK_TOKENS = 4096  # tokens replayed in one forward pass
AGREE = "none: this machine's whole pass and decode agree in every op, so the logged run had other weights or kernels"


@attrs.frozen(kw_only=True)
class AuditResult:
    """Tokens replayed, how many have other bits, the largest distance in nats, and the first token that differs as
    (prompt index, sample, index in the response)."""

    tokens: int = 0
    differing: int = 0
    max_abs: float = 0.0
    first: tuple[int, int, int] | None = None

    def __add__(self, other: "AuditResult") -> "AuditResult":
        return AuditResult(
            tokens=self.tokens + other.tokens,
            differing=self.differing + other.differing,
            max_abs=max(self.max_abs, other.max_abs),
            first=self.first or other.first,
        )


def _packs(rollouts: Iterable[tuple[Rollout, Tensor]]) -> Iterator[list[tuple[Rollout, Tensor]]]:
    pack: list[tuple[Rollout, Tensor]] = []
    size = 0
    for rollout, chosen in rollouts:
        length = len(rollout.prompt_ids) + int(chosen[-1]) + 1
        if pack and (size + length > PACK_TOKENS or rollout.temperature != pack[0][0].temperature):
            yield pack
            pack, size = [], 0
        pack.append((rollout, chosen))
        size += length
    if pack:
        yield pack


def _compare(reported: Tensor, replayed: Tensor, rollout: Rollout, chosen: Tensor) -> AuditResult:
    different = reported.view(torch.int32) != replayed.view(torch.int32)
    gap = (reported - replayed).abs()[different].nan_to_num(nan=torch.inf)
    where = chosen[different]
    return AuditResult(
        tokens=len(chosen),
        differing=len(where),
        max_abs=float(gap.max()) if len(where) else 0.0,
        first=(rollout.prompt_index, rollout.sample, int(where[0])) if len(where) else None,
    )


@torch.no_grad()
def replayed(
    params: Mapping[str, Tensor],
    config: DenseConfig,
    chosen: Iterable[tuple[Rollout, Tensor]],
    *,
    dtype: torch.dtype,
) -> Iterator[tuple[Rollout, Tensor, Tensor]]:
    """The logprobs of tokens of responses, as the learner computes them.

    Args:
        params: float32 masters of the version that sampled the tokens.
        chosen: responses, finished or running, each with the ascending places in it [M] int64 of the tokens to replay.
        dtype: of the run's activations.
    Yields: (response, places, logprobs [M] float32) for each with M >= 1.
    """
    ordered = sorted((pair for pair in chosen if len(pair[1])), key=lambda pair: pair[0].temperature)
    used, device = compute_params(params, dtype=dtype) if ordered else {}, next(iter(params.values())).device
    for pack in _packs(ordered):
        sequences = [(r.prompt_ids + r.response_ids)[: len(r.prompt_ids) + int(c[-1]) + 1] for r, c in pack]
        lengths = [len(sequence) for sequence in sequences]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        rows = [start + len(r.prompt_ids) + c - 1 for start, (r, c) in zip(starts, pack, strict=True)]
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        values = packed_logprobs(
            used, config, tokens.to(device), lengths, torch.cat(rows).to(device), temperature=pack[0][0].temperature
        ).cpu()
        for (rollout, c), logprobs in zip(pack, values.split([len(c) for _, c in pack]), strict=True):
            yield rollout, c, logprobs


def replay(
    params: Mapping[str, Tensor], config: DenseConfig, rollouts: Iterable[Rollout], *, version: int, dtype: torch.dtype
) -> AuditResult:
    """Replay every token that was sampled under `version` and compare its bits with the reported logprob.

    Args:
        params: float32 masters of that version.
        rollouts: finished or running; tokens of other versions are not looked at.
    Edge cases: no token of that version gives zeros. NaN differs by inf.
    """
    chosen = ((rollout, (rollout.policy_versions == version).nonzero()[:, 0]) for rollout in rollouts)
    result = AuditResult()
    for rollout, places, logprobs in replayed(params, config, chosen, dtype=dtype):
        result += _compare(rollout.behaviour_logprobs[places], logprobs, rollout, places)
    return result


def is_audited(run_seed: int, rollout: Rollout, share: float) -> bool:
    """Whether a response is among the share that a run replays: a function of (run seed, prompt, sample) alone."""
    text = f"audit/{run_seed}/{rollout.prompt_index}/{rollout.sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) < share * 2**64


def online_audit(
    config: DenseConfig, *, dtype: torch.dtype, share: float, run_seed: int
) -> Callable[[Mapping[str, Tensor], Sequence[tuple[Rollout, int]]], dict[tuple[int, int], tuple[Tensor, Tensor]]]:
    """The audit that rz.loop.train calls before each publish, while the weights that sampled the tokens still exist.

    Args:
        share: in [0, 1], of the responses; a response is replayed whole, version by version, or not at all.
    Raises: ValueError if share is out of range.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")

    def audit(params: Mapping[str, Tensor], grown: Sequence[tuple[Rollout, int]]):
        chosen = [
            (rollout, torch.arange(first, len(rollout.response_ids)))
            for rollout, first in grown
            if is_audited(run_seed, rollout, share)
        ]
        found = replayed(params, config, chosen, dtype=dtype)
        return {(r.prompt_index, r.sample): (places, logprobs) for r, places, logprobs in found}

    return audit


class _Decode:
    """The past of one sequence over a paged cache, as an engine has it."""

    def __init__(self, config: DenseConfig, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.block, self.device = config, 128, device
        self.blocks = -(-length // self.block)
        shape = (self.blocks, config.kv_heads, self.block, 2 * config.head_dim)
        self.caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

    def expect(self, start: int, stop: int) -> None:
        self.slots = torch.arange(start, stop, device=self.device)
        self.plan = paged_plan(
            [stop - start],
            [stop],
            torch.arange(self.blocks, device=self.device)[None],
            block_size=self.block,
            heads=self.config.heads,
            kv_heads=self.config.kv_heads,
            windows=tuple(set(self.config.windows)),
            head_dim=self.config.head_dim,
            dtype=self.caches[0].dtype,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        write_cache(self.caches[layer], k, v, self.slots)
        return paged_attention(q, self.caches[layer], self.plan, window=window)


def _observe_head(params: Mapping[str, Tensor], hidden: Tensor, observe: Callable[[str, Tensor], None]) -> None:
    logits = linear(hidden, head_weight(params))
    observe("lm_head", logits)
    observe("logprobs", tempered_logprobs(logits, temperature=1.0))


@torch.no_grad()
def first_difference(
    params: Mapping[str, Tensor], config: DenseConfig, prefix: Sequence[int], *, dtype: torch.dtype
) -> str | None:
    """The first op, by name, whose last row differs between one pass over prefix and prefill plus decode of it.

    Returns: such as "layers.0.attention", or None if the two agree in every op: then the weights or the log are at
        fault, not the kernels of this machine.
    """
    used, device = compute_params(params, dtype=dtype), next(iter(params.values())).device
    tokens, positions = torch.tensor(prefix, device=device), torch.arange(len(prefix), device=device)
    whole: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    keep = lambda kept: lambda name, value: kept.__setitem__(name, value[-1].clone())
    hidden = forward(used, config, tokens, positions, WholeSequences([len(prefix)]), observe=keep(whole))
    _observe_head(used, hidden, keep(whole))
    past = _Decode(config, len(prefix), dtype, device)
    for start, stop in ((0, len(prefix) - 1), (len(prefix) - 1, len(prefix))):
        if stop > start:
            past.expect(start, stop)
            hidden = forward(used, config, tokens[start:stop], positions[start:stop], past, observe=keep(decoded))
            _observe_head(used, hidden, keep(decoded))
    return next((name for name in whole if not torch.equal(whole[name], decoded[name])), None)


def audit_run(run: Path) -> tuple[AuditResult, str | None]:
    """Replay every logged token of a run whose version's weights the run kept.

    It replays on the kind of device that the run had. Tokens of versions that were not kept cannot be replayed and are
    not counted.

    Returns: (the result, and if a token differs, the first op in which a whole pass and decoding of its prefix differ:
        see first_difference).
    Raises: ValueError if run is not the folder of a run, a kept checkpoint is damaged, a token is outside the
        vocabulary, or there is no token to replay: an audit of nothing proves nothing.
    """
    name = report.read_config(run).get("dtype")
    if name not in DTYPES:
        raise ValueError(f"dtype in {run / report.CONFIG} must be one of {', '.join(DTYPES)}, got {name!r}")
    dtype, device = DTYPES[name], report.read_config(run).get("device", "cpu")
    result, where, kept = AuditResult(), None, kept_versions(run)
    of_version: dict[int, list[Rollout]] = {}  # of the kept ones alone: a long run's responses fill the memory
    for rollout in report.read_rollouts(run):
        for version in kept.keys() & set(rollout.policy_versions.tolist()):
            of_version.setdefault(version, []).append(rollout)
    for version in sorted(of_version):
        sampled, folder = of_version[version], kept[version]
        config = load_config(folder)
        params = {name: value.to(device) for name, value in load_params(folder, config).items()}
        for token in (token for rollout in sampled for token in rollout.prompt_ids + rollout.response_ids):
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"tokens in {run / report.ROLLOUTS} must be in [0, {config.vocab_size}), got {token}")
        found = replay(params, config, sampled, version=version, dtype=dtype)
        if found.differing and not result.differing:
            prompt, sample, index = found.first
            rollout = next(r for r in sampled if (r.prompt_index, r.sample) == (prompt, sample))
            prefix = rollout.prompt_ids + rollout.response_ids[:index]
            where = first_difference(params, config, prefix, dtype=dtype) or AGREE
        result += found
    if not result.tokens:
        named = ", ".join(map(str, kept)) or "none"
        raise ValueError(f"run must hold tokens of a version whose weights it kept ({named}), got none in {run}")
    return result, where
