"""Every kernel with every tile, compiled ahead of time for five device classes, where nothing is interpreted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rz.ops.tiles import ATTENTION, ATTENTION_BACKWARD, GEMM, SHARED_LIMIT, TARGETS

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [Path(sys.executable).with_name("rz"), "kernels", "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    rows = json.loads(run.stdout)["kernels"]
    share = len(rows) // len(TARGETS)
    done = [f"{target}: compiled, {share * place} of {len(rows)} in all" for place, target in enumerate(TARGETS, 1)]
    assert run.stderr.splitlines() == done[:-1]
    assert run.returncode == 0, [row for row in rows if not row["fits"]]
    return rows


def test_nothing_spills_and_all_fits(table):
    for row in table:
        assert row["spills"] == 0 and row["shared"] <= SHARED_LIMIT[row["target"]], row
        assert 0 < row["registers"] <= (255 if row["target"].startswith("sm_") else 512), row


def test_every_tile_of_the_table_is_compiled(table):
    tile = lambda t: (f"{t.m} x {t.n}", t.warps, t.stages)
    for target in TARGETS:
        made = {}
        for row in (row for row in table if row["target"] == target):
            place = made.setdefault(row["kernel"], set())
            place.add((" x ".join(row["tile"].split(" x ")[:2]), row["warps"], row["stages"]))
        assert made["gemm"] == {tile(t) for t in GEMM[target]}
        assert made["attend"] == {tile(t) for kind in ATTENTION[target] for t in kind}
        backward = {tile(t) for kind in ATTENTION_BACKWARD[target] for t in kind}
        assert made["attention_to_queries"] == made["attention_to_keys"] == backward


def test_every_kernel_is_compiled_for_every_target(table):
    """A kernel is a function of kernels/ that asks for its program's number; the others are called by kernels."""
    functions = [
        function
        for path in (ROOT / "kernels").glob("*.py")
        for function in path.read_text(encoding="utf-8").split("\ndef ")[1:]
    ]
    kernels = {function.partition("(")[0] for function in functions if "tl.program_id" in function}
    assert len(kernels) >= 17
    for target in TARGETS:
        assert {row["kernel"] for row in table if row["target"] == target} == kernels


def test_the_table_for_people(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = (
        "from rz.verify.kernel_table import compile_case; from rz.verify.kernel_cases import kernel_cases\n"
        "place = next(i for i, (_, launch) in enumerate(kernel_cases('sm_90')) if launch.kernel.__name__ == 'rope')\n"
        "row = compile_case('sm_90', place); print(row.name, '|', row)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert run.stdout.startswith("sm_90: rope 32 heads of 128, bfloat16 | 32 x 64, 4 warps, 1 stages: ")
    assert run.stdout.strip().endswith(" registers, 0 spills, 0 of 232448 B shared")
