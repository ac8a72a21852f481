import subprocess
import sys

import pytest
from test_text import TEMPLATE, byte_tokenizer, plain

from rz.tasks import Arithmetic, open_task


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(template=TEMPLATE)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a b=c&d.jsonl"
    path.write_text('{"question": "half?", "solution": "1/2"}')
    return path


def test_arithmetic():
    assert open_task("arithmetic") == Arithmetic()
    assert open_task("arithmetic?digits=1&held_out=0.25", seed=4, split="held_out") == Arithmetic(
        digits=1, held_out=0.25, seed=4, split="held_out"
    )


def test_reasoning_gym(tokenizer):
    task = open_task("reasoning-gym:chain_sum", tokenizer, seed=3)
    with pytest.raises(TypeError, match="without an end"):
        len(task)
    spec = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&allow_negation=True&size=4"
    task = open_task(spec, tokenizer, seed=3, split="held_out", chat_template=False, stop_ids=(5,))
    assert (len(task), task.chat_template, task.stop_ids) == (4, False, (5,))
    assert task.prompt(0).data["metadata"]["num_terms"] == 2
    assert any("-" in task.prompt(i).data["metadata"]["expression"] for i in range(4))


def test_jsonl(tokenizer, path):
    task = open_task(f"jsonl:{path}?verifier=number&prompt=question&answer=solution", tokenizer)
    assert task.prompt(0).data == "1/2"
    assert task.score(task.prompt(0), plain(tokenizer, "0.5")) == 1.0
    assert task.chat_template
    exact = open_task(f"jsonl:{path}?prompt=question&answer=solution", tokenizer)
    assert exact.score(exact.prompt(0), plain(tokenizer, "0.5")) == 0.0
    with pytest.raises(ValueError, match="held_out must be > 0 for the split held_out"):
        open_task(f"jsonl:{path}?prompt=question&answer=solution", tokenizer, split="held_out")


def test_a_value_may_hold_what_separates(tokenizer, path):
    path.write_text('{"a&b=?": "q", "answer": "x"}')
    assert open_task(f"jsonl:{path}?prompt=a%26b=?", tokenizer).prompt(0).data == "x"


@pytest.mark.parametrize(
    "spec", ["", "sums", "arithmetic:2", "arithmetic:", "jsonl", "jsonl:", "reasoning-gym:?size=2", ":a"]
)
def test_a_bad_line_gives_the_rule(spec):
    with pytest.raises(
        ValueError, match="task must be arithmetic, reasoning-gym:NAME or jsonl:FILE, .*, got "
    ) as caught:
        open_task(spec)
    assert str(caught.value).endswith(f"got {spec!r}")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("arithmetic?", "options must be KEY=VALUE joined by &, each key once, got '' in 'arithmetic[?]'"),
        ("arithmetic?digits", "options must be KEY=VALUE .*, got 'digits' in "),
        ("arithmetic?=2", "options must be KEY=VALUE .*, got '=2' in "),
        ("arithmetic?digits=1&digits=2", "options must be KEY=VALUE .*, got 'digits=2' in "),
        ("arithmetic?terms=2", "options of arithmetic must be among digits, held_out, got 'terms'"),
        ("arithmetic?digits=0", "digits must be 1 to 9, got 0"),
        ("jsonl:x?seed=2", "options of jsonl must be among verifier, prompt, answer, held_out, got 'seed'"),
        ("jsonl:x?verifier=fuzzy", "verifier must be one of exact, number, math-verify, got 'fuzzy'"),
        ("reasoning-gym:chain_sum?terms=2", "config of chain_sum must have keys among .*, got 'terms'"),
        ("reasoning-gym:chain_sum?max_terms=2x", "config of chain_sum must be what the generator accepts "),
    ],
)
def test_bad_options(tokenizer, spec, message):
    with pytest.raises(ValueError, match=message):
        open_task(spec, tokenizer)


def test_an_option_of_a_wrong_type():
    with pytest.raises(TypeError, match="digits must be of type int, got 'two'"):
        open_task("arithmetic?digits=two")


@pytest.mark.parametrize("spec", ["jsonl:x", "reasoning-gym:chain_sum"])
def test_a_tokenizer_is_needed(spec):
    with pytest.raises(ValueError, match="tokenizer must be given for (jsonl|reasoning-gym), got None"):
        open_task(spec)


def test_another_process_imports_no_extra_and_has_the_same_prompts():
    code = """import sys, rz.tasks
print({"reasoning_gym", "math_verify", "transformers", "sympy"} & {*sys.modules})
print([rz.tasks.open_task("arithmetic", seed=5).operands(i) for i in range(4)])"""
    environment = {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert other.stdout == f"set()\n{[Arithmetic(seed=5).operands(i) for i in range(4)]}\n"
