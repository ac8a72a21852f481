import subprocess
import sys

import pytest

from rz.lock import only_process


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path):
    with only_process(tmp_path):
        with pytest.raises(ValueError, match="run must be in use by no other process, got .* which is"):
            with only_process(tmp_path):
                pass
        code = (
            "from pathlib import Path; from rz.lock import only_process\n"
            f"with only_process(Path({str(tmp_path)!r})): pass"
        )
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        assert other.returncode == 1 and "run must be in use by no other process" in other.stderr
    with only_process(tmp_path):
        assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with (
        pytest.raises(ValueError, match="run must be the folder of a run, got .*gone"),
        only_process(tmp_path / "gone"),
    ):
        pass
