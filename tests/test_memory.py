"""Memory is flat from the first updates on."""

import json
import subprocess
import sys

from rz.models.make import make_tiny


def test_peak_memory_of_200_updates_is_that_of_20(tmp_path):
    make_tiny(tmp_path / "model", vocab_size=15, hidden_size=32, heads=2, kv_heads=1, head_dim=16, max_positions=64)
    sizes = (
        "--group-size 2 --groups-per-update 2 --slots 8 --max-tokens 4 --max-length 16 --updates 200 --eval-prompts 0"
    )
    command = ["train", "--model", tmp_path / "model", "--task", "arithmetic", "--out", tmp_path / "run", "--engine"]
    program = "import sys; from rz.cli import main; main(sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", program, *map(str, command), "plain", *sizes.split(), "--eval-prompts", "0"], check=True
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    peak = {line["policy_version"]: line["memory_mb"] for line in map(json.loads, lines)}
    # One page table or arena may still be added; a leak of one batch, model or response an update is far above 4 MB.
    assert peak[200] - peak[20] <= 4, (peak[20], peak[200])
