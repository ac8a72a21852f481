import os
import signal
import subprocess
import sys
import threading

import pytest

from rz.experiments.supervise import supervise


def ends(*codes):
    """Processes that end so one after the other: an exit status, or minus a signal."""
    texts = iter(
        f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})" for code in codes
    )
    return lambda: subprocess.Popen([sys.executable, "-S", "-c", next(texts)], process_group=0)


def test_a_process_that_dies_by_signals_is_begun_again_until_it_ends():
    reached = iter([0, 1, 1, 2])  # before, and after each death: further, not, further
    supervise(ends(-9, -9, -11, 0), lambda: next(reached), tries=2)


def test_deaths_without_progress_end_it():
    reached = iter([3, 4, 4, 4])
    with pytest.raises(RuntimeError, match="must get past 4, got killed by SIGKILL 2 times"):
        supervise(ends(-9, -9, -9), lambda: next(reached), tries=2)


def test_an_exit_status_ends_it():
    with pytest.raises(RuntimeError, match="exit status 0, got 3"):
        supervise(ends(3, 0), lambda: 0, tries=2)


def test_a_process_ends_with_the_one_that_supervises_it():
    code = "import time; from rz.experiments.supervise import follow_parent\n"
    code += "follow_parent(); print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"1\n" and child.poll() is None
    child.stdin.close()
    assert child.wait(30) == -signal.SIGKILL
    child.stdout.close()


def test_ctrl_c_is_passed_on_and_the_end_awaited(tmp_path):
    stop = f"lambda *_: (open({str(tmp_path / 'stopped')!r}, 'w').close(), sys.exit())"
    code = f"import signal, sys, time; signal.signal(2, {stop}); print(1, flush=True); time.sleep(60)"

    def begin():
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, process_group=0)
        child.stdout.readline()
        child.stdout.close()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return child

    with pytest.raises(KeyboardInterrupt):
        supervise(begin, lambda: 0, tries=1)
    assert (tmp_path / "stopped").exists()
