"""The event loop that drives engine, rewards and learner by the rules of rz.schedule; it alone holds state.

One process takes turns: a step of the engine or an update, and between them the rewards get to run. A reward is started
the moment its response finishes. What happens next is counted, never timed: a group is complete when its responses are
generated, and an update on it waits for its rewards. So a run repeats itself, however long the rewards take.
"""

import asyncio
import concurrent.futures
import inspect
import math
import numbers
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import attrs
from torch import Tensor

from rz import schedule
from rz.batch import Group, Prompt, Request, Rollout, TrainBatch, stack
from rz.engine.interface import Engine
from rz.schedule import Schedule, Settings

PARTS = ("rollout", "reward_wait", "update", "audit", "publish")  # of the time of an update
STALL_STEPS = 10_000  # engine steps in which no response may gain a token before the run is ended

Id = tuple[int, int]  # (prompt_index, sample)
Params = Mapping[str, Tensor]
Audit = Callable[[Params, Sequence[Rollout], Sequence[Rollout]], tuple[int, int]]


class Task(Protocol):
    """What the loop asks of a task.

    `prompt` is a function of the index alone. `score` returns a finite number; it is a coroutine function, or a plain
    one, which is called in a new thread for each response, so in several at once.
    """

    stop_ids: tuple[int, ...]

    def prompt(self, index: int) -> Prompt: ...

    def score(self, prompt: Prompt, response_ids: tuple[int, ...]) -> float: ...


@attrs.frozen(kw_only=True, eq=False)
class UpdateRecord:
    """One update, as it is reported.

    Args:
        state: after the update.
        groups: consumed, in order of prompts, with their rewards.  batch: the same, stacked.
        metrics: those of the update function, and: policy_version (after the update, 1 for the first of a run; the
            tokens were consumed at one less, and lags are relative to that), tokens, lag_mean, lag_max, audited_tokens
            and differing_tokens (since the last record), engine_steps, seconds (the total) and PART_seconds.
        seconds: rollout, reward_wait, update, audit, publish, and total, all since the last record.
        engine_steps: since the last record.
    """

    state: Any
    groups: tuple[Group, ...]
    batch: TrainBatch
    metrics: Mapping[str, Any]
    seconds: Mapping[str, float]
    engine_steps: int


