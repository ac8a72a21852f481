"""A process for each thing that is compared, asked by turns, so that all of them meet the same machine."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}


class Worker:
    """A process that runs module.work(*arguments, **settings), which answers each line of its input with one line.

    Args:
        settings: of values that repr writes out.
        threads: of torch; None: as many as this process has.
        environment: variables beside this process's.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        settings: Mapping[str, Any] | None = None,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # Stock vLLM would leave a core out.
        count = torch.get_num_threads() if threads is None else threads
        call = f"import sys; from {module} import work; work(*sys.argv[1:], **{dict(settings or {})!r})"
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process dies
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"if __name__ == '__main__':\n    {call}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(count)} | dict(environment or {}),
        )

    def ask(self, number: int) -> str:
        """Send the number of a round; the line of answer. RuntimeError with the worker's last words if it died."""
        try:
            print(number, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            self._words.seek(0)
            words = self._words.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"worker must time round {number}, got its end: {words}")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._words.close()
