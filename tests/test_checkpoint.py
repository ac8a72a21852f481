"""What a run keeps: whole or not at all, read back bit for bit, and the one before where one is damaged."""

import json
import shutil
from functools import partial
from pathlib import Path

import attrs
import pytest
import torch
from test_batch import rollout

import rz.checkpoint
from rz import schedule
from rz.checkpoint import kept_versions, load, save, version_folder
from rz.models.dense import random_params
from rz.models.hf import load_config, load_params
from rz.models.make import make_tiny
from rz.schedule import Settings
from rz.snapshot import Response, Snapshot
from rz.steps import AdamWState, PolicyState


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_tiny(folder, hidden_size=32, heads=2, kv_heads=1, head_dim=16, vocab_size=20)
    return folder, load_config(folder)


def a_snapshot(config, version=3, seed=0, history=1):
    """Version `version` of a run, with one response finished and scored, one finished and not, and one running."""
    params = [random_params(config, seed=seed + place) for place in range(history)]
    means = lambda shift: {name: value + shift for name, value in params[-1].items()}
    state = PolicyState(
        params=params[-1], optimizer=AdamWState(step=version, first=means(0.5), second=means(0.25)), version=version
    )
    settings = Settings(group_size=2, groups_per_update=1, max_lag=8, slots=4, updates=9)
    plan = schedule.start(settings, version=0)
    for _ in range(4):
        plan = schedule.submit(plan)
    for key in ((0, 0), (0, 1), (1, 1)):
        plan = schedule.finish(plan, *key)
    plan = attrs.evolve(plan, version=version, served=version)
    made = partial(rollout, policy_versions=torch.arange(3).clamp(max=version))
    odd = torch.tensor([-0.1, -1e-45, -3.4e38])
    responses = (
        Response(rollout=made(0, sample=0, behaviour_logprobs=odd, replay_logprobs=odd), reward=0.1),
        Response(rollout=made(0, sample=1)),
        Response(rollout=made(1, sample=0, stop_reason="running", replay_logprobs=torch.tensor([-1.0, torch.nan, 0]))),
        Response(rollout=made(1, sample=1), reward=1 / 3),
    )
    return Snapshot(plan=plan, state=state, history=tuple(params), responses=responses)


def write(run, model, snapshot, *, keep=None, extra=None):
    folder, config = model
    return save(
        run, snapshot, config, source=folder, keep=keep, extra=extra or {"n": 1}, certificate={"engine": "plain"}
    )


def read(run, model, told=None):
    return load(run, model[1], on_damaged=(told if told is not None else []).append)


def same(a, b):
    assert a.plan == b.plan and a.state.version == b.state.version and a.state.optimizer.step == b.state.optimizer.step
    pairs = [(a.state.params, b.state.params), *zip(a.history, b.history, strict=True)]
    pairs += [(getattr(a.state.optimizer, part), getattr(b.state.optimizer, part)) for part in ("first", "second")]
    for x, y in pairs:
        assert x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
    for x, y in zip(a.responses, b.responses, strict=True):
        assert x.reward == y.reward
        for field in attrs.fields(type(x.rollout)):
            one, two = getattr(x.rollout, field.name), getattr(y.rollout, field.name)
            if isinstance(one, torch.Tensor):
                raw = lambda value: value.nan_to_num(nan=123.0) if value.is_floating_point() else value
                assert one.dtype == two.dtype and torch.equal(raw(one), raw(two))
            else:
                assert one == two
    return True


@pytest.mark.parametrize("history", [1, 3])
def test_a_snapshot_comes_back_bit_for_bit(tmp_path, model, history):
    snapshot = a_snapshot(model[1], history=history)
    folder = write(tmp_path, model, snapshot)
    saved = read(tmp_path, model)
    assert same(saved.snapshot, snapshot)
    assert saved.extra == {"n": 1} and saved.certificate == {"engine": "plain"}
    assert folder == version_folder(tmp_path, 3) and list(kept_versions(tmp_path)) == [3]
    params = load_params(folder, model[1])  # it is a Hugging Face checkpoint too
    assert all(torch.equal(params[name], value) for name, value in snapshot.state.params.items())


