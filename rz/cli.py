"""The command line: each command's options are the fields of one config value."""

import contextlib
import io
import json
import math
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import attrs

# OpenMP reads these when torch is first imported. Threads that wait for work spin for about half a millisecond: without
# that small ops wait for them, and as long as by default (30 times that) they slow all else on the machine ten-fold.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tyro  # noqa: E402

from rz import measures  # noqa: E402
from rz.commands import (  # noqa: E402
    AuditCommand,
    BenchAsyncCommand,
    BenchLearnerCommand,
    BenchRolloutCommand,
    BenchStepCommand,
    EvalCommand,
    KernelsCommand,
    ResumeCommand,
    Smollm2Command,
    TinyCommand,
    VerifyCommand,
)
from rz.config import DTYPES, TrainConfig  # noqa: E402
from rz.demo import DemoConfig  # noqa: E402
from rz.experiments.kills import KillsCommand  # noqa: E402
from rz.experiments.lag import LagConfig  # noqa: E402
from rz.experiments.soak import SoakConfig  # noqa: E402
from rz.verify.prove import ProveConfig  # noqa: E402


def _demo(config: DemoConfig) -> int:
    from rz.demo import demo
    from rz.report import table

    rows = demo(config)
    table("rz demo", rows)
    return 1 if rows["tokens differing"] else 0


def _tokenizer(folder: Path, task: str) -> Any:
    """The tokenizer of a checkpoint; none for a task that does not ask for one."""
    if task.partition(":")[0] not in ("reasoning-gym", "jsonl"):
        return None
    if not folder.is_dir():
        raise ValueError(f"model must be the folder of a checkpoint, got {folder}")
    from transformers import AutoTokenizer

    try:
        tokenizer, line = AutoTokenizer.from_pretrained(folder, local_files_only=True), "it has no tokens"
    except (OSError, ValueError) as error:
        tokenizer, line = None, str(error).splitlines()[0]
    if tokenizer is None or not len(tokenizer) or not tokenizer.encode("1"):  # made of nothing where no file is
        raise ValueError(f"model must hold a tokenizer for task {task!r}, got {folder} ({line})")
    return tokenizer


def _open_tasks(folder: Path, spec: str, seed: int, chat_template: bool, *splits: str) -> list[Any]:
    from rz.tasks import open_task

    tokenizer = _tokenizer(folder, spec)
    template = None if chat_template else False
    return [open_task(spec, tokenizer, split=split, seed=seed, chat_template=template) for split in splits]


def _tasks(config: TrainConfig) -> tuple[Any, Any]:
    """(task, held-out task or None) of a run."""
    splits = ("train", "held_out") if config.eval_prompts else ("train",)
    return (*_open_tasks(config.model, config.task, config.seed, config.chat_template, *splits), None)[:2]


def _train(config: TrainConfig) -> int:
    from rz.report import table
    from rz.run import run

    rows = run(config, *_tasks(config))
    table("rz train", rows)
    return 1 if rows["tokens differing"] else 0


def _resume(command: ResumeCommand) -> int:
    from rz.report import table
    from rz.run import resume

    rows = resume(command.run, _tasks, updates=command.updates, same_machine=not command.any_machine)
    table("rz resume", rows)
    return 1 if rows["tokens differing"] else 0


def _audit(command: AuditCommand) -> int:
    from rz.audit import audit_run

    result, where = audit_run(command.run)
    farthest = result.max_abs if math.isfinite(result.max_abs) else None  # JSON has no infinity
    values = {"tokens": result.tokens, "differing": result.differing, "max_abs": farthest}
    if result.differing:
        values |= {"first": result.first, "op": where}
    measures.show(values, command.json, f"rz audit {command.run}")
    return 1 if result.differing else 0


def _verify_device(command: VerifyCommand) -> int:
    from rz.verify.device import verify_device

    found = verify_device(list(DTYPES) if command.dtype == "both" else [command.dtype])
    if command.json:
        print(json.dumps(found))
    else:
        tables = ("alignment", "float32_error", "speed")
        measures.show({name: value for name, value in found.items() if name not in tables}, False, "rz verify")
        for name in tables:
            measures.show(found[name], False, name)
    return 0 if found["passed"] else 1


def _verify(command: VerifyCommand) -> int:
    if command.device == "cuda":
        if command.model:
            raise ValueError(f"model must be left out with device cuda, got {command.model}")
        return _verify_device(command)
    import torch

    from rz.models.compute import has_narrow_products
    from rz.models.hf import load_config
    from rz.ops.probe import probe
    from rz.setup import probe_settings, product_shapes

    results = {}
    for name in list(DTYPES) if command.dtype == "both" else [command.dtype]:
        dtype = DTYPES[name]
        if command.model:
            model = load_config(command.model)
            found = probe(dtype, product_shapes(model), **probe_settings(model, dtype))
        else:
            found = probe(dtype, weight_dtype=dtype if has_narrow_products(dtype) else torch.float32)
        results |= {f"{name}: {result.name}": result for result in found}
    if command.json:
        print(json.dumps({name: result.passed for name, result in results.items()}))
    else:
        measures.show({n: "ok" if r.passed else f"FAILED {r.detail}" for n, r in results.items()}, False, "rz verify")
    return 0 if all(result.passed for result in results.values()) else 1


