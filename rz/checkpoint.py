"""What a run keeps: one folder a kept version, a Hugging Face checkpoint and all else that the run goes on from.

    version-000050/   model.safetensors, config.json, ...   the weights, as transformers reads them
                      optimizer.safetensors                 AdamW's means; step in run_state.json
                      history.safetensors                   weights not published yet, with exact_lag alone
                      run_state.json                        schedule, responses in flight and queued, places in the logs
                      certificate.json                      what the bits rest on, tokens audited and differing
                      checksums.json                        SHA-256 of every other file

A folder is written beside its place and renamed, so it is whole or not there.
"""

import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rz import schedule
from rz.models.dense import DenseConfig
from rz.models.hf import load_config, load_params, whole_folder, write_checkpoint
from rz.report import METRICS, ROLLOUTS, rollout_from, rollout_values
from rz.schedule import OpenGroup, Schedule, Settings
from rz.snapshot import Response, Snapshot
from rz.steps import AdamWState, PolicyState

OPTIMIZER, HISTORY, STATE, CERTIFICATE, CHECKSUMS = (
    "optimizer.safetensors",
    "history.safetensors",
    "run_state.json",
    "certificate.json",
    "checksums.json",
)


def version_folder(run: Path, version: int) -> Path:
    """Where a run keeps a version."""
    return run / "checkpoints" / f"version-{version:06d}"


def kept_versions(run: Path) -> dict[int, Path]:
    """The versions that a run kept, in ascending order."""
    found = {}
    for folder in sorted((run / "checkpoints").glob("version-*")):
        if match := re.fullmatch(r"version-(\d+)", folder.name):
            found[int(match[1])] = folder
    return found


def has_begun(run: Path) -> bool:
    """False if the run was ended before its first checkpoint was whole, which comes before its first update."""
    logged = any((run / name).is_file() and (run / name).stat().st_size for name in (METRICS, ROLLOUTS))
    written = any(re.fullmatch(r"(version|damaged)-\d+", path.name) for path in (run / "checkpoints").glob("*"))
    return logged or written


@attrs.frozen(kw_only=True, eq=False)
class Saved:
    """A checkpoint, read.

    Args:
        extra: what the caller of save added.  certificate: of the machine that wrote it.
    """

    snapshot: Snapshot
    extra: Mapping[str, Any]
    certificate: Mapping[str, Any]


