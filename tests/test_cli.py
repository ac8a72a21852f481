import contextlib
import io
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from rz import report
from rz.cli import main

CLI = sys.modules[main.__module__]

SIZES = "--layers 1 --hidden-size 32 --heads 2 --kv-heads 1 --head-dim 16 --intermediate-size 48 --vocab-size 15"
SHORT = "--updates 4 --group-size 2 --groups-per-update 2 --max-lag 2 --slots 6 --max-tokens 4 --max-length 16"
KEPT = "--learning-rate 1e-3 --audit-share 1 --save-every 1 --keep 0 --eval-every 2 --eval-prompts 4"
ANSWER = {"prompt": "1 + 2 = ", "answer": "3"}


def rz(*arguments):
    """(exit status, what was printed, what was said on stderr) of one command line."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(SystemExit) as end, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main([str(argument) for argument in arguments])
    return end.value.code or 0, out.getvalue(), err.getvalue()


def refused(*arguments, says):
    status, out, err = rz(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("rz: ") and err.endswith("\n") and err.count("\n") == 1
    for part in says:
        assert part in err


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "model"
    assert rz("model", "tiny", "--out", folder, *SIZES.split()) == (0, f"wrote {folder}\n", "")
    return folder


@pytest.fixture(scope="module")
def worded(model, tmp_path_factory):
    """The model with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate("? </s> 0 1 2 3 + =".split())}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("worded") / "model"
    shutil.copytree(model, folder)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="?").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """(run folder, what was printed) of a short run that keeps every version and audits every response."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    arguments = ("--model", model, "--task", "arithmetic?digits=1", "--out", folder, "--engine", "plain")
    status, out, err = rz("train", *arguments, *SHORT.split(), *KEPT.split())
    assert (status, err) == (0, "")
    return folder, out


# Bad input


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--group-size 1", ("group_size must be >= 2, got 1",)),
        ("--top-p 0.9", ("top_p must be 1.0, got 0.9", "cannot reproduce")),
        ("--top-k 40", ("top_k must be 0, got 40",)),
        ("--temperature 0", ("temperature must be > 0 and finite, got 0.0",)),
        ("--max-tokens 16 --max-length 16", ("max_tokens must be < max_length 16, got 16",)),
        ("--max-tokens 13 --max-length 16", ("max_length must be >= ", "max_tokens (13)", "got 16")),
        ("--engine vllm --max-length 5000", ("max_length must be <= the model's max_positions 4096, got 5000",)),
        ("--exact-lag 9", ("exact_lag must be in [0, max_lag 8], got 9",)),
        ("--task nothing", ("task must be arithmetic, reasoning-gym:NAME or jsonl:FILE", "got 'nothing'")),
        ("--task arithmetic?digits", ("options must be KEY=VALUE", "got 'digits'")),
        ("--task arithmetic?digits=0", ("digits must be 1 to 9, got 0",)),
        ("--task arithmetic?digit=1", ("options of arithmetic must be among digits, held_out, got 'digit'",)),
        ("--task jsonl:x.jsonl", ("model must hold a tokenizer for task 'jsonl:x.jsonl', got ",)),
        ("--updates many", ("--updates", "int", "'many'")),
        ("--engine fast", ("--engine", "'fast'", "vllm", "plain")),
        ("--speed 3", ("--speed",)),
    ],
)
def test_an_impossible_setting_is_one_line(model, tmp_path, options, says):
    given = ("--model", model, "--task", "arithmetic", "--out", tmp_path / "run", "--engine", "plain")
    refused("train", *given, *options.split(), says=says)
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), ("demo", "train", "audit")),
        (("trian",), ("trian",)),
        (("model",), ("smollm2", "tiny")),
        (("train", "--task", "arithmetic"), ("--model", "--out")),
        (("audit",), ("rz audit",)),
        (("verify", "--dtype", "float16"), ("--dtype", "float16", "bfloat16")),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_line(arguments, says):
    refused(*arguments, says=says)


def no_folder(folder):
    shutil.rmtree(folder)
    return ("model/config.json must be a readable file",)


def no_weights(folder):
    (folder / "model.safetensors").unlink()
    return ("model must hold model.safetensors",)


def unknown_architecture(folder):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": ["GPT2LMHeadModel"]}))
    return "config.json: architectures must be one of ", "got ['GPT2LMHeadModel']"


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    return ("model.safetensors must be a whole safetensors file",)


def change(folder, rewrite):
    tensors = load_file(folder / "model.safetensors")
    rewrite(tensors)
    save_file(tensors, folder / "model.safetensors")


def missing_tensor(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.weight"))
    return "must hold the tensor model.layers.0.self_attn.k_proj.weight [16, 32]", "got none"


def wrong_shape(folder):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    return ("model.norm.weight must have the shape [32], got [31]",)


def nan_weights(folder):
    change(folder, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][3, 5].fill_(torch.nan))
    return ("model.layers.0.mlp.up_proj.weight must be finite, got nan",)


DAMAGES = (no_folder, no_weights, unknown_architecture, cut_short, missing_tensor, wrong_shape, nan_weights)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_damaged_checkpoint_is_one_line(model, tmp_path, damage, command):
    shutil.copytree(model, tmp_path / "model")
    says = damage(tmp_path / "model")
    out = ("--engine", "plain", "--out", tmp_path / "run") if command == "train" else ()
    before = contents(tmp_path)
    refused(command, "--model", tmp_path / "model", "--task", "arithmetic", *out, says=says)
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_one_line(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    train = ("train", "--model", model, "--task", "arithmetic", "--engine", "plain", "--out")
    refused(*train, tmp_path, says=(f"out must be a new or empty folder, got {tmp_path} with file",))
    for place in (tmp_path / "file", tmp_path / "file" / "under"):
        refused(*train, place, says=(f"out must be a folder that can be written, got {place}",))
        refused(
            "model",
            "tiny",
            "--out",
            place,
            *SIZES.split(),
            says=("out must be a folder that can be written", str(place)),
        )
    assert contents(tmp_path) == before


def test_a_checkpoint_is_never_replaced_by_a_new_one(model):
    before = contents(model)
    refused("model", "tiny", "--out", model, *SIZES.split(), says=(f"out must be a new or empty folder, got {model}",))
    assert contents(model) == before


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "1 + 2 = "', ("line must be JSON",)),
        ("[1]", ("line must be a JSON object, got [1]",)),
        ('{"prompt": "1 + 2 = "}', ("answer must be there, got fields",)),
        ('{"prompt": 3, "answer": "3"}', ("prompt must be a string, got 3",)),
        ('{"prompt": "1", "answer": "three"}', ("answer must be a number, got 'three' in field answer",)),
    ],
)
def test_a_malformed_jsonl_line_is_named(worded, tmp_path, line, says):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(ANSWER) + "\n" + line + "\n")
    task = f"jsonl:{path}?verifier=number&held_out=0.5"
    train = ("train", "--model", worded, "--task", task, "--engine", "plain", "--out", tmp_path / "run")
    refused(*train, says=(f"{path}:2: ", *says))
    assert list(tmp_path.iterdir()) == [path]


def test_a_task_that_is_not_there_is_one_line(worded, tmp_path):
    train = ("train", "--model", worded, "--engine", "plain", "--out", tmp_path / "run", "--task")
    refused(*train, f"jsonl:{tmp_path}/none.jsonl?held_out=0.5", says=(f"{tmp_path}/none.jsonl",))
    refused(*train, "reasoning-gym:chain_sums", says=("name must be a generator", "chain_sum,", "got 'chain_sums'"))
    refused(*train, "reasoning-gym:chain_sum?term=2", says=("config of chain_sum must have keys", "got 'term'"))
    refused(*train, "reasoning-gym:chain_sum?min_terms=9", says=("config of chain_sum must be what", "9"))
    assert not contents(tmp_path)


def test_an_audit_of_a_folder_that_is_no_run_is_one_line(model, tmp_path):
    for folder in (model, tmp_path / "none"):
        refused("audit", folder, says=(f"run must be the folder of a run, with run.json, got {folder}",))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--questions 0", "questions must be >= 1, got 0"),
        ("--temperature 0", "temperature must be > 0 and finite, got 0.0"),
        ("--slots 0", "slots must be >= 1, got 0"),
        ("--max-tokens 16", "max_tokens must be <= max_length 16"),
    ],
)
def test_an_impossible_evaluation_is_one_line(model, options, says):
    given = ("--model", model, "--task", "arithmetic", "--max-tokens", 4, "--max-length", 16)
    refused("eval", *given, *options.split(), says=(says,))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_a_device_that_is_not_there_is_refused(model, tmp_path):
    refused("verify", "--device", "cuda", says=("device must be one that torch reaches as cuda, got none",))
    given = ("--model", model, "--task", "arithmetic", "--out", tmp_path / "run", "--engine", "plain", *SHORT.split())
    refused("train", *given, "--device", "cuda", says=("device must be one that torch finds, got cuda",))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_the_check_without_the_command_line_says_the_same():
    run = subprocess.run([sys.executable, "-m", "rz.verify.device"], capture_output=True, text=True, timeout=120)
    line = "rz: device must be one that torch reaches as cuda, got none\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", line)


def test_kernels_that_cannot_be_compiled_are_refused(monkeypatch):
    refused("kernels", "--target", "gfx950", "--processes", 0, says=("processes must be >= 1, got 0",))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refused("kernels", "--target", "gfx950", says=("TRITON_INTERPRET must not be set where kernels are compiled",))


def test_verify_of_a_device_takes_no_model(model):
    refused("verify", "--device", "cuda", "--model", model, says=("model must be left out with device cuda, got",))


def test_help_of_every_command():
    for command in (
        "",
        "demo",
        "train",
        "audit",
        "verify",
        "kernels",
        "eval",
        "prove",
        "bench learner",
        "bench rollout",
        "model smollm2",
        "model tiny",
    ):
        status, out, err = rz(*command.split(), "--help")
        assert (status, err) == (0, "") and f"usage: rz {command}".strip() in out


# A run


def test_metrics_have_every_field_and_one_axis(trained):
    lines = [json.loads(line) for line in (trained[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4]
    names = "reward_mean loss grad_norm tokens lag_mean lag_max k1 k2 k3 ess ratio_max audited_tokens differing_tokens"
    parts = "rollout_seconds reward_wait_seconds update_seconds audit_seconds publish_seconds"
    for line in lines:
        assert all(isinstance(line[name], int | float) for name in names.split())
        assert 0 < sum(line[part] for part in parts.split()) <= line["seconds"]
        assert line["lag_mean"] <= line["lag_max"] <= 2
    assert lines[0]["lag_max"] == 0 and lines[0]["ratio_max"] == 1 and lines[0]["ess"] == 1
    assert sum(line["differing_tokens"] for line in lines) == 0
    assert [line["policy_version"] for line in lines if "accuracy" in line] == [2, 4]


def test_every_response_is_logged(trained):
    responses = [json.loads(line) for line in (trained[0] / "rollouts.jsonl").read_text().splitlines()]
    tokens = [line["tokens"] for line in report.read_metrics(trained[0])]
    assert [response["consumed_at"] for response in responses] == [version for version in range(4) for _ in range(4)]
    for version in range(4):
        consumed = [response for response in responses if response["consumed_at"] == version]
        assert sum(len(response["response_ids"]) for response in consumed) == tokens[version]
    for response in responses:
        assert response["reward"] in (0, 1)
        assert all(0 <= response["consumed_at"] - sampled <= 2 for sampled in response["policy_versions"])
        logprobs = torch.tensor(response["behaviour_logprobs"], dtype=torch.float64)
        assert torch.equal(logprobs.float().double(), logprobs)


def test_what_a_run_leaves(trained):
    folder, out = trained
    names = {"run.json", "metrics.jsonl", "rollouts.jsonl", "checkpoints", "tensorboard", "plot.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [f"version-00000{v}" for v in range(5)]
    for row in ("held-out accuracy before", "held-out accuracy after", "lag max", "tokens differing", "updates per"):
        assert row in out


def test_the_audit_finds_no_difference(trained):
    tokens = sum(line["tokens"] for line in report.read_metrics(trained[0]))
    status, out, err = rz("audit", trained[0], "--json")
    assert (status, json.loads(out), err) == (0, {"tokens": tokens, "differing": 0, "max_abs": 0.0}, "")
    status, out, _ = rz("audit", trained[0])
    assert status == 0 and "differing" in out


def test_the_audit_finds_one_logprob_moved_by_one_ulp(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    was = torch.tensor(lines[5]["behaviour_logprobs"][0])
    moved = torch.nextafter(was, torch.tensor(0.0))
    lines[5]["behaviour_logprobs"][0] = moved.item()
    (run / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, _ = rz("audit", run, "--json")
    found = json.loads(out)
    assert (status, found["differing"], found["max_abs"]) == (1, 1, (moved - was).item())
    assert found["first"] == [lines[5]["prompt"], lines[5]["sample"], 0]


def test_the_audit_finds_one_weight_moved_by_one_ulp(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    upwards = lambda tensor: tensor[:, 0].copy_(torch.nextafter(tensor[:, 0], torch.tensor(torch.inf)))
    change(run / "checkpoints" / "version-000000", lambda tensors: upwards(tensors["model.embed_tokens.weight"]))
    status, out, _ = rz("audit", run, "--json")
    assert status == 1 and json.loads(out)["differing"] > 0


def test_eval_prints_one_object(trained):
    folder = trained[0] / "checkpoints" / "version-000004"
    limits = ("--questions", 8, "--max-tokens", 4, "--max-length", 16)
    status, out, err = rz("eval", "--model", folder, "--task", "arithmetic?digits=1", *limits, "--json")
    found = json.loads(out)
    assert (status, err) == (0, "") and found.keys() == {"mean", "low", "high", "questions", "tokens_mean"}
    assert 0 <= found["low"] <= found["mean"] <= found["high"] <= 1 and found["questions"] == 8


def test_verify_prints_one_object(model):
    status, out, err = rz("verify", "--model", model, "--dtype", "float32", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "") and found and all(value is True for value in found.values())
    assert "float32: linear 32 to 64" in found  # qkv of this model


def test_a_run_trains_on_questions_from_a_file(worded, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(ANSWER | {"prompt": f"{i} + 1 = "}) + "\n" for i in range(4)))
    given = ("--model", worded, "--task", f"jsonl:{path}", "--out", tmp_path / "run", "--engine", "plain")
    status, _, err = rz("train", *given, *SHORT.split(), "--eval-prompts", 0)
    assert (status, err) == (0, "") and len(report.read_metrics(tmp_path / "run")) == 4


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (RuntimeError("engine must live,\n got its end"), 1, "rz: engine must live, got its end"),
        (KeyboardInterrupt(), 130, "rz: interrupted"),
    ],
)
def test_a_run_that_fails_or_is_interrupted_at_its_start_ends_with_one_line(monkeypatch, capsys, error, status, says):
    def fails(command):
        raise error

    monkeypatch.setattr(CLI, "RUN", dict.fromkeys(CLI.RUN, fails))
    monkeypatch.setattr(CLI, "__file__", __file__)  # as if it were raised in rz
    with pytest.raises(SystemExit) as end:
        main(["resume", "gone"])
    assert end.value.code == status and capsys.readouterr().err.splitlines() == [says]


def test_a_fault_of_another_library_shows_where_before_its_line(monkeypatch, capsys):
    monkeypatch.setattr(CLI, "RUN", dict.fromkeys(CLI.RUN, lambda command: torch.ones(2) @ torch.ones(3)))
    monkeypatch.setattr(CLI, "__file__", "/elsewhere/cli.py")
    with pytest.raises(SystemExit) as end:
        main(["resume", "gone"])
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 1 and lines[0].startswith("Traceback") and lines[-1].startswith("rz: ")
