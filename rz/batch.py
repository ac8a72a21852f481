"""Immutable values that flow from a prompt to an update."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor


def _ids(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(token) for token in value)


@attrs.frozen(kw_only=True)
class Prompt:
    """One question of a task.

    Args:
        index: >= 0. Its place in the task's order; also the id of its group.
        token_ids: the prompt as the model reads it, BOS included where the model wants one. Never re-tokenised.
        data: whatever the task needs to score a response; opaque to everything else.
    Raises: ValueError if token_ids is empty or index is negative.
    """

    index: int
    token_ids: tuple[int, ...] = attrs.field(converter=_ids)
    data: Any = None

    def __attrs_post_init__(self) -> None:
        if self.index < 0:
            raise ValueError(f"index must be >= 0, got {self.index}")
        if not self.token_ids:
            raise ValueError("token_ids must hold at least one token, got none")


@attrs.frozen(kw_only=True)
class Request:
    """One response to be sampled: sample number `sample` of prompt `prompt_index`.

    Token t of the response is drawn with noise that is a function of (seed, t) alone.

    Args:
        max_tokens: >= 1. Sampled tokens at most, the sampled stop token included.
        temperature: > 0. The distribution sampled from is softmax(logits / temperature).
        stop_ids: the response ends with the first sampled token that is one of these.
    Raises: ValueError naming the field, the rule and the value.
    """

    prompt_index: int
    sample: int
    prompt_ids: tuple[int, ...] = attrs.field(converter=_ids)
    seed: int
    max_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = attrs.field(converter=_ids, default=())

    def __attrs_post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("prompt_ids must hold at least one token, got none")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {self.max_tokens}")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"temperature must be > 0 and finite, got {self.temperature}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2**63), got {self.seed}")

    @property
    def id(self) -> tuple[int, int]:
        """(prompt_index, sample), unique in a run."""
        return self.prompt_index, self.sample


STOP_REASONS = ("stop", "length", "running")


@attrs.frozen(kw_only=True, eq=False)
class Rollout:
    """A response and what is known of each of its tokens. T sampled tokens.

    Args:
        response_ids: T sampled token ids, the sampled stop token included.
        behaviour_logprobs: [T] float32, nats, of the tempered distribution that was sampled, as the engine reported it.
        policy_versions: [T] int64. The version of the forward pass that sampled the token.
        replay_logprobs: None, or [T] float32, nats: what the learner's forward gave for the token under the weights of
            its version; NaN where the token was not replayed.
        stop_reason: "stop" (a stop token was sampled), "length" (max_tokens reached), "running" (not finished).
        temperature, seed: as in the request.
    Raises: ValueError or TypeError naming the field, the rule and the value.
    """

    prompt_index: int
    sample: int
    prompt_ids: tuple[int, ...] = attrs.field(converter=_ids)
    response_ids: tuple[int, ...] = attrs.field(converter=_ids)
    behaviour_logprobs: Tensor
    policy_versions: Tensor
    stop_reason: str
    seed: int
    temperature: float
    replay_logprobs: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        fields = [("behaviour_logprobs", torch.float32), ("policy_versions", torch.int64)]
        for name, dtype in fields + ([] if self.replay_logprobs is None else [("replay_logprobs", torch.float32)]):
            value = getattr(self, name)
            if value.dtype != dtype:
                raise TypeError(f"{name} must be {dtype}, got {value.dtype}")
            if value.shape != (len(self.response_ids),):
                raise ValueError(
                    f"{name} must have one entry a response token [{len(self.response_ids)}], got {list(value.shape)}"
                )
        if self.stop_reason not in STOP_REASONS:
            raise ValueError(f"stop_reason must be one of {', '.join(STOP_REASONS)}, got {self.stop_reason!r}")


@attrs.frozen(kw_only=True, eq=False)
class Group:
    """The finished responses to one prompt and their rewards, in order of sample number.

    Raises: ValueError if there is not one reward a rollout, a rollout is of another prompt, or one is still running.
    """

    prompt: Prompt
    rollouts: tuple[Rollout, ...] = attrs.field(converter=tuple)
    rewards: tuple[float, ...] = attrs.field(converter=lambda rewards: tuple(float(reward) for reward in rewards))

    def __attrs_post_init__(self) -> None:
        if len(self.rewards) != len(self.rollouts):
            raise ValueError(f"rewards must be one a rollout ({len(self.rollouts)}), got {len(self.rewards)}")
        for rollout in self.rollouts:
            if rollout.prompt_index != self.prompt.index:
                raise ValueError(
                    f"rollouts must be of prompt {self.prompt.index}, got one of prompt {rollout.prompt_index}"
                )
            if rollout.stop_reason == "running":
                raise ValueError(f"rollouts must be finished, got sample {rollout.sample} still running")


@attrs.frozen(kw_only=True, eq=False)
class TrainBatch:
    """Responses of one update, padded on the right. B responses, P prompt positions, T response positions.

    The mask comes from lengths, never from token values: padding may equal EOS. Use attrs.evolve to change a field.

    Args:
        prompt_ids: [B, P] int64.  prompt_lengths: [B] int64.
        response_ids: [B, T] int64.
        mask: [B, T] bool, True = a sampled token.
        behaviour_logprobs: [B, T] float32, nats; read only where mask is True.
        replay_logprobs: None, or as behaviour_logprobs: see Rollout; NaN where a token was not replayed.
        policy_versions: [B, T] int64; read only where mask is True.
        rewards: [B] float32.  group_ids: [B] int64, the prompt index.
        temperature: > 0, of every response.
    Raises: TypeError for a wrong dtype, ValueError for a shape that disagrees.
    """

    prompt_ids: Tensor
    prompt_lengths: Tensor
    response_ids: Tensor
    mask: Tensor
    behaviour_logprobs: Tensor
    policy_versions: Tensor
    rewards: Tensor
    group_ids: Tensor
    temperature: float
    replay_logprobs: Tensor | None = None

    def __attrs_post_init__(self) -> None:
        if self.mask.dtype != torch.bool:
            raise TypeError(f"mask must be torch.bool, got {self.mask.dtype}")
        if self.mask.ndim != 2:
            raise ValueError(f"mask must have two dimensions [B, T], got {list(self.mask.shape)}")
        names = ["response_ids", "behaviour_logprobs", "policy_versions"]
        for name in names + ([] if self.replay_logprobs is None else ["replay_logprobs"]):
            if (got := getattr(self, name).shape) != self.mask.shape:
                raise ValueError(f"{name} must have the shape of mask {list(self.mask.shape)}, got {list(got)}")
        rows = self.mask.shape[0]
        for name in ("prompt_lengths", "rewards", "group_ids"):
            if (got := getattr(self, name).shape) != (rows,):
                raise ValueError(f"{name} must be one a response [{rows}], got {list(got)}")
        if self.prompt_ids.ndim != 2 or self.prompt_ids.shape[0] != rows:
            raise ValueError(f"prompt_ids must be [{rows}, P], got {list(self.prompt_ids.shape)}")

    def rows(self, start: int, stop: int) -> "TrainBatch":
        """Responses start to stop (a microbatch), padding kept."""
        cut = {
            field.name: getattr(self, field.name)[start:stop]
            for field in attrs.fields(TrainBatch)
            if field.name != "temperature" and getattr(self, field.name) is not None
        }
        return TrainBatch(**cut, temperature=self.temperature)


def _padded(rows: Sequence[Any], width: int, value: float, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(rows), width), value, dtype=dtype)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = torch.as_tensor(values, dtype=dtype)
    return out


def stack(groups: Sequence[Group], *, pad_id: int = 0) -> TrainBatch:
    """The responses of groups, in the order given, as one padded batch.

    Args:
        groups: at least one, with at least one response in all; temperatures must agree.
        pad_id: written in padded positions; may be any id, as nothing reads it.
    Edge cases: a response without tokens is a row whose mask is all False; T and P are at least 1.
    Raises: ValueError if there is no response, or temperatures differ.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        raise ValueError(f"groups must hold at least one response, got {len(groups)} groups with none")
    temperatures = {rollout.temperature for rollout in rollouts}
    if len(temperatures) > 1:
        raise ValueError(f"temperature must be the same for every response, got {sorted(temperatures)}")
    lengths = torch.tensor([len(rollout.response_ids) for rollout in rollouts])
    width = max(1, int(lengths.max()))
    prompt_lengths = torch.tensor([len(rollout.prompt_ids) for rollout in rollouts])
    rewards = [reward for group in groups for reward in group.rewards]
    replays = [() if rollout.replay_logprobs is None else rollout.replay_logprobs for rollout in rollouts]
    replayed = any(rollout.replay_logprobs is not None for rollout in rollouts)
    return TrainBatch(
        prompt_ids=_padded([r.prompt_ids for r in rollouts], int(prompt_lengths.max()), pad_id, torch.int64),
        prompt_lengths=prompt_lengths,
        response_ids=_padded([r.response_ids for r in rollouts], width, pad_id, torch.int64),
        mask=torch.arange(width)[None, :] < lengths[:, None],
        behaviour_logprobs=_padded([r.behaviour_logprobs for r in rollouts], width, 0.0, torch.float32),
        policy_versions=_padded([r.policy_versions for r in rollouts], width, 0, torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        group_ids=torch.tensor([rollout.prompt_index for rollout in rollouts]),
        temperature=temperatures.pop(),
        replay_logprobs=_padded(replays, width, torch.nan, torch.float32) if replayed else None,
    )
