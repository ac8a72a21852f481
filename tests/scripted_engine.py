"""An engine that samples by a script and computes nothing; with it a learner, a task and a run of the same kind."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping

import attrs
import torch
from torch import Tensor

from rz.batch import Prompt, Request, Rollout
from rz.loop import train
from rz.schedule import Settings, sample_seed

LOGPROB = -1.0  # of every token


def token(prompt_index: int, sample: int, place: int) -> int:
    """The token that the engine samples at this place of this response, whatever the weights."""
    return 1_000_000 * prompt_index + 1_000 * sample + place


@attrs.define(eq=False)
class ScriptedEngine:
    """Response (prompt, sample) gets one token a step and ends after duration(prompt, sample) of them.

    Every token is stamped with the version that the engine has in that very step.

    Args:
        fail_at: the step, from 1, that raises OSError.
        requests: what was submitted, in order.  published: (version, params), in order.  aborted: ids, in order.
        events: ("submit", id), ("finish", id) and ("publish", version), in order.
        most: responses in flight at once, at most.
    """

    duration: Callable[[int, int], int]
    version: int = 0
    fail_at: int | None = None
    steps: int = 0
    requests: list[Request] = attrs.Factory(list)
    published: list[tuple[int, Mapping[str, Tensor]]] = attrs.Factory(list)
    aborted: list[tuple[int, int]] = attrs.Factory(list)
    events: list[tuple[str, object]] = attrs.Factory(list)
    most: int = 0
    _live: dict[tuple[int, int], tuple[Request, list[int]]] = attrs.Factory(dict)

    def submit(self, request: Request, sampled: Rollout | None = None) -> None:
        if request.id in self._live:
            raise ValueError(f"request id must be new, got {request.id}")
        self.requests.append(request)
        self.events.append(("submit", request.id))
        self._live[request.id] = (request, [] if sampled is None else sampled.policy_versions.tolist())
        self.most = max(self.most, len(self._live))

    def step(self) -> list[Rollout]:
        self.steps += 1
        if self.steps == self.fail_at:
            raise OSError(f"the engine's step {self.steps} failed")
        for _, versions in self._live.values():
            versions.append(self.version)
        ended = sorted(key for key, (_, versions) in self._live.items() if len(versions) >= self.duration(*key))
        self.events.extend(("finish", key) for key in ended)
        return [_rollout(*self._live.pop(key), stop_reason="stop") for key in ended]

    def running(self) -> list[Rollout]:
        return [_rollout(*self._live[key], stop_reason="running") for key in sorted(self._live)]

    def publish(self, params: Mapping[str, Tensor], version: int) -> None:
        if version <= self.version:
            raise ValueError(f"version must be > {self.version}, got {version}")
        self.version = version
        self.published.append((version, params))
        self.events.append(("publish", version))

    def abort(self, ids: Iterable[tuple[int, int]]) -> None:
        for key in ids:
            if self._live.pop(key, None):
                self.aborted.append(key)

    def close(self) -> None:
        raise AssertionError("the loop must not close an engine that it was given")


def _rollout(request: Request, versions: list[int], *, stop_reason: str) -> Rollout:
    return Rollout(
        prompt_index=request.prompt_index,
        sample=request.sample,
        prompt_ids=request.prompt_ids,
        response_ids=[token(*request.id, place) for place in range(len(versions))],
        behaviour_logprobs=torch.full((len(versions),), LOGPROB),
        policy_versions=torch.tensor(versions, dtype=torch.int64),
        stop_reason=stop_reason,
        seed=request.seed,
        temperature=request.temperature,
    )


@attrs.frozen(eq=False)
class Learner:
    """A learner's state that knows nothing but its version; its parameter says which version it is of."""

    version: int = 0

    @property
    def params(self):
        return {"version": torch.tensor(self.version)}


def learn(state, batch):
    return Learner(state.version + 1), {"loss": float(state.version)}


@attrs.frozen(eq=False)
class Remembering(Learner):
    """A state that depends on all that was consumed, in order."""

    seen: int = 0


def remember(state, batch):
    values = (batch.response_ids, batch.policy_versions, batch.rewards, batch.group_ids)
    text = f"{state.seen} {[value.tolist() for value in values]}"
    seen = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    return Remembering(state.version + 1, seen), {"loss": float(seen)}


@attrs.frozen
class Sums:
    """The reward of a response is its number of tokens."""

    stop_ids: tuple[int, ...] = (0,)

    def prompt(self, index):
        return Prompt(index=index, token_ids=[5, index], data=f"question {index}")

    def score(self, prompt, response_ids):
        assert prompt.data == f"question {prompt.index}"
        return len(response_ids)


def plan(**changes):
    return Settings(**(dict(group_size=2, groups_per_update=2, max_lag=3, slots=6, updates=8) | changes))


def uneven(prompt, sample):
    """Response lengths, 1 to 6 and now and then 30."""
    seed = sample_seed(11, prompt, sample)
    return 30 if seed % 9 == 0 else 1 + seed % 6


def arguments(engine, records, **changes):
    defaults = dict(
        state=Learner(engine.version),
        engine=engine,
        task=Sums(),
        settings=plan(),
        run_seed=3,
        max_tokens=64,
        temperature=0.7,
        update=learn,
        on_update=records.append,
        reward_timeout_s=5.0,
    )
    return defaults | changes


def run(engine, **changes):
    """The records of a run, and the state that it returned."""
    records = []
    state = asyncio.run(train(**arguments(engine, records, **changes)))
    return records, state


def consumed(records):
    return [rollout for record in records for group in record.groups for rollout in group.rollouts]
