"""Pure rules of a run: which response to submit, when to update, which weights to serve.

A schedule is a value. It changes by counted events alone (a response submitted, a response finished, an update), never
by the time of day, so all that happens in a run is a function of the settings and of the lengths of the responses.

The lag of a token is the learner's version that consumes it (before the update) minus the version of the forward pass
that sampled it. Write P for groups_per_update, L for max_lag, v for the learner's version, s <= v for the version that
the engine serves: s < v while an update is under way beside the engine, or when not every version is published. A group
is *open* from its admission (its first response is submitted) until an update begins to consume it. It carries the
version a = s of its admission, and none of its tokens is older. So it is in time if one of the updates at versions
v .. a + L takes it: those are a + L - v + 1 updates of P groups, and the schedule is *feasible* if for every a of an
open group

    count(open groups admitted at versions <= a)  <=  P * (a + L - v + 1).

- Admission keeps it. A new group has a = s, the largest of all, so there is one new condition:
  open <= P * (s + L - v + 1).
- An update takes the P complete groups admitted first, and runs only if what it leaves is feasible at v + 1; else the
  learner waits for the oldest responses in flight. So the schedule is always feasible.
- No token exceeds the bound. Once the update at v is made, a group with a = v - L has P * 0 places, so that update
  takes it or does not run.
- No finished group is dropped: a group leaves only by being consumed, and updates * P groups are admitted in all.
- No deadlock. With nothing in flight and nothing to submit, every open group is complete, and either as many are open
  as may be, P * (s + L - v + 1) >= P as s >= v - L between two updates (publish_every <= L + 1), or all have been
  admitted and a multiple of P, not 0 before the end, is open. The P oldest can go: each count falls by P or to 0 while
  its limit falls by P, and stays >= 0. So the update runs.
- max_lag = 0: at most P groups are open and an update needs P, so it generates P groups, updates, and repeats. While an
  update is under way nothing may be admitted.

The exact dial serves weights exact_lag versions behind and paces by L = 0 and a = v. Then nothing is in flight at an
update, each update consumes what was sampled wholly under one version, and every lag is min(updates made, exact_lag).
"""

import hashlib

import attrs


def _at_least(rule: int):
    def check(_, field: attrs.Attribute, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < rule:
            raise ValueError(f"{field.name} must be an integer >= {rule}, got {value!r}")

    return check


@attrs.frozen(kw_only=True)
class Settings:
    """How a run is paced.

    Args:
        group_size: >= 2. Responses to one prompt; the mean of their rewards is the baseline.
        groups_per_update: >= 1.
        max_lag: >= 0, versions. No token is consumed at a larger lag. 0 is synchronous training.
        slots: >= 1. Responses in the engine at once, at most.
        updates: >= 0. Updates that the run makes.
        exact_lag: None, or in [0, max_lag]: serve weights exactly so many versions behind, for controlled experiments.
        publish_every: in [1, max_lag + 1]. Updates between two publishes; 1 with exact_lag.
    Raises: ValueError naming the field, the rule and the value.
    """

    group_size: int = attrs.field(validator=_at_least(2))
    groups_per_update: int = attrs.field(validator=_at_least(1))
    max_lag: int = attrs.field(validator=_at_least(0))
    slots: int = attrs.field(validator=_at_least(1))
    updates: int = attrs.field(validator=_at_least(0))
    exact_lag: int | None = attrs.field(default=None, validator=attrs.validators.optional(_at_least(0)))
    publish_every: int = attrs.field(default=1, validator=_at_least(1))

    def __attrs_post_init__(self) -> None:
        if self.publish_every > (most := 1 if self.exact_lag is not None else self.max_lag + 1):
            rule = "1 with exact_lag" if self.exact_lag is not None else f"<= max_lag + 1 ({most})"
            raise ValueError(f"publish_every must be {rule}, got {self.publish_every}")
        if self.exact_lag is not None and self.exact_lag > self.max_lag:
            raise ValueError(f"exact_lag must be <= max_lag ({self.max_lag}), got {self.exact_lag}")


@attrs.frozen(kw_only=True)
class OpenGroup:
    """A group that was admitted and is not consumed.

    Args:
        prompt_index: its prompt.
        admitted_version: the version that the engine served when its first response was submitted (with exact_lag, the
            learner's version then).
        finished: the samples that have been generated, rewarded or not; it is complete when all have.
    """

    prompt_index: int
    admitted_version: int
    finished: frozenset[int] = frozenset()


@attrs.frozen(kw_only=True)
class Schedule:
    """Where a run stands.

    Args:
        start_version, first_prompt: the learner's version and the prompt that the run began with.
        version: of the learner: start_version plus the updates begun.
        served: the version that the engine samples under.
        admitted: groups admitted so far; the next one is of prompt first_prompt + admitted.
        next_sample: the response to submit next of the group admitted last; 0 if all of them are submitted.
        in_flight: responses submitted and not finished.
        groups: the open groups, in order of admission, which is the order of prompts.
    """

    settings: Settings
    start_version: int
    first_prompt: int
    version: int
    served: int
    admitted: int = 0
    next_sample: int = 0
    in_flight: int = 0
    groups: tuple[OpenGroup, ...] = ()


def start(settings: Settings, *, version: int = 0, first_prompt: int = 0) -> Schedule:
    """The schedule before anything is submitted. Raises ValueError if version or first_prompt is negative."""
    for name, value in (("version", version), ("first_prompt", first_prompt)):
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value}")
    return Schedule(
        settings=settings, start_version=version, first_prompt=first_prompt, version=version, served=version
    )


