"""Speed of the whole loop on the demo's task: rollouts, rewards, updates, audit, publishes and logs."""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from rz import report
from rz.config import TrainConfig
from rz.models.make import make_tiny
from rz.run import run
from rz.tasks import Arithmetic

WARM = 5  # updates of a round that are not counted


def bench_step(
    *, layers: int, hidden_size: int, responses: int, tokens: int, max_lag: int, engine: str, updates: int, rounds: int
) -> dict[str, Any]:
    """Responses per second of rz.run.run on two-digit sums, with a random Qwen3 model: most responses are full length.

    Args:
        responses: of an update, in groups of 8.  tokens: of a response, at most.
        updates: of a round, more than 5; the first 5 are not counted.
    Returns: responses_per_second (median of the rounds), lowest and highest, and mean seconds an update of each part.
    Raises: ValueError for a number out of range.
    """
    if responses < 8 or responses % 8:
        raise ValueError(f"responses must be a multiple of 8, got {responses}")
    if updates <= WARM or rounds < 1:
        raise ValueError(f"updates must be > {WARM} and rounds >= 1, got {updates} and {rounds}")
    speeds, lines = [], []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        make_tiny(
            root / "model", layers=layers, hidden_size=hidden_size, heads=4, kv_heads=2, head_dim=hidden_size // 4,
            intermediate_size=4 * hidden_size, vocab_size=len(Arithmetic.tokenizer), max_positions=tokens + 64,
        )  # fmt: skip
        for number in range(rounds):
            config = TrainConfig(
                model=root / "model", task="arithmetic", out=root / f"run-{number}", engine=engine, updates=updates,
                group_size=8, groups_per_update=responses // 8, max_lag=max_lag, slots=responses * (1 + (max_lag > 0)),
                max_tokens=tokens, max_length=tokens + 16, eval_prompts=0, learning_rate=1e-5,
            )  # fmt: skip
            run(config, Arithmetic(), None)
            counted = report.read_metrics(config.out)[WARM:]
            speeds.append(responses * len(counted) / sum(line["seconds"] for line in counted))
            lines += counted
    parts = {name: statistics.mean(line[name] for line in lines) for name in lines[0] if name.endswith("seconds")}
    return {
        "responses_per_second": statistics.median(speeds),
        "min": min(speeds),
        "max": max(speeds),
        "tokens_per_response": statistics.mean(line["tokens"] / responses for line in lines),
        "differing_tokens": sum(line["differing_tokens"] for line in lines),
        **parts,
    }