def test_nothing_is_pickled(tmp_path, model):
    names = {path.suffix for path in write(tmp_path, model, a_snapshot(model[1], history=2)).iterdir()}
    assert names == {".json", ".safetensors"}


def test_the_last_ones_are_kept(tmp_path, model):
    for version in (1, 2, 10, 11):
        write(tmp_path, model, a_snapshot(model[1], version), keep=2)
    assert list(kept_versions(tmp_path)) == [10, 11]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"version-000010", "version-000011"}


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def other(path):
    path.write_text("[]")  # JSON, but of another kind


@pytest.mark.parametrize("harm", [cut, flip, other, Path.unlink])
@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "optimizer.safetensors",
        "run_state.json",
        "certificate.json",
        "config.json",
        "checksums.json",
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path, model, name, harm):
    for version in (1, 2):
        write(tmp_path, model, a_snapshot(model[1], version, seed=version))
    harm(version_folder(tmp_path, 2) / name)
    told = []
    saved = read(tmp_path, model, told)
    assert same(saved.snapshot, a_snapshot(model[1], 1, seed=1))
    assert len(told) == 1 and str(version_folder(tmp_path, 2)) in told[0] and "is damaged (" in told[0]
    assert list(kept_versions(tmp_path)) == [1] and (tmp_path / "checkpoints" / "damaged-000002").is_dir()
    write(tmp_path, model, a_snapshot(model[1], 2, seed=2))  # made again
    assert same(read(tmp_path, model).snapshot, a_snapshot(model[1], 2, seed=2))


def test_none_that_is_whole_is_an_error(tmp_path, model):
    with pytest.raises(ValueError, match="run must hold a whole checkpoint to go on from, got none in"):
        read(tmp_path, model)
    write(tmp_path, model, a_snapshot(model[1]))
    (version_folder(tmp_path, 3) / "checksums.json").write_text("{}")
    told = []
    with pytest.raises(ValueError, match="run must hold a whole checkpoint"):
        read(tmp_path, model, told)
    assert "must name certificate.json" in told[0]


@pytest.mark.parametrize("step", ["write_checkpoint", "save_file", "_digest", "_flush"])
def test_a_full_disk_leaves_what_was_there_and_no_half(tmp_path, model, step, monkeypatch):
    write(tmp_path, model, a_snapshot(model[1], 1))

    def full(*arguments, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rz.checkpoint, step, full)
    with pytest.raises(ValueError, match=r"folder must be one that can be written, got .* \(No space left on device\)"):
        write(tmp_path, model, a_snapshot(model[1], 2))
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["version-000001"]
    assert same(read(tmp_path, model).snapshot, a_snapshot(model[1], 1))


def test_what_a_kill_left_behind_is_swept_away(tmp_path, model):
    write(tmp_path, model, a_snapshot(model[1], 1))
    for name in (".version-000002.ab12.partial", ".version-000000.leaving"):
        shutil.copytree(version_folder(tmp_path, 1), tmp_path / "checkpoints" / name)
    assert list(kept_versions(tmp_path)) == [1]
    read(tmp_path, model)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["version-000001"]


def test_weights_that_are_not_finite_are_refused(tmp_path, model):
    snapshot = a_snapshot(model[1])
    snapshot.state.params["norm.weight"][0] = torch.nan
    with pytest.raises(ValueError, match="norm.weight must be finite in torch.float32, got NaN or inf"):
        write(tmp_path, model, snapshot)
    assert not kept_versions(tmp_path)


def test_state_is_strict_json(tmp_path, model):
    folder = write(tmp_path, model, a_snapshot(model[1]))
    refuse = lambda name: pytest.fail(f"{name} is no JSON")
    json.loads((folder / "run_state.json").read_text(), parse_constant=refuse)
