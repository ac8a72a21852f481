"""A process that is begun again whenever it dies by a signal."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable


def supervise(begin: Callable[[], subprocess.Popen], reached: Callable[[], int], *, tries: int) -> None:
    """Begin a process, and again whenever it dies by a signal, until one ends.

    Args:
        begin: starts one, the leader of a process group of its own, with a pipe as stdin if it is to follow_parent.
        reached: what would be kept if it died now; larger is further.
        tries: >= 1 deaths in a row, without getting further, that are one too many.
    Raises: RuntimeError after so many deaths, or if one ends with an exit status that is not 0. Ctrl-C is passed on,
        and the end of the process awaited.
    """
    best, vain = reached(), 0
    while True:
        child = begin()
        try:
            try:
                status = child.wait()
            except KeyboardInterrupt:
                os.killpg(child.pid, signal.SIGINT)
                child.wait()
                raise
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            if child.stdin:
                child.stdin.close()
        if status == 0:
            return
        if status > 0:
            raise RuntimeError(f"the run must end with exit status 0, got {status}")
        now = reached()
        best, vain = max(best, now), 0 if now > best else vain + 1
        name = signal.Signals(-status).name
        if vain >= tries:
            raise RuntimeError(f"the run must get past {best}, got killed by {name} {vain} times before it did")
        print(f"rz: the run was killed by {name}; going on from {now}", file=sys.stderr, flush=True)


def follow_parent() -> None:
    """From here on this process ends with the one that holds the other end of stdin: two must not write one folder."""
    threading.Thread(target=_end_with_stdin, daemon=True).start()


def _end_with_stdin() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)