async def train(
    *,
    state: Any,
    engine: Engine,
    task: Task,
    settings: Settings,
    run_seed: int,
    max_tokens: int,
    temperature: float,
    update: Callable[[Any, TrainBatch], tuple[Any, Mapping[str, Any]]],
    publish_params: Callable[[Any], Params] = lambda state: state.params,
    audit: Audit | None = None,
    on_update: Callable[[UpdateRecord], None] | None = None,
    on_response: Callable[[Rollout], None] | None = None,
    stop: asyncio.Event | None = None,
    reward_timeout_s: float,
    first_prompt: int = 0,
) -> Any:
    """Make settings.updates updates, sampling and learning by turns.

    Args:
        state: the learner's, with a `version`; never changed, replaced by what update returns.
        engine: serves the params of state, under the same version, with nothing running. It is left open, and ends with
            the params of the last update (with exact_lag, those so many versions behind).
        update: (state, batch) to (state one version later, metrics). Blocking.
        publish_params: what the engine gets of a state. The last exact_lag + 1 of them are kept.
        audit: (params, finished, running) to (tokens replayed, tokens that differ). Called once an update, before the
            publish, with the params that the engine serves; it replays the tokens of engine.version and no others.
            `finished` are the responses that ended since its last call and `running` those in flight, without the ones
            that have no token of that version. A response passed as running comes again, with newer tokens. So every
            token of every consumed response is seen exactly once, under the weights that sampled it.
        on_update: called after each update and its publish.
        on_response: called with each response as it finishes, before its reward is known, in an order that repeats.
        stop: when set, the turn is finished, running responses are aborted, and the state is returned. Responses not
            consumed by then are lost, and tokens sampled since the last update are not audited.
        reward_timeout_s: > 0, seconds. How long an update waits for the rewards of its groups. Time in which engine or
            learner block the event loop does not count.
        first_prompt: index of the first prompt; later groups follow in order of index.
    Returns: the state after the last update.
    Raises: ValueError if engine and state differ in version, or for reward_timeout_s or first_prompt. For a reward,
        naming prompt and sample: TimeoutError if it is late, RuntimeError if score raises, TypeError or ValueError if
        it is no finite number. RuntimeError if update does not raise the version by one, the engine stalls, or a
        token's version breaks the bound. What engine, task, update, audit and callbacks raise passes through. Pending
        rewards are cancelled.
    """
    if engine.version != state.version:
        raise ValueError(f"engine must serve the version of state ({state.version}), got {engine.version}")
    if not 0 < reward_timeout_s < math.inf:
        raise ValueError(f"reward_timeout_s must be > 0 and finite, got {reward_timeout_s}")
    plan = schedule.start(settings, version=state.version, first_prompt=first_prompt)
    params = deque([publish_params(state)], maxlen=(settings.exact_lag or 0) + 1)  # the engine serves params[0]
    request = partial(Request, max_tokens=max_tokens, temperature=temperature, stop_ids=task.stop_ids)
    prompts: dict[int, Prompt] = {}  # of open groups
    scored: dict[Id, tuple[Rollout, asyncio.Task[float]]] = {}  # finished, not consumed
    unaudited: list[Rollout] = []  # finished since the last audit
    seconds, steps, quiet, began = dict.fromkeys(PARTS, 0.0), 0, (0, None), perf_counter()
    try:
        while not schedule.is_done(plan) and not (stop is not None and stop.is_set()):
            chosen = schedule.next_update(plan)
            if chosen is None:
                with _timed(seconds, "rollout"):
                    plan = _fill(plan, engine, task, prompts, request, run_seed)
                    finished = engine.step()
                    steps += 1
                    quiet = _progress(engine, finished, quiet)
                    for rollout in finished:
                        plan = schedule.finish(plan, rollout.prompt_index, rollout.sample)
                        reward = asyncio.create_task(_reward(task, prompts[rollout.prompt_index], rollout))
                        scored[rollout.prompt_index, rollout.sample] = rollout, reward
                        unaudited.append(rollout)
                        if on_response is not None:
                            on_response(rollout)
                    await asyncio.sleep(0)  # the rewards' turn
                continue
            with _timed(seconds, "reward_wait"):
                groups = await _rewarded(chosen, prompts, scored, settings.group_size, reward_timeout_s)
            with _timed(seconds, "update"):
                _check_versions(groups, schedule.allowed_versions(plan))
                batch = stack(groups)
                state, metrics = update(state, batch)
                if state.version != plan.version + 1:
                    raise RuntimeError(f"update must return version {plan.version + 1}, got {state.version}")
            with _timed(seconds, "audit"):
                counts = (0, 0) if audit is None else _audited(audit, params[0], engine, unaudited)
                unaudited.clear()
            with _timed(seconds, "publish"):
                plan = schedule.consume(plan)
                params.append(publish_params(state))
                if (version := schedule.served_version(plan)) > engine.version:
                    engine.publish(params[0], version)
            seconds["total"], began = perf_counter() - began, perf_counter()
            metrics = {**metrics, **_own_metrics(state.version, batch, counts, steps, seconds)}
            record = UpdateRecord(
                state=state, groups=groups, batch=batch, metrics=metrics, seconds=seconds, engine_steps=steps
            )
            seconds, steps = dict.fromkeys(PARTS, 0.0), 0
            if on_update is not None:
                on_update(record)
        engine.abort([(rollout.prompt_index, rollout.sample) for rollout in engine.running()])
        return state
    finally:
        await _cancelled([reward for _, reward in scored.values()], reward_timeout_s)


def _fill(
    plan: Schedule,
    engine: Engine,
    task: Task,
    prompts: dict[int, Prompt],
    request: Callable[..., Request],
    run_seed: int,
) -> Schedule:
    """Submit what the schedule allows; the prompt of a new group enters `prompts`."""
    while (response := schedule.next_response(plan)) is not None:
        index, sample = response
        if sample == 0:
            prompts[index] = prompt = task.prompt(index)
            if prompt.index != index:
                raise ValueError(f"prompt {index} of the task must have index {index}, got {prompt.index}")
        seed = schedule.sample_seed(run_seed, index, sample)
        engine.submit(request(prompt_index=index, sample=sample, prompt_ids=prompts[index].token_ids, seed=seed))
        plan = schedule.submit(plan)
    return plan


