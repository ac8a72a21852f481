import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {  # folder or file: what of rz it may import beside itself
    "rz/batch.py": (),
    "rz/steps": ("rz.batch",),
    "kernels": (),
    "rz/ops": ("rz.kernels",),
    "rz/models": ("rz.batch", "rz.ops"),
    "rz/engine": ("rz.batch", "rz.models", "rz.ops"),
    "rz/tasks": ("rz.batch",),
    "rz/schedule.py": (),
    "rz/rewards.py": ("rz.batch",),
    "rz/snapshot.py": ("rz.batch", "rz.rewards", "rz.schedule"),
    "rz/turn.py": ("rz.batch", "rz.schedule", "rz.rewards", "rz.snapshot", "rz.engine.interface"),
    "rz/loop.py": ("rz.turn", "rz.batch", "rz.schedule", "rz.rewards", "rz.snapshot", "rz.engine.interface"),
}
LIGHT = "rz rz.batch rz.ops rz.steps rz.models.hf rz.models.policy rz.engine.plain rz.schedule rz.loop rz.tasks"
HEAVY = "vllm triton transformers rich tyro matplotlib tensorboard reasoning_gym"


def imported(path: Path) -> set[str]:
    """Names of the modules that a file imports anywhere, each of `from rz import x` as rz.x."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"rz.{alias.name}" for alias in node.names} if node.module == "rz" else {node.module}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_downhill(room):
    place = ROOT / room
    own = room.removesuffix(".py").replace("/", ".").replace("kernels", "rz.kernels")
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            if name.partition(".")[0] == "rz":
                assert any(f"{name}.".startswith(f"{allowed}.") for allowed in (own, *ROOMS[room])), (path, name)


def test_light_modules_load_no_heavy_ones():
    code = f"import sys, {', '.join(LIGHT.split())}\nprint(*(set({HEAVY.split()}) & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.strip() == ""


def test_the_kernels_folder_is_rz_kernels():
    import rz.kernels

    assert Path(rz.kernels.__file__).parent == ROOT / "kernels"
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert setup["package-dir"]["rz.kernels"] == "kernels"
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "rz").rglob("__init__.py")}
    assert set(setup["packages"]) == folders | {"rz.kernels"}
