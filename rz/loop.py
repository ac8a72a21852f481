"""The event loop that drives engine, rewards and learner by the rules of rz.schedule; it alone holds state.

A turn is a step of the engine or the begin or the end of an update, and between them the rewards get to run. A reward
is started the moment its response finishes. An update either takes its turn, or runs in a thread beside overlap_steps
steps of the engine. What happens next is counted, never timed: an update begins when its responses are generated, and
ends, with its publish, after so many steps. So a run repeats itself, however long rewards and updates take.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import attrs
from torch import Tensor

from rz import schedule, turn
from rz.batch import Group, Request, Rollout, TrainBatch
from rz.engine.interface import Engine
from rz.rewards import Id, Task, cancel, reward_of, rewarded
from rz.schedule import Settings
from rz.snapshot import Params, Snapshot, snapshot


@attrs.frozen(kw_only=True, eq=False)
class UpdateRecord:
    """One update, as it is reported.

    Args:
        state: after the update.
        groups: consumed, in order of prompts, with their rewards.  batch: the same, stacked.
        left_out: groups that were dropped for want of a reward.
        metrics: those of the update function, and: policy_version (after the update, 1 for the first of a run; the
            tokens were consumed at one less, and lags are relative to that), tokens, lag_mean, lag_max, audited_tokens
            and differing_tokens (since the last record), dropped_groups, engine_steps, seconds (the total) and
            PART_seconds.
        seconds: rollout, reward_wait, update, audit, publish, and total, all since the last record. Parts of an update
            beside the engine overlap.
        engine_steps: since the last record.
        snapshot: makes the value from which the run goes on as if never interrupted, if called within on_update; None
            where nothing was published while responses were in flight.
    """

    state: Any
    groups: tuple[Group, ...]
    left_out: tuple[Group, ...]
    batch: TrainBatch
    metrics: Mapping[str, Any]
    seconds: Mapping[str, float]
    engine_steps: int
    snapshot: Callable[[], Snapshot] | None


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
    audit: turn.Audit | None = None,
    on_update: Callable[[UpdateRecord], None] | None = None,
    on_response: Callable[[Rollout], None] | None = None,
    on_end: Callable[[Callable[[], Snapshot]], None] | None = None,
    stop: asyncio.Event | None = None,
    reward_timeout_s: float,
    drop_unscored: bool = False,
    overlap_steps: int = 0,
    first_prompt: int = 0,
    donates: bool = False,
    resume: Snapshot | None = None,
) -> Any:
    """Make settings.updates updates, sampling and learning by turns or side by side.

    Args:
        state: the learner's, with a `version`; replaced by what update returns, and changed only if that donates.
        engine: serves the params of state, under the same version, with nothing running. It is left open, and ends with
            the params of the last publish.
        update: (state, batch) to (state one version later, metrics). Blocking; in a thread if overlap_steps > 0.
        publish_params: what the engine gets of a state. The last exact_lag + 1 of them are kept.
        audit: (params, responses) to what it replayed of them. Called after each update for which the engine made a
            step, before the publish, with the params that the engine serves, and the responses that gained tokens since
            its last call, each with the place of the first of these; they are all of engine.version, and it may replay
            them and no others. So every token of every consumed response is seen exactly once, under its own weights.
        on_update: called after each update and its publish.
        on_response: called with each response as it finishes, before its reward is known, in an order that repeats.
        on_end: called however the run ends, with a function that makes the snapshot of its last publish.
        stop: when set, the turn is finished, running responses are aborted, and the state is returned. Responses not
            consumed by then are lost to this run, as is an update under way beside the engine, and tokens sampled since
            the last update are not audited.
        reward_timeout_s: > 0, seconds. How long an update waits for the rewards of its groups; where it runs beside the
            engine, the engine's steps count.
        drop_unscored: a group whose reward is late, raises or is no finite number is left out of its update, and
            counted, instead of ending the run. An update of no group at all ends it. What is late is a matter of time,
            so a run that left a late one out need not repeat.
        overlap_steps: >= 0, engine steps beside each update (fewer if the engine runs out of work); 0 with exact_lag.
        donates: update overwrites tensors of the state that it is given, but not where it raises ValueError. So no
            snapshot can be made from then until the publish of what it returns. Not with overlap_steps, publish_every
            > 1 or exact_lag, whose last snapshot needs the older state.
        first_prompt: index of the first prompt; later groups follow in order of index.
        resume: go on from here; engine serves resume.history[0] under resume.plan.served, and state is resume.state.
    Returns: the state after the last update.
    Raises: ValueError if engine and state differ in version, or for a number out of range. For a reward,
        naming prompt and sample: TimeoutError if it is late, RuntimeError if score raises, TypeError or ValueError if
        it is no finite number. RuntimeError if update does not raise the version by one, the engine stalls, or a
        token's version breaks the bound. What engine, task, update, audit and callbacks raise passes through. Pending
        rewards are cancelled; they, and an update in its thread, are waited for, for reward_timeout_s at most.
    """
    if not 0 < reward_timeout_s < math.inf:
        raise ValueError(f"reward_timeout_s must be > 0 and finite, got {reward_timeout_s}")
    if overlap_steps < 0 or (overlap_steps and settings.exact_lag is not None):
        raise ValueError(f"overlap_steps must be >= 0, and 0 with exact_lag, got {overlap_steps}")
    if donates and (overlap_steps or settings.publish_every > 1 or settings.exact_lag is not None):
        raise ValueError("donates must be False with overlap_steps, publish_every > 1 or exact_lag, got True")
    if resume is None:
        plan = schedule.start(settings, version=state.version, first_prompt=first_prompt)
        resume = Snapshot(plan=plan, state=state, history=(publish_params(state),), responses=())
    plan = attrs.evolve(resume.plan, settings=settings)
    for name, version, rule in (("engine", engine.version, plan.served), ("state", state.version, plan.version)):
        if version != rule:
            raise ValueError(f"{name} must have the version that the run goes on from ({rule}), got {version}")
    exact = settings.exact_lag is not None
    params = deque(
        resume.history if exact else resume.history[:1], maxlen=(settings.exact_lag or 0) + 1
    )  # [0] is served
    request = partial(Request, max_tokens=max_tokens, temperature=temperature, stop_ids=task.stop_ids)
    prompts = {group.prompt_index: turn.prompt_of(task, group.prompt_index) for group in plan.groups}  # of open groups
    scored: dict[Id, tuple[Rollout, asyncio.Task[float]]] = {}  # finished, not consumed
    consumed: dict[Id, tuple[Rollout, asyncio.Task[float]]] = {}  # by updates since the last boundary
    replays: dict[Id, Tensor] = {}  # what was replayed of the open groups' responses
    seen: dict[Id, int] = {}  # tokens of theirs that the audit was shown
    for saved in resume.responses:
        turn.restore(saved, engine, task, prompts, request, scored, replays)
        seen[saved.rollout.prompt_index, saved.rollout.sample] = len(saved.rollout.response_ids)
    boundary = plan, state, tuple(params)

    def last_snapshot() -> Snapshot:
        if boundary is None:
            raise RuntimeError(
                "a snapshot must be made before an update that donates or after its publish, got between"
            )
        return snapshot(*boundary, engine.running(), consumed | scored, replays)

    def donating_update(state: Any, batch: TrainBatch) -> tuple[Any, Mapping[str, Any]]:
        nonlocal boundary
        before, boundary = boundary, None
        try:
            return update(state, batch)
        except ValueError:
            boundary = before
            raise

    unaudited: list[Rollout] = []  # finished since the last audit
    seconds, steps, quiet, began = dict.fromkeys(turn.PARTS, 0.0), 0, (0, None), perf_counter()
    under_way: asyncio.Task | None = None  # the update
    left = 0  # engine steps until it ends
    try:
        while (under_way or not schedule.is_done(plan)) and not (stop is not None and stop.is_set()):
            if under_way is None and (chosen := schedule.next_update(plan)) is not None:
                allowed, plan, left = schedule.allowed_versions(plan), schedule.consume(plan), overlap_steps
                gather = partial(
                    rewarded,
                    chosen,
                    prompts,
                    scored,
                    group_size=settings.group_size,
                    limit_s=reward_timeout_s,
                    drop_unscored=drop_unscored,
                )
                step = donating_update if donates else update
                learn = turn.learn(gather, state, step, allowed, replays, seconds, beside=overlap_steps > 0)
                under_way = asyncio.create_task(learn)
                await asyncio.sleep(0)  # it starts before the engine's next step
            idle = plan.in_flight == 0 and schedule.next_response(plan) is None
            if under_way is None or (left > 0 and not idle):
                with turn.timed(seconds, "rollout"):
                    plan = turn.fill(plan, engine, task, prompts, request, run_seed)
                    finished = engine.step()
                steps, left, quiet = steps + 1, left - 1, turn.progress(engine, finished, quiet)
                for rollout in finished:
                    plan = schedule.finish(plan, rollout.prompt_index, rollout.sample)
                    reward = asyncio.create_task(reward_of(task, prompts[rollout.prompt_index], rollout))
                    scored[rollout.prompt_index, rollout.sample] = rollout, reward
                    unaudited.append(rollout)
                    if on_response is not None:
                        on_response(rollout)
                await asyncio.sleep(0)  # the turn of rewards and update
                if under_way is not None and under_way.done():
                    under_way.result()  # raises what it raised
                continue
            state, groups, left_out, batch, metrics = await under_way
            under_way = None
            with turn.timed(seconds, "audit"):
                counts = (0, 0)
                if audit is not None and steps:
                    counts = turn.audited(audit, params[0], engine, unaudited, seen, replays)
                unaudited.clear()
            for group in (*groups, *left_out):
                del prompts[group.prompt.index]
                for key in ((rollout.prompt_index, rollout.sample) for rollout in group.rollouts):
                    consumed[key] = scored.pop(key)
                    seen.pop(key, None)
            with turn.timed(seconds, "publish"):
                published = schedule.due_version(plan) > engine.version
                if published or exact:
                    params.append(publish_params(state))
                plan = schedule.publish(plan)
                if published:
                    engine.publish(params[0], plan.served)
                complete = published or plan.in_flight == 0
                if complete:
                    current = () if published or exact else (publish_params(state),)
                    boundary = plan, state, (*params, *current)
                    for key in consumed:
                        replays.pop(key, None)
                    consumed.clear()
            seconds["total"], began = perf_counter() - began, perf_counter()
            own = turn.own_metrics(state.version, batch, counts, len(left_out), steps, seconds)
            record = UpdateRecord(
                state=state,
                groups=groups,
                left_out=left_out,
                batch=batch,
                metrics={**metrics, **own},
                seconds=dict(seconds),
                engine_steps=steps,
                snapshot=last_snapshot if complete else None,
            )
            seconds.update(dict.fromkeys(turn.PARTS, 0.0))
            steps = 0
            if on_update is not None:
                on_update(record)
    finally:
        try:
            if on_end is not None:
                on_end(last_snapshot)
        finally:
            pending = [reward for _, reward in scored.values()] + ([] if under_way is None else [under_way])
            await cancel(pending, reward_timeout_s)
    engine.abort([(rollout.prompt_index, rollout.sample) for rollout in engine.running()])
    return state
