"""Folders of runs that were edited or damaged: refused with one line, and left as they were."""

import hashlib
import json
import shutil

import attrs
import pytest
from test_resume import few_probes, go_on, model, tasks  # noqa: F401

import rz.run
from rz import checkpoint, report
from rz.experiments import kills
from rz.experiments.kills import config_of, outcome
from rz.lock import only_process
from rz.models.make import make_tiny
from rz.run import run


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):  # noqa: F811
    config = config_of(model, tmp_path_factory.mktemp("refuses") / "run", "plain", "turns")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rz.run, "require_aligned_model", lambda *arguments, **more: ())
        run(config, *tasks(config))
    return config


@pytest.fixture
def killed(whole, tmp_path):
    """The run as a kill after its update 15 leaves it: the newest checkpoint is 14's."""
    shutil.copytree(whole.out, tmp_path / "run")
    shutil.rmtree(checkpoint.version_folder(tmp_path / "run", 16))
    return tmp_path / "run"


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refuses(folder, rule, error=ValueError, **changes):
    before = contents(folder)
    with pytest.raises(error, match=rule):
        go_on(folder, **changes)
    assert contents(folder) == before


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", 0.1), ("seed", 7), ("group_size", 4), ("max_tokens", 3), ("slots", 4), ("max_lag", 2),
     ("temperature", 0.5), ("overlap_steps", 1), ("audit_share", 1.0), ("task", "arithmetic?digits=1")],
)  # fmt: skip
def test_a_setting_that_was_changed_in_run_json(killed, name, value):
    edit(killed / report.CONFIG, lambda values: values.update({name: value}))
    refuses(killed, rf"{name} of run.json must be as the run began with \(.*\), got {value}".replace("?", r"\?"))


def test_settings_that_change_no_bit_may_change(killed, whole):
    free = {"save_every": 4, "keep": 2, "reward_timeout_s": 5.0}
    edit(killed / report.CONFIG, lambda values: values.update(free))
    go_on(killed)
    assert outcome(killed)["rollouts"] == outcome(whole.out)["rollouts"]
    assert outcome(killed)["weights"] == outcome(whole.out)["weights"]


def test_fewer_updates_than_were_made(killed):
    refuses(killed, "updates must be >= the 14 that the run has made, got 5", updates=5)


def test_more_updates_hold_for_the_next_resume_too(killed):
    go_on(killed, updates=18)
    shutil.rmtree(checkpoint.version_folder(killed, 18))
    assert go_on(killed)["updates"] == 18


def test_a_run_in_use(killed, whole, tmp_path):
    with only_process(killed):
        refuses(killed, "run must be in use by no other process")
    (tmp_path / "new").mkdir()
    with only_process(tmp_path / "new"), pytest.raises(ValueError, match="in use by no other process"):
        run(attrs.evolve(whole, out=tmp_path / "new"), *tasks(whole))


def test_another_model_sets_no_checkpoint_aside(killed, tmp_path):
    make_tiny(tmp_path / "other", **(kills.SIZES | {"hidden_size": 64}))
    edit(killed / report.CONFIG, lambda values: values.update(model=str(tmp_path / "other")))
    refuses(killed, "model must be the one that the run began with")


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("metrics.jsonl", lambda text: text[:-9000], r"metrics.jsonl must hold at least the \d+ bytes it had"),
        ("rollouts.jsonl", lambda text: text[:100], r"rollouts.jsonl must hold at least the \d+ bytes it had, got 100"),
        ("rollouts.jsonl", lambda text: "x" + text, r"rollouts.jsonl must have the end of a line at byte"),
        ("metrics.jsonl", lambda text: "zzz" + text[3:], "metrics.jsonl:1 must be the metrics of an update"),
        ("metrics.jsonl", lambda text: text.replace('"policy_version": 3,', '"policy_version": 4,'),
         "metrics.jsonl:3 must be of policy_version 3, got 4"),
    ],
)  # fmt: skip
def test_a_log_that_is_not_the_runs(killed, name, change, rule):
    (killed / name).write_text(change((killed / name).read_text()))
    refuses(killed, rule)


def test_a_log_that_is_gone(killed):
    (killed / "rollouts.jsonl").unlink()
    refuses(killed, r"rollouts.jsonl must hold at least the \d+ bytes it had, got 0")


STATES = {
    "version": lambda s: s["plan"].update(version=3),
    "served": lambda s: s["plan"].update(served=99),
    "in flight": lambda s: s["plan"].update(in_flight=0),
    "text": lambda s: s["plan"].update(version="14"),
    "no responses": lambda s: s.update(responses=[]),
    "no groups": lambda s: s["plan"].update(groups=[]),
    "plan": lambda s: s.update(plan=[]),
    "optimizer": lambda s: s.update(optimizer_step=-3),
    "extra": lambda s: s.update(extra=[]),
    "reward": lambda s: [r.update(reward="1") for r in s["responses"]],
    "NaN": lambda s: [r.update(reward=float("nan")) for r in s["responses"]],
    "future": lambda s: [r.update(policy_versions=[50] * len(r["response_ids"])) for r in s["responses"]],
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_a_state_that_does_not_fit_is_damaged_whatever_its_checksum(whole, tmp_path, model, change):  # noqa: F811
    folder = shutil.copytree(whole.out, tmp_path / "run")
    last = checkpoint.version_folder(folder, 14)
    shutil.rmtree(checkpoint.version_folder(folder, 16))
    shutil.copytree(last, checkpoint.version_folder(folder, 12))  # not 12's: damaged too, so that none is whole
    edit(last / checkpoint.STATE, change)
    digest = hashlib.sha256((last / checkpoint.STATE).read_bytes()).hexdigest()
    edit(last / checkpoint.CHECKSUMS, lambda sums: sums.update({checkpoint.STATE: digest}))
    told = []
    with pytest.raises(ValueError, match="run must hold a whole checkpoint to go on from, got none"):
        checkpoint.load(folder, rz.run.load_config(model), on_damaged=told.append)
    assert ["version-000014 is damaged" in told[0], "version-000012 is damaged" in told[1]] == [True, True]


def test_a_run_killed_before_its_first_checkpoint_begins_anew(killed, whole):
    shutil.rmtree(killed / "checkpoints")
    (killed / "checkpoints" / ".version-000000.ab.partial").mkdir(parents=True)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (killed / name).write_text("")
    go_on(killed)
    assert outcome(killed) == outcome(whole.out)


def test_a_failed_log_leaves_no_checkpoint_that_lacks_its_line(whole, tmp_path):
    config = attrs.evolve(whole, out=tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        real = report.Log.update

        def update(self, metrics, groups):
            if metrics["policy_version"] == 7:
                raise OSError(28, "No space left on device")
            real(self, metrics, groups)

        patch.setattr(report.Log, "update", update)
        with pytest.raises(OSError, match="No space left"):
            run(config, *tasks(config))
    go_on(config.out)
    assert outcome(config.out) == outcome(whole.out)