def sample_seed(run_seed: int, prompt_index: int, sample: int) -> int:
    """The seed of a response, in [0, 2**63): a hash of these three numbers alone, the same on every machine.

    It is the upper 63 bits of the 64-bit BLAKE2b digest of the text "run_seed,prompt_index,sample".
    """
    digest = hashlib.blake2b(f"{run_seed},{prompt_index},{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def is_done(schedule: Schedule) -> bool:
    """Whether all updates are begun."""
    return schedule.version - schedule.start_version >= schedule.settings.updates


def is_feasible(groups: tuple[OpenGroup, ...], version: int, settings: Settings) -> bool:
    """Whether updates of P groups, from version on, can take all of these in order of admission within the bound.

    The condition at the head of the module, for groups i = 0, 1, ...: i < P * (admitted_version + L - version + 1).
    """
    return all(
        place < settings.groups_per_update * (group.admitted_version + _pace(settings) - version + 1)
        for place, group in enumerate(groups)
    )


def next_response(schedule: Schedule) -> tuple[int, int] | None:
    """(prompt_index, sample) of the response to submit now, or None.

    The group admitted last is submitted to its end before another is admitted. None if the slots are full, if one more
    group could break the bound, or if the updates need no more groups.
    """
    settings = schedule.settings
    if schedule.in_flight >= settings.slots:
        return None
    if schedule.next_sample > 0:
        return schedule.groups[-1].prompt_index, schedule.next_sample
    if schedule.admitted >= settings.updates * settings.groups_per_update:
        return None
    if len(schedule.groups) >= settings.groups_per_update * (
        _admission(schedule) + _pace(settings) - schedule.version + 1
    ):
        return None
    return schedule.first_prompt + schedule.admitted, 0


def submit(schedule: Schedule) -> Schedule:
    """The schedule after next_response was submitted. Raises ValueError if there is none."""
    response = next_response(schedule)
    if response is None:
        raise ValueError("schedule must have a response to submit, got none")
    prompt_index, sample = response
    opened = (OpenGroup(prompt_index=prompt_index, admitted_version=_admission(schedule)),) if sample == 0 else ()
    return attrs.evolve(
        schedule,
        admitted=schedule.admitted + len(opened),
        next_sample=(sample + 1) % schedule.settings.group_size,
        in_flight=schedule.in_flight + 1,
        groups=schedule.groups + opened,
    )


def finish(schedule: Schedule, prompt_index: int, sample: int) -> Schedule:
    """The schedule after this response was generated. Raises ValueError if it is not in flight."""
    groups = schedule.groups
    place = next((i for i, group in enumerate(groups) if group.prompt_index == prompt_index), None)
    partly_submitted = schedule.next_sample > 0 and place == len(groups) - 1
    submitted = schedule.next_sample if partly_submitted else schedule.settings.group_size
    if place is None or not 0 <= sample < submitted or sample in groups[place].finished:
        raise ValueError(f"finished response must be in flight, got prompt {prompt_index}, sample {sample}")
    grown = attrs.evolve(groups[place], finished=groups[place].finished | {sample})
    return attrs.evolve(
        schedule, in_flight=schedule.in_flight - 1, groups=(*groups[:place], grown, *groups[place + 1 :])
    )


def submitted(schedule: Schedule) -> tuple[tuple[tuple[int, int], bool], ...]:
    """((prompt_index, sample), finished) of every submitted response of the open groups, in order of submission."""
    sizes = [schedule.settings.group_size] * len(schedule.groups)
    if schedule.next_sample:
        sizes[-1] = schedule.next_sample
    return tuple(
        ((group.prompt_index, sample), sample in group.finished)
        for group, size in zip(schedule.groups, sizes, strict=True)
        for sample in range(size)
    )


def next_update(schedule: Schedule) -> tuple[int, ...] | None:
    """The prompts whose groups the learner consumes now, in order of admission, or None if it has to wait.

    They are the groups_per_update complete groups admitted first. None if there are fewer, or if what they leave could
    not be consumed within the bound: an older group is in flight, and the learner waits for it.
    """
    settings = schedule.settings
    complete = [group for group in schedule.groups if len(group.finished) == settings.group_size]
    chosen = complete[: settings.groups_per_update]
    if len(chosen) < settings.groups_per_update:
        return None
    prompts = tuple(group.prompt_index for group in chosen)
    if not is_feasible(_without(schedule.groups, prompts), schedule.version + 1, settings):
        return None
    return prompts


def consume(schedule: Schedule) -> Schedule:
    """The schedule once the update on next_update has begun. Raises ValueError if there is none."""
    prompts = next_update(schedule)
    if prompts is None:
        raise ValueError("schedule must have an update to make, got none")
    return attrs.evolve(schedule, version=schedule.version + 1, groups=_without(schedule.groups, prompts))


def due_version(schedule: Schedule) -> int:
    """The version to serve once the updates begun are made: what is served, if nothing is to be published.

    The learner's version every publish_every updates; with exact_lag that much less, but not before the start.
    """
    if schedule.settings.exact_lag is not None:
        return max(schedule.start_version, schedule.version - schedule.settings.exact_lag)
    due = schedule.version - schedule.served >= schedule.settings.publish_every
    return schedule.version if due else schedule.served


def publish(schedule: Schedule) -> Schedule:
    """The schedule once the engine serves due_version."""
    return attrs.evolve(schedule, served=due_version(schedule))


def allowed_versions(schedule: Schedule) -> range:
    """The token versions that an update at this point may consume."""
    if schedule.settings.exact_lag is not None:
        return range(schedule.served, schedule.served + 1)
    oldest = max(schedule.start_version, schedule.version - schedule.settings.max_lag)
    return range(oldest, schedule.served + 1)


def _admission(schedule: Schedule) -> int:
    """The version that a group admitted now carries."""
    return schedule.served if schedule.settings.exact_lag is None else schedule.version


def _pace(settings: Settings) -> int:
    return settings.max_lag if settings.exact_lag is None else 0


def _without(groups: tuple[OpenGroup, ...], prompts: tuple[int, ...]) -> tuple[OpenGroup, ...]:
    taken = set(prompts)
    return tuple(group for group in groups if group.prompt_index not in taken)
