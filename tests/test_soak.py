"""The soak experiment: a run that is killed and goes on, and the sums at its end."""

import json
import os
import signal
import threading

from rz import checkpoint, report
from rz.config import TrainConfig
from rz.experiments import soak
from rz.run import run

SIZES = {"layers": 1, "hidden_size": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 16}
TRAIN = {
    "engine": "plain", "updates": 24, "group_size": 2, "groups_per_update": 2, "slots": 24, "max_lag": 8,
    "publish_every": 2, "audit_share": 0.5, "save_every": 2, "keep": 2, "eval_every": 8, "eval_prompts": 16,
    "learning_rate": 1e-4,
}  # fmt: skip
SETTINGS = {"model": SIZES | {"max_positions": 16}, "warm_up": 0.0, "tries": 2, "train": TRAIN}


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
    return b"rz.experiments.soak" in arguments and str(out).encode() in arguments
