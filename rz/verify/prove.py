"""The large proof: sample in every way that vLLM has, replay each token under its own version, count differing bits."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from rz.audit import replay
from rz.config import DTYPES
from rz.models.dense import random_params
from rz.models.hf import load_config, load_params, save_checkpoint
from rz.models.make import make_tiny
from rz.verify.scenarios import CONTROL, engines, moved_by_one_ulp, prove_scenario, requests, stock_rollouts

DEVIATION = 0.15  # of the random model's weights: logits wide enough for one unit in the last place to show


@attrs.frozen(kw_only=True)
class ProveConfig:
    """Sample on real vLLM in every way it has, replay each token under the weights that sampled it, count differences.

    Prompts of 1 to 2,000 tokens, responses past 1,000, batches of 1 to 64, prefix-cache hits, small odd chunk budgets,
    a cache so small that requests are preempted, publishes in mid-response, temperatures 0.6 and 1.0; in each dtype
    and under each thread count. Two controls must differ: one weight moved by one unit in the last place, and vLLM's
    own model. Exit status 1 if a token differs or a control does not.

    Args:
        tokens: sampled tokens in all, at least.
        model: checkpoint folder of at least 3,200 positions; without it, a random Qwen3 of 2 layers of width 128.
        dtype: of activations; both by default.
        threads: thread counts, each in a process of its own.
        seed: of weights, prompts and samples.
        json: print one JSON object.
    Raises: ValueError naming the field, the rule and the value.
    """

    tokens: int = 200_000
    model: Path | None = None
    dtype: Literal["float32", "bfloat16", "both"] = "both"
    threads: tuple[int, ...] = (1, 2)
    seed: int = 0
    json: bool = False

    def __attrs_post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens must be >= 1, got {self.tokens}")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        if not self.threads or min(self.threads) < 1:
            raise ValueError(f"threads must be one or more counts >= 1, got {self.threads}")

    @property
    def dtypes(self) -> list[str]:
        """Names of the dtypes to prove."""
        return list(DTYPES) if self.dtype == "both" else [self.dtype]


def random_model(folder: Path, *, seed: int) -> None:
    """Write the model of a proof without one: a Qwen3 of 2 layers of width 128 with a peaked distribution."""
    tiny = folder.with_name(folder.name + "-config")
    config = make_tiny(tiny, hidden_size=128, head_dim=32, intermediate_size=256, vocab_size=512, seed=seed)
    save_checkpoint(folder, random_params(config, seed=seed, deviation=DEVIATION), config, source=tiny)


def prove_dtype(folder: Path, *, dtype: str, tokens: int, seed: int, turn: int) -> list[dict[str, Any]]:
    """Every scenario in one dtype, and the two controls, in this process; one object each."""
    from rz.engine.vllm import VllmEngine

    config, kind = load_config(folder), DTYPES[dtype]
    params = load_params(folder, config)
    facts = {"dtype": dtype, "threads": torch.get_num_threads()}
    results, first = [], None
    for settings, scenarios in engines(turn):
        engine = VllmEngine(folder, config, params, dtype=kind, **settings)
        for scenario in scenarios:
            began, number = time.perf_counter(), len(results)
            share, here = int(scenario.share * tokens) + 1, seed + 100 * turn + number
            found, rollouts = prove_scenario(engine, params, scenario, dtype=kind, tokens=share, seed=here)
            first = first or rollouts
            settled = {"step_tokens": settings["step_tokens"], "seconds": round(time.perf_counter() - began, 1)}
            results.append(facts | {"control": False} | found | settled)
            _show(results[-1])
        engine.close()
    wanted = list(requests(CONTROL, tokens=1000, vocab_size=config.vocab_size, seed=seed))
    for name, weights, rollouts in (
        ("one weight moved by one unit in the last place", moved_by_one_ulp(params, dtype=kind), first),
        ("vLLM's own model", params, stock_rollouts(folder, dtype=kind, wanted=wanted)),
    ):
        control = attrs.asdict(replay(weights, config, rollouts, version=0, dtype=kind))
        results.append(facts | {"control": True, "scenario": name} | control)
        _show(results[-1])
    return results


def prove(config: ProveConfig) -> dict[str, Any]:
    """Run the proof, each thread count in a process of its own.

    Returns: tokens, differing, max_abs (nats) over the scenarios; controls and controls_differing (they must be equal);
        passed; seconds; and results, one object a scenario or control with the facts that show what happened in it.
    Raises: ValueError for a bad model; RuntimeError if a process fails or a scenario did not do what it is for.
    """
    began = time.perf_counter()
    results: list[dict[str, Any]] = []
    if config.model is not None and (longest := load_config(config.model).max_positions) < 3200:
        raise ValueError(f"max_positions of the model must be >= 3200, got {longest}")
    with tempfile.TemporaryDirectory(prefix="rz-prove-") as work:
        folder = Path(work) / "model" if config.model is None else config.model.absolute()
        if config.model is None:
            random_model(folder, seed=config.seed)
        share = -(-config.tokens // (len(config.threads) * len(config.dtypes)))
        for number, threads in enumerate(config.threads):
            out = Path(work) / f"{number}.json"
            settings = {"folder": str(folder), "dtypes": config.dtypes, "tokens": share, "seed": config.seed}
            given = json.dumps(settings | {"number": number, "out": str(out)})
            done = subprocess.run(
                [sys.executable, "-P", "-m", "rz.verify.prove", given],
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"},
                stdout=sys.stderr,
            )
            if done.returncode:
                raise RuntimeError(f"the proof with {threads} threads must end, got exit status {done.returncode}")
            results += json.loads(out.read_text())
    scenarios = [result for result in results if not result["control"]]
    controls = [result for result in results if result["control"]]
    total = {
        "tokens": sum(result["tokens"] for result in scenarios),
        "differing": sum(result["differing"] for result in scenarios),
        "max_abs": max(result["max_abs"] for result in scenarios),
        "controls": len(controls),
        "controls_differing": sum(result["differing"] > 0 for result in controls),
    }
    passed = not total["differing"] and total["controls"] == total["controls_differing"]
    return total | {"passed": passed, "seconds": round(time.perf_counter() - began, 1), "results": results}


def _show(result: dict[str, Any]) -> None:
    name = f"{result['dtype']}, {result['threads']} threads, {result['scenario']}"
    print(f"{name}: {result['tokens']} tokens, {result['differing']} differing", file=sys.stderr, flush=True)


def _child(settings: dict[str, Any]) -> None:
    results = []
    for place, dtype in enumerate(settings["dtypes"]):
        turn = settings["number"] * len(settings["dtypes"]) + place
        folder, tokens, seed = Path(settings["folder"]), settings["tokens"], settings["seed"]
        results += prove_dtype(folder, dtype=dtype, tokens=tokens, seed=seed, turn=turn)
    Path(settings["out"]).write_text(json.dumps(results))


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
