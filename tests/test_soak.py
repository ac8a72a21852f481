"""The soak experiment: a run that is killed and goes on, its supervision, and the sums at its end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rz import checkpoint, report, soak
from rz.config import TrainConfig
from rz.models.make import make_tiny
from rz.run import run

SIZES = {"layers": 1, "hidden_size": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 16}
TRAIN = {
    "engine": "plain", "updates": 24, "group_size": 2, "groups_per_update": 2, "slots": 24, "max_lag": 8,
    "publish_every": 2, "audit_share": 0.5, "save_every": 2, "keep": 2, "eval_every": 8, "eval_prompts": 16,
    "learning_rate": 1e-4,
}  # fmt: skip
SETTINGS = {"model": SIZES | {"max_positions": 16}, "warm_up": 0.0, "tries": 2, "train": TRAIN}


def ends(*codes):
    """Processes that end so one after the other: an exit status, or minus a signal."""
    texts = iter(
        f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})" for code in codes
    )
    return lambda: subprocess.Popen([sys.executable, "-S", "-c", next(texts)], process_group=0)


def test_a_process_that_dies_by_signals_is_begun_again_until_it_ends():
    reached = iter([0, 1, 1, 2])  # before, and after each death: further, not, further
    soak.supervise(ends(-9, -9, -11, 0), lambda: next(reached), tries=2)


def test_deaths_without_progress_end_it():
    reached = iter([3, 4, 4, 4])
    with pytest.raises(RuntimeError, match="must get past 4, got killed by SIGKILL 2 times"):
        soak.supervise(ends(-9, -9, -9), lambda: next(reached), tries=2)


def test_an_exit_status_ends_it():
    with pytest.raises(RuntimeError, match="exit status 0, got 3"):
        soak.supervise(ends(3, 0), lambda: 0, tries=2)


def test_a_soak_that_is_killed_ends_as_one_that_was_not(tmp_path):
    settings, out = tmp_path / "soak.json", tmp_path / "soak"
    settings.write_text(json.dumps(SETTINGS))
    stopped = threading.Event()

    def kill_once():
        while len(checkpoint.kept_versions(out / "run")) < 2 and not stopped.wait(0.01):
            pass
        (child,) = [int(name) for name in os.listdir("/proc") if name.isdigit() and of_soak(int(name), out)]
        os.kill(child, signal.SIGKILL)

    killer = threading.Thread(target=kill_once)
    killer.start()
    try:
        summary = soak.soak(soak.SoakConfig(settings=settings, out=out))
    finally:
        stopped.set()
        killer.join()
    assert len(summary["resumed_from"]) == 1 and summary["updates"] == 24
    assert summary["audited_tokens"] > 0 and summary["differing_tokens"] == 0 and 0 < summary["lag_max"] <= 8

    config = TrainConfig.from_values(report.read_config(out / "run") | {"out": tmp_path / "whole"})
    run(config, *soak._tasks(config))
    lines = [list(report.each_metrics(folder)) for folder in (out / "run", tmp_path / "whole")]
    timeless = [
        [{n: v for n, v in line.items() if not n.endswith(("seconds", "_mb"))} for line in one] for one in lines
    ]
    assert timeless[0] == timeless[1]

    whole = lines[1]
    mean = lambda part: sum(line["reward_mean"] for line in part) / len(part)
    assert summary["reward"] == {  # windows of 24 // 3 = 8 updates, the middle one from (24 - 8) / 2 on
        "start": mean(whole[:8]), "middle": mean(whole[8:16]), "end": mean(whole[16:]), "window": 8,
    }  # fmt: skip
    assert summary["accuracy"]["end"] == whole[23]["accuracy"] and summary["accuracy"]["at"] in (8, 16)
    for name in ("tokens", "audited_tokens"):
        assert summary[name] == sum(line[name] for line in whole)
    assert sum(value for name, value in summary.items() if name.startswith("tokens_lag_")) == summary["tokens"]
    assert set(summary["memory_mb"]) == {"24"}
    saved = json.loads((out / soak.SUMMARY).read_text())
    assert saved == summary and (out / soak.PLOT).stat().st_size > 1000
    assert soak.rows(summary)["resumed, times"] == 1


def of_soak(process, out):
    try:
        with open(f"/proc/{process}/cmdline", "rb") as opened:
            arguments = opened.read().split(b"\0")
    except OSError:
        return False
    return b"rz.soak" in arguments and str(out).encode() in arguments


def test_the_run_ends_with_the_process_that_supervises_it(tmp_path):
    make_tiny(tmp_path / "start", vocab_size=15, **SETTINGS["model"])
    settings = SETTINGS | {"train": TRAIN | {"updates": 1_000_000}}
    command = [sys.executable, "-P", "-m", "rz.soak", str(tmp_path), json.dumps(settings)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while not checkpoint.kept_versions(tmp_path / "run") and time.monotonic() < limit:
        assert child.poll() is None
        time.sleep(0.05)
    child.stdin.close()
    assert child.wait(30) == -signal.SIGKILL