def _kernels(command: KernelsCommand) -> int:
    from rz.ops.tiles import TARGETS
    from rz.verify.kernel_table import kernel_table

    rows = kernel_table(TARGETS if command.target == "all" else [command.target], processes=command.processes)
    if command.json:
        print(json.dumps({"kernels": [attrs.asdict(row) | {"fits": row.fits} for row in rows]}))
    else:
        measures.show({row.name: str(row) for row in rows}, False, "rz kernels")
    return 0 if all(row.fits for row in rows) else 1


def _eval(command: EvalCommand) -> int:
    from rz.evaluate import evaluate
    from rz.models.hf import load_config, load_params

    config = load_config(command.model)
    params = load_params(command.model, config)
    (task,) = _open_tasks(command.model, command.task, command.seed, command.chat_template, command.split)
    accuracy = evaluate(
        params,
        config,
        task,
        questions=command.questions,
        temperature=command.temperature,
        max_tokens=command.max_tokens,
        max_length=command.max_length or min(1024, config.max_positions),
        slots=command.slots,
        dtype=DTYPES[command.dtype],
        seed=command.seed,
    )
    measures.show(attrs.asdict(accuracy), command.json, f"rz eval {command.model}")
    return 0


def _smollm2(command: Smollm2Command) -> int:
    from rz.models.make import make_smollm2
    from rz.report import new_run_folder

    make_smollm2(new_run_folder(command.out))
    print(f"wrote {command.out}: SmolLM2-135M-Instruct, 4-bit weights dequantised to float32")
    return 0


def _tiny(command: TinyCommand) -> int:
    from rz.models.make import make_tiny
    from rz.report import new_run_folder

    values = attrs.asdict(command)
    make_tiny(new_run_folder(values.pop("out")), **values)
    print(f"wrote {command.out}")
    return 0


RUN = {
    DemoConfig: _demo,
    TrainConfig: _train,
    ResumeCommand: _resume,
    AuditCommand: _audit,
    VerifyCommand: _verify,
    KernelsCommand: _kernels,
    EvalCommand: _eval,
    BenchRolloutCommand: measures.run_bench_rollout,
    BenchAsyncCommand: measures.run_bench_async,
    BenchStepCommand: measures.run_bench_step,
    BenchLearnerCommand: measures.run_bench_learner,
    ProveConfig: measures.run_prove,
    KillsCommand: measures.run_kills,
    SoakConfig: measures.run_soak,
    LagConfig: measures.run_lag,
    Smollm2Command: _smollm2,
    TinyCommand: _tiny,
}


def _parse(app: tyro.extras.SubcommandApp, arguments: list[str]) -> Any:
    """The command that arguments name. Raises: ValueError, one line, where tyro prints a box and exits."""
    said, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ |= {} if {"-h", "--help"} & set(arguments) else {"COLUMNS": "100000"}  # one row a sentence
    try:
        with contextlib.redirect_stderr(said):
            return app.cli(prog="rz", args=arguments, config=(tyro.conf.OmitSubcommandPrefixes,))
    except SystemExit as end:
        if not end.code:
            raise
    finally:
        os.environ.pop("COLUMNS", None)
        os.environ |= {} if columns is None else {"COLUMNS": columns}
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said.getvalue())
    rule = r"^[\u2502 ]*(?:-{8,}|\u2500{8,}|\u256d.*)[\u2502 ]*$"  # between title, message and hints
    message = re.split(rule, plain, flags=re.MULTILINE)[1].replace("\u2502", " ")
    raise ValueError(re.sub(r"^Error parsing (\w+(Config|Command): )?", "", " ".join(message.split())))


def main(arguments: list[str] | None = None) -> None:
    """Run one command. Exit status: 0; 1 if tokens differ, a probe fails or a run does; 2 for bad input;
    130 for Ctrl-C where nothing was begun."""
    app, bench, experiment, model = (tyro.extras.SubcommandApp() for _ in range(4))
    bench.__doc__, model.__doc__ = "Measure speed.", "Make a checkpoint."
    experiment.__doc__ = "Long runs that show what rz claims."
    for group, name, kind in (
        (app, "demo", DemoConfig),
        (app, "train", TrainConfig),
        (app, "resume", ResumeCommand),
        (app, "audit", AuditCommand),
        (app, "verify", VerifyCommand),
        (app, "kernels", KernelsCommand),
        (app, "eval", EvalCommand),
        (app, "prove", ProveConfig),
        (bench, "learner", BenchLearnerCommand),
        (bench, "rollout", BenchRolloutCommand),
        (bench, "async", BenchAsyncCommand),
        (bench, "step", BenchStepCommand),
        (experiment, "kills", KillsCommand),
        (experiment, "soak", SoakConfig),
        (experiment, "lag", LagConfig),
        (model, "smollm2", Smollm2Command),
        (model, "tiny", TinyCommand),
    ):
        group.command(name=name)(kind)
    app.command(bench, name="bench")
    app.command(experiment, name="experiment")
    app.command(model, name="model")
    try:
        command = _parse(app, sys.argv[1:] if arguments is None else arguments)
        sys.exit(RUN[type(command)](command))
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"rz: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1 if isinstance(error, TimeoutError) else 2)
    except RuntimeError as error:  # a fault of the run: a reward, the engine, the machine
        if not traceback.extract_tb(error.__traceback__)[-1].filename.startswith(str(Path(__file__).parent)):
            traceback.print_exception(error)  # raised by another library: where matters
        elif error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"rz: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("rz: interrupted", file=sys.stderr)
        sys.exit(130)
