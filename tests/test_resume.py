"""Runs that stop, fail or are killed, and go on: through the same functions as the command line."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import attrs
import pytest
import torch

import rz.run
from rz import checkpoint, report
from rz.checkpoint import kept_versions, version_folder
from rz.engine.plain import PlainEngine
from rz.experiments import kills
from rz.experiments.kills import MODES, Anything, config_of, outcome
from rz.models.make import make_tiny
from rz.run import resume, run
from rz.tasks import Arithmetic


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume") / "model"
    make_tiny(folder, **kills.SIZES)
    return folder


def tasks(config):
    return Anything(seed=config.seed), None


def go_on(folder, **changes):
    return resume(folder, tasks, **(dict(updates=None, same_machine=True) | changes))


@pytest.fixture(autouse=True)
def few_probes(monkeypatch):
    """The probe has its own tests, and takes half of the time of these runs."""
    monkeypatch.setattr(rz.run, "require_aligned_model", lambda *arguments, **more: ())


@pytest.mark.parametrize("mode", list(MODES))
def test_n_updates_and_m_more_are_n_plus_m(model, tmp_path, mode):
    whole = config_of(model, tmp_path / "whole", "plain", mode)
    run(whole, *tasks(whole))
    halves = attrs.evolve(whole, out=tmp_path / "halves")
    for version in (6, 7, 12):  # stopped after these updates; 7 is between two saves
        stop_at(version, halves)
    rows = go_on(halves.out)
    assert outcome(halves.out) == outcome(whole.out)
    assert rows["updates"] == 16 and rows["tokens differing"] == 0 and rows["tokens audited"] > 0


def stop_at(version, config):
    """Run or go on until this update, then interrupt as Ctrl-C does."""

    class Stopping(report.Progress):
        def update(self, metrics):
            super().update(metrics)
            if metrics["policy_version"] == version:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "Progress", Stopping)
        rows = go_on(config.out) if config.out.exists() else run(config, *tasks(config))
    assert rows["updates"] == version


@pytest.mark.parametrize(
    "change", [(), ("engine_process",), ("slow",)], ids=["again", "engine process", "slow rewards"]
)
def test_the_same_run_twice_is_the_same_bit_for_bit(model, tmp_path, change):
    """Asynchronous and overlapping; nor does it matter where the engine runs, or how long a reward takes."""
    first = config_of(model, tmp_path / "first", "plain", "beside")
    run(first, *tasks(first))

    class Slow(Anything):
        def score(self, prompt, response_ids):
            time.sleep(0.03 * (prompt.index % 3))
            return super().score(prompt, response_ids)

    task = Slow(seed=first.seed) if "slow" in change else tasks(first)[0]
    second = attrs.evolve(first, out=tmp_path / "second", engine_process="engine_process" in change)
    run(second, task, None)
    assert outcome(second.out) == outcome(first.out)


def test_killed_at_random_moments(model):
    values = kills.kills(engine="plain", count=18, seed=1)
    assert values["kills"] == 18 and values["differing"] == 0


def test_killed_at_random_moments_with_vllm():
    """In a fresh process: one that already ran vLLM cannot fork."""
    command = [sys.executable, "-m", "rz.cli", "experiment", "kills", "--engine", "vllm", "--count", "2", "--json"]
    command[1:3] = ["-c", "from rz.cli import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["kills"] == 2 and values["differing"] == 0


def test_kills_can_find_a_run_that_goes_on_wrongly(model, monkeypatch):
    real = checkpoint._read

    def forgetful(folder, version):
        config, saved = real(folder, version)
        first = {name: torch.zeros_like(value) for name, value in saved.snapshot.state.optimizer.first.items()}
        state = attrs.evolve(saved.snapshot.state, optimizer=attrs.evolve(saved.snapshot.state.optimizer, first=first))
        return config, attrs.evolve(saved, snapshot=attrs.evolve(saved.snapshot, state=state))

    monkeypatch.setattr(checkpoint, "_read", forgetful)
    assert kills.kills(engine="plain", count=8, seed=2)["differing"] > 0


def test_a_run_that_fails_in_a_child_is_told_with_its_last_words(tmp_path):
    def work():
        raise ZeroDivisionError("by zero")

    with pytest.raises(RuntimeError, match=r"(?s)must end with exit status 0, got wait status 256: .*by zero"):
        kills._in_child(work, None, lambda: True, tmp_path / "log")


def test_a_child_does_not_wait_for_threads_that_it_has_not(tmp_path):
    wide = torch.randn(2000, 2000)
    many = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        wide.exp()  # starts this process's OpenMP threads
        assert kills._in_child(lambda: (wide.exp(), wide @ wide), 20.0, lambda: True, tmp_path / "log")
    finally:
        torch.set_num_threads(many)


def test_a_child_that_does_not_end_is_killed(tmp_path, monkeypatch):
    before = children()
    monkeypatch.setattr(kills, "LIMIT_S", 0.3)
    with pytest.raises(TimeoutError, match=r"(?s)a run must end within 0.3 s, got none: .*waiting"):
        kills._in_child(lambda: (os.write(1, b"waiting"), signal.pause()), None, lambda: True, tmp_path / "log")
    assert children() == before


def test_no_child_is_left_when_the_wait_for_it_ends(tmp_path, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    before = children()
    monkeypatch.setattr(kills.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kills._in_child(signal.pause, None, lambda: True, tmp_path / "log")
    assert children() == before


def test_one_axis_and_counts_that_go_on_at_the_right_step(model, tmp_path, capsys):
    config = config_of(model, tmp_path / "run", "plain", "turns")
    stop_at(5, config)
    capsys.readouterr()
    audited = go_on(config.out)["tokens audited"]
    lines = report.read_metrics(config.out)
    assert [line["policy_version"] for line in lines] == list(range(1, 17))
    assert audited == sum(line["audited_tokens"] for line in lines)
    shown = [text for text in capsys.readouterr().out.splitlines() if text]
    assert shown[0].startswith("update 6/16") and f"audited {audited}, differing 0" in shown[-1]


def test_a_stop_between_two_publishes_keeps_the_last_one(model, tmp_path):
    whole = attrs.evolve(config_of(model, tmp_path / "whole", "plain", "seldom"), save_every=0)
    run(whole, *tasks(whole))
    halves = attrs.evolve(whole, out=tmp_path / "halves")
    stop_at(7, halves)
    assert list(kept_versions(halves.out)) == [0, 6]
    proof = json.loads((version_folder(halves.out, 6) / "certificate.json").read_text())
    assert proof["tokens_audited"] == sum(line["audited_tokens"] for line in report.read_metrics(halves.out)[:6])
    go_on(halves.out)
    assert outcome(halves.out) | {"kept": None} == outcome(whole.out) | {"kept": None}


def test_more_updates_can_be_asked_for(model, tmp_path):
    config = config_of(model, tmp_path / "run", "plain", "turns")
    run(config, *tasks(config))
    assert go_on(config.out)["updates"] == 16  # nothing to do
    assert go_on(config.out, updates=18)["updates"] == 18
    with pytest.raises(ValueError, match="updates must be >= 1, got 0"):
        go_on(config.out, updates=0)


def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(model, tmp_path, capsys):
    whole = config_of(model, tmp_path / "whole", "plain", "turns")
    run(whole, *tasks(whole))
    broken = attrs.evolve(whole, out=tmp_path / "broken")
    stop_at(8, broken)
    (version_folder(broken.out, 8) / "optimizer.safetensors").write_bytes(b"nothing")
    go_on(broken.out)
    assert re.search(r"version-000008 is damaged \(SHA-256 of optimizer.safetensors must be", capsys.readouterr().err)
    assert outcome(broken.out) == outcome(whole.out)


def test_another_machine_is_refused_unless_asked_for(model, tmp_path):
    config = config_of(model, tmp_path / "run", "plain", "turns")
    stop_at(4, config)
    folder = version_folder(config.out, 4)
    proof = json.loads((folder / "certificate.json").read_text())
    assert proof["tokens_audited"] > 0 and proof["tokens_differing"] == 0
    proof["processor"]["name"] = "abacus"
    (folder / "certificate.json").write_text(json.dumps(proof))
    sums = json.loads((folder / "checksums.json").read_text())
    sums["certificate.json"] = checkpoint._digest(folder / "certificate.json")
    (folder / "checksums.json").write_text(json.dumps(sums))
    with pytest.raises(ValueError, match=r"processor name must be as the run began with \(abacus\)"):
        go_on(config.out)
    assert go_on(config.out, same_machine=False)["updates"] == 16


# Failures: one clear error, and a checkpoint that goes on


def fails_and_goes_on(model, tmp_path, fault, error, rule, mode="turns", **changes):
    """A run with a fault ends with this error; without the fault it goes on to the outcome of the whole run."""
    whole = config_of(model, tmp_path / "whole", "plain", mode)
    run(whole, *tasks(whole))
    config = attrs.evolve(whole, out=tmp_path / "failing", **changes)
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        with pytest.raises(error, match=rule):
            run(config, *tasks(config))
    left = list(kept_versions(config.out))
    go_on(config.out)
    assert outcome(config.out) == outcome(whole.out)
    return left


@pytest.mark.parametrize("mode", ["turns", "beside"])
def test_an_engine_step_that_raises(model, tmp_path, mode):
    def fault(patch):
        real, steps = PlainEngine.step, []

        def step(self):
            steps.append(1)
            if len(steps) == 30:
                raise RuntimeError("no such kernel")
            return real(self)

        patch.setattr(PlainEngine, "step", step)

    left = fails_and_goes_on(model, tmp_path, fault, RuntimeError, "no such kernel", mode)
    assert left[-1] > 2 and len(left) == 2


def test_a_reward_that_raises(model, tmp_path):
    def fault(patch):
        real, calls = Anything.score, []

        def score(self, prompt, response_ids):
            calls.append(1)
            if len(calls) == 40:
                raise ZeroDivisionError("by zero")
            return real(self, prompt, response_ids)

        patch.setattr(Anything, "score", score)

    fails_and_goes_on(model, tmp_path, fault, RuntimeError, "must be a finite number, got an error from score: ZeroDiv")


def test_a_reward_that_hangs(model, tmp_path):
    def fault(patch):
        real = Anything.score

        async def hanging(self, prompt, response_ids):
            if prompt.index == 9:
                await asyncio.Event().wait()
            return real(self, prompt, response_ids)

        patch.setattr(Anything, "score", hanging)

    began = time.perf_counter()
    fails_and_goes_on(model, tmp_path, fault, TimeoutError, "must arrive within reward_timeout_s", reward_timeout_s=0.2)
    assert time.perf_counter() - began < 60


def test_an_evaluation_that_raises_loses_no_line_of_the_log(model, tmp_path):
    whole = attrs.evolve(config_of(model, tmp_path / "whole", "plain", "turns"), eval_every=3, eval_prompts=2)
    held_out, calls = Arithmetic(split="held_out"), []
    run(whole, tasks(whole)[0], held_out)

    class Raising(Arithmetic):
        def score(self, prompt, response_ids):
            calls.append(1)
            if len(calls) == 3:  # the first question of the second evaluation, at version 3
                raise OSError("no sandbox")
            return super().score(prompt, response_ids)

    config = attrs.evolve(whole, out=tmp_path / "failing")
    with pytest.raises(OSError, match="no sandbox"):
        run(config, tasks(config)[0], Raising(split="held_out"))
    resume(config.out, lambda config: (tasks(config)[0], held_out), updates=None, same_machine=True)
    assert outcome(config.out) == outcome(whole.out)


def test_the_logs_are_on_the_disk_before_each_checkpoint(model, tmp_path, monkeypatch):
    order, sync, save = [], report.Log.sync, checkpoint.save
    monkeypatch.setattr(report.Log, "sync", lambda log: (order.append("sync"), sync(log)))
    monkeypatch.setattr(checkpoint, "save", lambda *a, **k: (order.append("save"), save(*a, **k)))
    config = attrs.evolve(config_of(model, tmp_path / "run", "plain", "turns"), updates=4)
    run(config, *tasks(config))
    assert order == ["sync", "save"] * 3  # versions 0, 2 and 4


def test_a_full_disk(model, tmp_path):
    def fault(patch):
        real = checkpoint.save_file

        def full(tensors, path, *more):
            if "version-000006" in str(path):
                raise OSError(28, "No space left on device")
            real(tensors, path, *more)

        patch.setattr(checkpoint, "save_file", full)

    left = fails_and_goes_on(model, tmp_path, fault, ValueError, r"\(No space left on device\)")
    assert left == [2, 4]


def test_a_killed_engine_process(model, tmp_path):
    def fault(patch):
        real = report.Progress.update

        def update(self, metrics):
            real(self, metrics)
            if metrics["policy_version"] == 5:
                (child,) = [int(pid) for pid in children() if "spawn_main" in command_of(pid)]
                os.kill(child, signal.SIGKILL)

        patch.setattr(report.Progress, "update", update)

    rule = r"engine process must live as long as the run, got its end during \w+: killed by SIGKILL"
    left = fails_and_goes_on(model, tmp_path, fault, RuntimeError, rule, engine_process=True)
    assert left == [2, 4]


def children():
    return open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()


def command_of(pid):
    return open(f"/proc/{pid}/cmdline").read()


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_stops_with_a_checkpoint_and_twice_at_once(model, tmp_path, twice):
    folder = tmp_path / "run"
    code = (
        "import attrs; from pathlib import Path; from rz.experiments import kills; from rz.run import run\n"
        f"config = kills.config_of(Path({str(model)!r}), Path({str(folder)!r}), 'plain', 'turns')\n"
        "run(attrs.evolve(config, updates=5000), kills.Anything(), None)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_text().count("\n") > 3:
        assert time.monotonic() < limit and child.poll() is None, child.stderr.read()
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    if twice:
        time.sleep(0.05)
        child.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, err = child.communicate(timeout=60)
    assert "rz: stopping after the turn under way, with a checkpoint; Ctrl-C again stops at once" in err
    assert "Traceback" not in err
    if child.returncode == -signal.SIGINT:
        assert twice and time.monotonic() - began < 1.0
    else:
        assert child.returncode == 0
        updates = len(report.read_metrics(folder))
        assert list(kept_versions(folder))[-1] == updates
    more = list(kept_versions(folder))[-1] + 2
    assert go_on(folder, updates=more, same_machine=False)["tokens differing"] == 0


def test_an_engine_that_hangs_in_this_process_ends_it_and_the_run_goes_on(model, tmp_path):
    folder = tmp_path / "run"
    code = (
        "import attrs, threading; from pathlib import Path; from rz.experiments import kills; from rz.run import run\n"
        "from rz.engine.plain import PlainEngine\n"
        "real, steps = PlainEngine.step, []\n"
        "def step(self):\n"
        "    steps.append(1)\n"
        "    if len(steps) == 30: threading.Event().wait()\n"
        "    return real(self)\n"
        "PlainEngine.step = step\n"
        f"config = kills.config_of(Path({str(model)!r}), Path({str(folder)!r}), 'plain', 'turns')\n"
        "run(attrs.evolve(config, stall_timeout_s=3.0), kills.Anything(), None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Timeout (0:00:03)!" in done.stderr and "in step" in done.stderr
    assert go_on(folder, same_machine=False)["updates"] == 16


def test_resume_of_no_run_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="run must be the folder of a run, with run.json, got"):
        go_on(tmp_path)


def test_a_log_that_lost_bytes_is_refused_before_an_engine_starts(model, tmp_path, monkeypatch):
    config, opened = config_of(model, tmp_path / "run", "plain", "turns"), []
    stop_at(4, config)
    monkeypatch.setattr(rz.run, "open_engine", lambda *arguments: opened.append(arguments))
    (config.out / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics.jsonl must hold at least the \d+ bytes it had, got 0"):
        go_on(config.out)
    assert not opened


def test_without_a_whole_checkpoint_nothing_goes_on(model, tmp_path):
    config = config_of(model, tmp_path / "run", "plain", "turns")
    stop_at(1, config)
    shutil.rmtree(config.out / "checkpoints")
    with pytest.raises(ValueError, match="run must hold a whole checkpoint to go on from, got none"):
        go_on(config.out)
