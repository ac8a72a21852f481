"""The kernel tests, in a process in which Triton interprets."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_kernels_in_the_interpreter():
    """By hand: TRITON_INTERPRET=1 pytest tests/kernels"""
    run = subprocess.run(
        [Path(sys.executable).with_name("pytest"), "tests/kernels", "-W", "error"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
