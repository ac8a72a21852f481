"""Rewards: started when a response finishes, awaited by the update that needs them, never for longer than a limit."""

import asyncio
import concurrent.futures
import inspect
import math
import numbers
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rz.batch import Group, Prompt, Rollout

Id = tuple[int, int]  # (prompt_index, sample)


class Task(Protocol):
    """What the loop asks of a task.

    `prompt` is a function of the index alone. `score` returns a finite number; it is a coroutine function, or a plain
    one, which is called in a new thread for each response, so in several at once.
    """

    stop_ids: tuple[int, ...]

    def prompt(self, index: int) -> Prompt: ...

    def score(self, prompt: Prompt, response_ids: tuple[int, ...]) -> float: ...


async def reward_of(task: Task, prompt: Prompt, rollout: Rollout) -> float:
    """The reward of one response.

    Raises: RuntimeError if score raises, TypeError or ValueError if it gives no finite number; it names the prompt, the
        sample and the rule.
    """
    name = f"reward of prompt {prompt.index}, sample {rollout.sample}"
    try:
        if inspect.iscoroutinefunction(task.score):
            value, error = await task.score(prompt, rollout.response_ids), None
        else:
            value, error = await in_thread(task.score, prompt, rollout.response_ids)
    except (Exception, asyncio.CancelledError) as raised:
        value, error = None, raised
    if error is not None:
        raise RuntimeError(f"{name} must be a finite number, got an error from score: {error!r}") from error
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a finite number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def in_thread(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[tuple[Any, BaseException | None]]:
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


async def rewarded(
    chosen: Sequence[int],
    prompts: Mapping[int, Prompt],
    scored: Mapping[Id, tuple[Rollout, asyncio.Task[float]]],
    *,
    group_size: int,
    limit_s: float,
    drop_unscored: bool,
) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """The groups of these prompts, once their rewards are there.

    Args:
        drop_unscored: a group with a reward that is late or raised is left out, instead of ending the run.
    Returns: (groups to train on, groups left out, whose missing rewards are NaN).
    Raises: TimeoutError for a late reward, or what the reward raised; RuntimeError if no group is left.
    """
    ids = [(index, sample) for index in chosen for sample in range(group_size)]
    rewards = {key: scored[key][1] for key in ids}
    when = asyncio.ALL_COMPLETED if drop_unscored else asyncio.FIRST_EXCEPTION
    if not all(reward.done() for reward in rewards.values()):
        await asyncio.wait(rewards.values(), timeout=limit_s, return_when=when)
    late = [key for key, reward in rewards.items() if not reward.done()]
    failed = [key for key, reward in rewards.items() if reward.done() and reward.exception()]
    if failed and not drop_unscored:
        rewards[failed[0]].result()
    if late and not drop_unscored:
        raise TimeoutError(
            f"reward of prompt {late[0][0]}, sample {late[0][1]} must arrive within reward_timeout_s ({limit_s} s) "
            f"of the update that needs it, got none ({len(late)} of {len(rewards)} are late)"
        )
    for key in late:
        rewards[key].add_done_callback(_read)
        rewards[key].cancel()
    missing = {*late, *failed}
    kept, left_out = [], []
    for index in chosen:
        keys = [(index, sample) for sample in range(group_size)]
        values = [math.nan if key in missing else rewards[key].result() for key in keys]
        group = Group(prompt=prompts[index], rollouts=[scored[key][0] for key in keys], rewards=values)
        (left_out if missing & set(keys) else kept).append(group)
    if not kept:
        first = min(missing)
        reason = f"{rewards[first].exception()}" if first in failed else f"none within reward_timeout_s ({limit_s} s)"
        raise RuntimeError(f"an update must have at least one group with all its rewards, got none: {reason}")
    return tuple(kept), tuple(left_out)


async def cancel(tasks: Sequence[asyncio.Task], limit_s: float) -> None:
    """Cancel the tasks that are pending; wait no longer than the limit for those that resist."""
    for task in tasks:
        task.cancel()
    if tasks:
        done, _ = await asyncio.wait(tasks, timeout=limit_s)
        for task in done:
            _read(task)


def _read(task: asyncio.Task) -> None:
    """So that asyncio does not report its error as lost."""
    task.cancelled() or task.exception()