def save(
    run: Path,
    snapshot: Snapshot,
    config: DenseConfig,
    *,
    source: Path,
    keep: int | None,
    extra: Mapping[str, Any],
    certificate: Mapping[str, Any],
) -> Path:
    """Write a snapshot, whole or not at all; then remove the oldest beyond `keep`. Nothing is pickled.

    Args:
        snapshot: of a PolicyState.
        source: the folder whose config, tokenizer and generation settings go with the weights.
        keep: >= 1 newest versions to hold, or None: all.
        extra: JSON values.
    Raises: ValueError if the weights are not finite or the folder cannot be written; what was there stays.
    """
    state, folder = snapshot.state, version_folder(run, snapshot.state.version)
    values = {
        "plan": _plan_values(snapshot.plan),
        "optimizer_step": state.optimizer.step,
        "responses": [{**rollout_values(r.rollout), "reward": r.reward} for r in snapshot.responses],
        "extra": dict(extra),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as partial:
        write_checkpoint(partial, state.params, config, source=source)
        means = {
            f"{part}/{name}": x for part in ("first", "second") for name, x in getattr(state.optimizer, part).items()
        }
        save_file({name: value.detach().contiguous() for name, value in means.items()}, partial / OPTIMIZER)
        if older := snapshot.history[:-1]:
            named = {f"{place}/{name}": x.detach() for place, params in enumerate(older) for name, x in params.items()}
            save_file({name: value.clone() for name, value in named.items()}, partial / HISTORY)
        for name, value in ((STATE, values), (CERTIFICATE, dict(certificate))):
            (partial / name).write_text(json.dumps(value, allow_nan=False) + "\n", encoding="utf-8")
        sums = {path.name: _digest(path) for path in sorted(partial.iterdir())}
        (partial / CHECKSUMS).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")
        for path in partial.iterdir():
            _flush(path)
    _flush(folder.parent)
    for old in [] if keep is None else list(kept_versions(run).values())[:-keep]:
        _remove(old)
    return folder


def load(run: Path, config: DenseConfig, *, on_damaged: Callable[[str], None]) -> Saved:
    """The newest checkpoint of a run that is whole.

    Newer ones that are damaged are told to on_damaged, by name and reason, and set aside as damaged-NUMBER.
    Raises: ValueError if there is none, or it is of another model than config, which damages nothing.
    """
    for left in (run / "checkpoints").glob(".version-*"):  # of a run that was killed while it wrote or removed one
        shutil.rmtree(left)
    for version, folder in reversed(kept_versions(run).items()):
        try:
            found, saved = _read(folder, version)
        except (OSError, ValueError, TypeError, AttributeError, LookupError, SafetensorError) as error:
            on_damaged(f"{folder} is damaged ({' '.join(str(error).split())}), trying the one before it")
            aside = folder.with_name(f"damaged-{version:06d}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            continue
        if found != config:
            raise ValueError(f"model must be the one that the run began with ({found}), got {config}")
        return saved
    raise ValueError(f"run must hold a whole checkpoint to go on from, got none in {run / 'checkpoints'}")


def _read(folder: Path, version: int) -> tuple[DenseConfig, Saved]:
    sums = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    if missing := sorted({STATE, CERTIFICATE, OPTIMIZER, "config.json"} - sums.keys()):
        raise ValueError(f"{CHECKSUMS} must name {missing[0]}, got no such entry")
    for name, digest in sums.items():
        if (got := _digest(folder / name)) != digest:
            raise ValueError(f"SHA-256 of {name} must be {digest[:12]}..., got {got[:12]}...")
    values = json.loads((folder / STATE).read_text(encoding="utf-8"))
    config = load_config(folder)
    params, plan, means = load_params(folder, config), _plan_from(values["plan"]), load_file(folder / OPTIMIZER)
    part = lambda tensors, prefix: {name: tensors[f"{prefix}/{name}"] for name in params}
    optimizer = AdamWState(step=values["optimizer_step"], first=part(means, "first"), second=part(means, "second"))
    older = load_file(folder / HISTORY) if HISTORY in sums else {}
    count = len(older) // len(params)
    snapshot = Snapshot(
        plan=plan,
        state=PolicyState(params=params, optimizer=optimizer, version=plan.version),
        history=(*(part(older, place) for place in range(count)), params),
        responses=tuple(
            Response(rollout=rollout_from(response), reward=response["reward"]) for response in values["responses"]
        ),
    )
    certificate = json.loads((folder / CERTIFICATE).read_text(encoding="utf-8"))
    for name, value in (("extra", values["extra"]), (CERTIFICATE, certificate)):
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {type(value).__name__}")
    _check(snapshot, version)
    return config, Saved(snapshot=snapshot, extra=values["extra"], certificate=certificate)


def _check(snapshot: Snapshot, version: int) -> None:
    """Raises ValueError if the parts of a snapshot do not fit each other, or its folder."""
    plan, step = snapshot.plan, snapshot.state.optimizer.step
    counts = {name: getattr(plan, name) for name in ("version", "served", "admitted", "next_sample", "in_flight")}
    for name, value in (counts | {"optimizer_step": step}).items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
    if plan.version != version or plan.served > version:
        raise ValueError(f"version must be {version}, and served no more, got {plan.version} and {plan.served}")
    due = schedule.submitted(plan)
    rollouts = [response.rollout for response in snapshot.responses]
    got = tuple(((r.prompt_index, r.sample), r.stop_reason != "running") for r in rollouts)
    if got != due:
        wrong = next(pair for pair in itertools.zip_longest(due, got) if pair[0] != pair[1])
        raise ValueError(f"responses must be those of the open groups, with {wrong[0]}, got {wrong[1]}")
    if (running := sum(not finished for _, finished in due)) != plan.in_flight:
        raise ValueError(f"in_flight must be the {running} running responses, got {plan.in_flight}")
    for response in snapshot.responses:
        reward, versions = response.reward, response.rollout.policy_versions
        name = f"of prompt {response.rollout.prompt_index}, sample {response.rollout.sample}"
        if reward is not None and not (type(reward) in (int, float) and math.isfinite(reward)):
            raise ValueError(f"reward {name} must be a finite number or null, got {reward!r}")
        if versions.numel() and not 0 <= int(versions.min()) <= int(versions.max()) <= plan.served:
            raise ValueError(f"policy_versions {name} must be within 0 to {plan.served}, got {versions.tolist()}")


def _plan_values(plan: Schedule) -> dict[str, Any]:
    values = attrs.asdict(plan)
    for group in values["groups"]:
        group["finished"] = sorted(group["finished"])
    return values


def _plan_from(values: Mapping[str, Any]) -> Schedule:
    groups = (OpenGroup(**{**group, "finished": frozenset(group["finished"])}) for group in values["groups"])
    return Schedule(**{**values, "settings": Settings(**values["settings"]), "groups": tuple(groups)})


def _digest(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Onto the disk: a rename must not outlive what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Renamed first, so that a kill leaves no half of it under its name."""
    leaving = folder.with_name(f".{folder.name}.leaving")
    folder.rename(leaving)
    shutil.rmtree(leaving)
