"""Scores by libraries that may never return, in a process of their own with a limit on processor time."""

import atexit
import functools
import importlib.util
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class ScoringProcess:
    """Asks scoring_child.py for scores, one at a time, from any thread.

    A symbolic library that is shown "9^9^9^9" computes without end and never lets go of the interpreter's lock, so that
    no thread and no time limit of the same process could help. Here the kernel ends the child when a call has used up
    its processor time, which unlike wall time does not depend on what else the machine is doing. The next call starts
    another child. A child ends when this process does.

    Args:
        seconds: >= 1. Processor time of one call; the import of the library is not counted.
    """

    def __init__(self, seconds: int) -> None:
        if seconds < 1:
            raise ValueError(f"seconds must be >= 1, got {seconds}")
        self._seconds = seconds
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, package: str, *arguments: Any) -> float:
        """The child's function named like the package that it uses.

        Raises: ImportError if the package is not installed; TimeoutError if the call used up its processor time;
            ValueError from the function itself; RuntimeError if it failed or the child ended in another way.
        """
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"{package} must be installed, got none: install rz with the extra `tasks`")
        with self._turn:
            if self._process is None:
                self._process = _start()
            try:
                pickle.dump((self._seconds, package, arguments), self._process.stdin)
                self._process.stdin.flush()
                score, error = pickle.load(self._process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError) as broken:
                status = self._end()
                if status == -signal.SIGXCPU:
                    raise TimeoutError(f"{package} must score within {self._seconds} s of processor time") from broken
                raise RuntimeError(f"scoring process must run on, got exit status {status} in {package}") from broken
            except BaseException:  # the reply to this call must not be read as that to the next
                self._process.kill()
                self._end()
                raise
        if error is not None:
            raise error
        return score

    def close(self) -> None:
        """End the child, if one runs. A later call starts another."""
        with self._turn:
            if self._process is not None:
                self._end()

    def _end(self) -> int:
        process, self._process = self._process, None
        try:
            process.stdin.close()  # the child ends when its input does
        except BrokenPipeError:
            pass
        process.stdout.close()
        return process.wait()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).with_name("scoring_child.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run, which still wants its last scores
    )


@functools.cache
def scoring_process() -> ScoringProcess:
    """The one that all tasks of this process share: 5 seconds a call."""
    process = ScoringProcess(5)
    atexit.register(process.close)
    return process
