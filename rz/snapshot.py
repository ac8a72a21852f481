"""A run between two updates, as a value: all that the rest of the run depends on."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from rz.batch import Rollout
from rz.rewards import Id
from rz.schedule import Schedule, submitted

Params = Mapping[str, Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Response:
    """A response of an open group: finished or running, with its reward if that is known."""

    rollout: Rollout
    reward: float | None = None


@attrs.frozen(kw_only=True, eq=False)
class Snapshot:
    """A run right after an update and its publish, before the next begins.

    Args:
        plan: where the schedule stands.
        state: the learner's.
        history: what the engine was or will be given, oldest first: of the version that it serves, to that of state
            (with exact_lag, of each version between).
        responses: of the open groups, in order of (prompt, sample), which is the order of submission.
    """

    plan: Schedule
    state: Any
    history: tuple[Params, ...]
    responses: tuple[Response, ...]


def with_replay(rollout: Rollout, replay: Tensor | None) -> Rollout:
    """The response with what was replayed of it so far; NaN for tokens that were not.

    Args:
        replay: [t] float32 of the first tokens, or None.
    """
    if replay is None:
        return rollout
    length = len(rollout.response_ids)
    values = torch.full((length,), torch.nan)
    values[: min(length, len(replay))] = replay[:length]
    return attrs.evolve(rollout, replay_logprobs=values)


def before(rollout: Rollout, version: int) -> Rollout:
    """The response as it was when `version` was published: running, with its tokens of older versions."""
    count = int((rollout.policy_versions < version).sum())  # versions never fall within a response
    return attrs.evolve(
        rollout,
        response_ids=rollout.response_ids[:count],
        behaviour_logprobs=rollout.behaviour_logprobs[:count],
        policy_versions=rollout.policy_versions[:count],
        replay_logprobs=None if rollout.replay_logprobs is None else rollout.replay_logprobs[:count],
        stop_reason="running",
    )


def placed(snapshot: Snapshot, device: str) -> Snapshot:
    """The snapshot of a PolicyState with its weights and optimizer on a device."""
    if device == "cpu":
        return snapshot
    there = lambda tensors: {name: value.to(device) for name, value in tensors.items()}
    state = snapshot.state
    optimizer = attrs.evolve(state.optimizer, first=there(state.optimizer.first), second=there(state.optimizer.second))
    history = tuple(there(params) for params in snapshot.history)
    state = attrs.evolve(state, params=history[-1], optimizer=optimizer)
    return attrs.evolve(snapshot, state=state, history=history)


def snapshot(
    plan: Schedule,
    state: Any,
    history: Sequence[Params],
    running: Sequence[Rollout],
    scored: Mapping[Id, tuple[Rollout, asyncio.Task[float]]],
    replays: Mapping[Id, Tensor],
) -> Snapshot:
    """The run as it was at its last publish, although the engine may have gone on since.

    Args:
        plan, state, history: of that moment.
        running: what the engine runs now.  scored: what has finished and was not consumed by then, at least.
        replays: [t] float32 of the first tokens of a response, NaN where they were not replayed.
    """
    known = {(rollout.prompt_index, rollout.sample): rollout for rollout in running}
    responses = []
    for key, finished in submitted(plan):
        rollout = with_replay(scored[key][0] if key in scored else known[key], replays.get(key))
        if not finished:
            responses.append(Response(rollout=before(rollout, plan.served)))
            continue
        reward = scored[key][1]
        known_reward = reward.done() and not reward.cancelled() and not reward.exception()
        responses.append(Response(rollout=rollout, reward=reward.result() if known_reward else None))
    return Snapshot(plan=plan, state=state, history=tuple(history), responses=tuple(responses))