async def _reward(task: Task, prompt: Prompt, rollout: Rollout) -> float:
    """The reward of one response; an error names the prompt, the sample and the rule."""
    name = f"reward of prompt {prompt.index}, sample {rollout.sample}"
    try:
        if inspect.iscoroutinefunction(task.score):
            value, error = await task.score(prompt, rollout.response_ids), None
        else:
            value, error = await _in_thread(task.score, prompt, rollout.response_ids)
    except (Exception, asyncio.CancelledError) as raised:
        value, error = None, raised
    if error is not None:
        raise RuntimeError(f"{name} must be a finite number, got an error from score: {error!r}") from error
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a finite number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _in_thread(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[tuple[Any, BaseException | None]]:
    """What the function returns, and what it raises. The thread is a daemon: if it hangs, the process can still end."""
    outcome: concurrent.futures.Future = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled, so the thread can always set it
    threading.Thread(target=_call, args=(outcome, function, *arguments), daemon=True).start()
    return asyncio.wrap_future(outcome)


def _call(outcome: concurrent.futures.Future, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        result = function(*arguments), None
    except BaseException as error:  # a value here: an asyncio future refuses StopIteration as an exception
        result = None, error
    outcome.set_result(result)


async def _rewarded(
    chosen: Sequence[int],
    prompts: dict[int, Prompt],
    scored: dict[Id, tuple[Rollout, asyncio.Task[float]]],
    group_size: int,
    limit_s: float,
) -> tuple[Group, ...]:
    """The groups of these prompts, once their rewards are there; they leave `prompts` and `scored`."""
    rewards = {(index, sample): scored[index, sample][1] for index in chosen for sample in range(group_size)}
    await asyncio.wait(rewards.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
    for reward in rewards.values():
        if reward.done():
            reward.result()  # raises what it raised
    late = [key for key, reward in rewards.items() if not reward.done()]
    if late:
        raise TimeoutError(
            f"reward of prompt {late[0][0]}, sample {late[0][1]} must arrive within reward_timeout_s ({limit_s} s) "
            f"of the update that needs it, got none ({len(late)} of {len(rewards)} are late)"
        )
    groups = []
    for index in chosen:
        rollouts, tasks = zip(*(scored.pop((index, sample)) for sample in range(group_size)), strict=True)
        groups.append(Group(prompt=prompts.pop(index), rollouts=rollouts, rewards=[task.result() for task in tasks]))
    return tuple(groups)


async def _cancelled(rewards: Sequence[asyncio.Task[float]], limit_s: float) -> None:
    for reward in rewards:
        reward.cancel()
    if rewards:
        done, _ = await asyncio.wait(rewards, timeout=limit_s)
        for reward in done:
            reward.cancelled() or reward.exception()  # read, so that asyncio does not report it as lost


def _check_versions(groups: Iterable[Group], allowed: range) -> None:
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        versions = rollout.policy_versions
        name = f"policy_versions of prompt {rollout.prompt_index}, sample {rollout.sample}"
        if (versions.diff() < 0).any():
            raise RuntimeError(f"{name} must never fall, got {versions.tolist()}")
        if versions.numel() and not (allowed[0] <= int(versions[0]) and int(versions[-1]) <= allowed[-1]):
            raise RuntimeError(f"{name} must be within {allowed[0]} to {allowed[-1]}, got {versions.tolist()}")


def _audited(audit: Audit, params: Params, engine: Engine, finished: Iterable[Rollout]) -> tuple[int, int]:
    sampled_now = lambda rollouts: [r for r in rollouts if (r.policy_versions == engine.version).any()]
    return audit(params, sampled_now(finished), sampled_now(engine.running()))


def _own_metrics(
    version: int, batch: TrainBatch, counts: tuple[int, int], steps: int, seconds: Mapping[str, float]
) -> dict[str, float]:
    lags = (version - 1 - batch.policy_versions)[batch.mask]
    return {
        "policy_version": version,
        "tokens": lags.numel(),
        "lag_mean": float(lags.double().mean()) if lags.numel() else 0.0,
        "lag_max": int(lags.max()) if lags.numel() else 0,
        "audited_tokens": counts[0],
        "differing_tokens": counts[1],
        "engine_steps": steps,
        "seconds": seconds["total"],
        **{f"{part}_seconds": seconds[part] for part in PARTS},
    }


def _progress(engine: Engine, finished: Sequence[Rollout], quiet: tuple[int, int | None]) -> tuple[int, int | None]:
    """(steps since a response finished, tokens in flight when last counted); RuntimeError if the engine stalls."""
    if finished:
        return 0, None
    steps, before = quiet[0] + 1, quiet[1]
    if steps % STALL_STEPS:
        return steps, before
    running = engine.running()
    tokens = sum(len(rollout.response_ids) for rollout in running)
    if tokens == before:
        ids = [(rollout.prompt_index, rollout.sample) for rollout in running[:8]]
        raise RuntimeError(
            f"engine must sample a token within {STALL_STEPS} steps, got none; {len(running)} responses "
            f"are in flight, the first of them (prompt, sample) {ids}"
        )
    return steps, tokens


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the time of the block to seconds[part]."""
    began = perf_counter()
    yield
    seconds[part] += perf_counter() - began
