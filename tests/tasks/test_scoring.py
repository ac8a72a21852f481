import os
import signal
import subprocess
import sys

import pytest

from rz.tasks import scoring
from rz.tasks.scoring import ScoringProcess

CHILD = scoring.__file__.replace("scoring.py", "scoring_child.py")
# The package "math" stands for one whose function burns that much processor time.
BURN = f"""
import runpy, time
child = runpy.run_path({CHILD!r})
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
child["FUNCTIONS"]["math"] = burn
"""


@pytest.fixture(scope="module")
def process():
    process = ScoringProcess(3)  # a new child needs about half a second for its first parse, twice that on busy cores
    yield process
    process.close()


def test_the_limit_is_for_each_call_and_not_for_all_together():  # 4 * 0.55 s is beyond the limit of 1 to 2 s
    code = (
        f"{BURN}\nfor seconds in 4 * [0.55] + [9]: child['limited'](1, 'math', (seconds,)); print(seconds, flush=True)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "0.55\n" * 4
    assert ended.returncode == -signal.SIGXCPU


def test_an_error_of_the_function_leaves_the_child_running(process):
    with pytest.raises(ValueError, match="answer must be an expression"):
        process.call("math_verify", "$", "5")
    child = process._process.pid
    assert process.call("math_verify", "5", "5") == 1.0
    with pytest.raises(RuntimeError, match="TypeError"):
        process.call("math_verify", "5")
    assert process.call("math_verify", "5", "5") == 1.0
    assert process._process.pid == child


def test_a_call_that_is_interrupted_does_not_leave_its_reply_to_the_next(process, monkeypatch):
    def interrupted(stream):
        raise KeyboardInterrupt

    assert process.call("math_verify", "5", "5") == 1.0
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scoring.pickle, "load", interrupted)
        process.call("math_verify", "5", "$5$")
    assert process.call("math_verify", "5", "$4$") == 0.0  # not the 1.0 of the call before


def test_a_tower_of_powers_is_ended_and_the_next_call_works(process):
    with pytest.raises(TimeoutError, match="math_verify must score within 3 s of processor time"):
        process.call("math_verify", "5", "$9^{9^{9^9}}$")
    assert process.call("math_verify", "5", "$5$") == 1.0


def test_a_child_that_dies_otherwise_is_no_time_limit(process):
    process.call("math_verify", "5", "5")
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="scoring process must run on, got exit status -9 in math_verify"):
        process.call("math_verify", "5", "5")


def test_the_child_ends_on_close(process):
    process.call("math_verify", "5", "5")
    child = process._process
    process.close()
    assert child.returncode == 0
    process.close()


def test_a_package_that_is_not_installed(process, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="math_verify must be installed, got none: install rz with the extra `tasks`"):
        process.call("math_verify", "5", "5")


def test_bad_limit():
    with pytest.raises(ValueError, match="seconds must be >= 1, got 0"):
        ScoringProcess(0)
