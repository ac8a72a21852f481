"""What the event loop does in a turn: responses submitted or put back, an update from its rewards on, counts."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

import attrs
import torch
from torch import Tensor

from rz import schedule
from rz.batch import Group, Prompt, Request, Rollout, TrainBatch, stack
from rz.engine.interface import Engine
from rz.rewards import Id, Task, in_thread, reward_of
from rz.schedule import Schedule
from rz.snapshot import Params, with_replay

PARTS = ("rollout", "reward_wait", "update", "audit", "publish")  # of the time of an update
STALL_STEPS = 10_000  # engine steps in which no response may gain a token before the run is ended
UPDATE_LIMIT_S = 3600.0  # that the loop waits for an update that runs in a thread

Replays = Mapping[Id, tuple[Tensor, Tensor]]  # places [M] int64 in the response and their logprobs [M] float32
Audit = Callable[[Params, Sequence[tuple[Rollout, int]]], Replays]


def prompt_of(task: Task, index: int) -> Prompt:
    prompt = task.prompt(index)
    if prompt.index != index:
        raise ValueError(f"prompt {index} of the task must have index {index}, got {prompt.index}")
    return prompt


def restore(saved, engine: Engine, task: Task, prompts: Mapping[int, Prompt], request, scored, replays) -> None:
    """Put a saved response back where it was: into the engine, or among the finished."""
    rollout, key = saved.rollout, (saved.rollout.prompt_index, saved.rollout.sample)
    if rollout.prompt_ids != prompts[key[0]].token_ids:
        raise ValueError(f"prompt {key[0]} of the task must be the one that the run began with, got another")
    if rollout.replay_logprobs is not None:
        replays[key] = rollout.replay_logprobs
    rollout = attrs.evolve(rollout, replay_logprobs=None)
    if rollout.stop_reason == "running":
        new = request(prompt_index=key[0], sample=key[1], prompt_ids=rollout.prompt_ids, seed=rollout.seed)
        engine.submit(new, rollout)
        return
    known = asyncio.sleep(0, saved.reward) if saved.reward is not None else reward_of(task, prompts[key[0]], rollout)
    scored[key] = rollout, asyncio.create_task(known)


def fill(
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
            prompts[index] = prompt_of(task, index)
        seed = schedule.sample_seed(run_seed, index, sample)
        engine.submit(request(prompt_index=index, sample=sample, prompt_ids=prompts[index].token_ids, seed=seed))
        plan = schedule.submit(plan)
    return plan


async def learn(gather, state, update, allowed: range, replays, seconds: dict[str, float], *, beside: bool):
    """One update, from its rewards on: (state, groups, groups left out, batch, metrics)."""
    with timed(seconds, "reward_wait"):
        groups, left_out = await gather()
    known = lambda rollout: with_replay(rollout, replays.get((rollout.prompt_index, rollout.sample)))
    groups = tuple(attrs.evolve(group, rollouts=[known(rollout) for rollout in group.rollouts]) for group in groups)
    _check_versions(groups, allowed)
    batch, before = stack(groups), state.version
    with timed(seconds, "update"):
        if beside:
            thread = in_thread(update, state, batch)
            try:
                await asyncio.wait([thread], timeout=UPDATE_LIMIT_S)
            except asyncio.CancelledError:  # the run is ending: a thread that computes then would abort the process
                await asyncio.wait([thread])
                raise
            if not thread.done():
                raise TimeoutError(f"update to version {before + 1} must end within {UPDATE_LIMIT_S} s, got none")
            outcome, error = thread.result()
            if error is not None:
                raise error
            state, metrics = outcome
        else:
            state, metrics = update(state, batch)
    if state.version != before + 1:
        raise RuntimeError(f"update must return version {before + 1}, got {state.version}")
    return state, groups, left_out, batch, metrics


def _check_versions(groups: Iterable[Group], allowed: range) -> None:
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        versions = rollout.policy_versions
        name = f"policy_versions of prompt {rollout.prompt_index}, sample {rollout.sample}"
        if (versions.diff() < 0).any():
            raise RuntimeError(f"{name} must never fall, got {versions.tolist()}")
        if versions.numel() and not (allowed[0] <= int(versions[0]) and int(versions[-1]) <= allowed[-1]):
            raise RuntimeError(f"{name} must be within {allowed[0]} to {allowed[-1]}, got {versions.tolist()}")


def audited(
    audit: Audit,
    params: Params,
    engine: Engine,
    finished: Iterable[Rollout],
    seen: dict[Id, int],
    replays: dict[Id, Tensor],
) -> tuple[int, int]:
    """(tokens replayed, tokens whose bits differ); what was replayed enters `replays`, what was shown `seen`."""
    known = {(r.prompt_index, r.sample): r for r in (*finished, *engine.running())}
    grown = {key: seen.get(key, 0) for key, r in known.items() if len(r.response_ids) > seen.get(key, 0)}
    tokens = differing = 0
    for key, (places, values) in audit(params, [(known[key], first) for key, first in grown.items()]).items():
        reported = known[key].behaviour_logprobs[places]
        tokens += len(places)
        differing += int((values.view(torch.int32) != reported.view(torch.int32)).sum())
        before = with_replay(known[key], replays.get(key, values[:0]))
        replays[key] = before.replay_logprobs.index_put((places,), values)
    seen |= {key: len(known[key].response_ids) for key in grown}
    return tokens, differing


def own_metrics(
    version: int, batch: TrainBatch, counts: tuple[int, int], dropped: int, steps: int, seconds: Mapping[str, float]
) -> dict[str, float]:
    lags = (version - 1 - batch.policy_versions)[batch.mask]
    return {
        "policy_version": version,
        "tokens": lags.numel(),
        "lag_mean": float(lags.double().mean()) if lags.numel() else 0.0,
        "lag_max": int(lags.max()) if lags.numel() else 0,
        "audited_tokens": counts[0],
        "differing_tokens": counts[1],
        "dropped_groups": dropped,
        "engine_steps": steps,
        "seconds": seconds["total"],
        **{f"{part}_seconds": seconds[part] for part in PARTS},
    }


def progress(engine: Engine, finished: Sequence[Rollout], quiet: tuple[int, int | None]) -> tuple[int, int | None]:
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
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the time of the block to seconds[part]."""
    began = perf_counter()
    yield
    seconds[part] += perf_counter() - began
