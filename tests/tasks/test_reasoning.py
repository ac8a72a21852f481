import sys

import pytest
from reasoning_gym import create_dataset
from test_text import byte_tokenizer, plain

from rz.tasks import reasoning
from rz.tasks.reasoning import BLOCK, HELD_OUT_OFFSET, INSTRUCTION, final_answer, reasoning_gym_task

GENERATORS = ["chain_sum", "basic_arithmetic", "gcd", "spell_backward", "count_bits", "letter_counting", "gsm_symbolic"]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_own_answers_score_and_others_do_not(tokenizer, name, split):
    task = reasoning_gym_task(name, tokenizer, seed=3, split=split)
    for index in (0, 7, BLOCK + 1):
        prompt = task.prompt(index)
        answer = prompt.data["answer"]
        assert prompt.token_ids == plain(tokenizer, prompt.data["question"] + INSTRUCTION)
        for text in (answer, f"Let me see.\n<answer> {answer}\n</answer>", f"Answer: {answer}"):
            assert task.score(prompt, (*plain(tokenizer, text), 1)) == 1.0
        assert task.score(prompt, plain(tokenizer, f"<answer>{answer}</answer> no, <answer>?</answer>")) == 0.0
        assert task.score(prompt, ()) == 0.0


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic"])
def test_prompt_depends_on_index_alone(tokenizer, name):
    task, again = (reasoning_gym_task(name, tokenizer, seed=3) for _ in range(2))
    indices = [5, 0, BLOCK - 1, BLOCK, 20 * BLOCK + 3, 5]
    there = {index: task.prompt(index) for index in indices}
    assert [again.prompt(index) for index in reversed(indices)] == [there[index] for index in reversed(indices)]
    assert len({prompt.token_ids for prompt in there.values()}) == 5


def test_questions_are_those_of_the_random_state_seed_plus_index(tokenizer):
    task, held_out = (reasoning_gym_task("chain_sum", tokenizer, seed=3, split=s) for s in ("train", "held_out"))
    whole = create_dataset("chain_sum", seed=3, size=2 * BLOCK + 10)
    far = create_dataset("chain_sum", seed=3 + HELD_OUT_OFFSET, size=2 * BLOCK + 10)
    for index in (0, 1, BLOCK, 2 * BLOCK + 9):
        assert task.prompt(index).data["question"] == whole[index]["question"]
        assert held_out.prompt(index).data["question"] == far[index]["question"]


def test_size(tokenizer):
    task = reasoning_gym_task("chain_sum", tokenizer, seed=0, size=3)
    assert len(task) == 3
    assert task.prompt(4).token_ids == task.prompt(1).token_ids
    assert task.prompt(4).index == 4


def test_settings_reach_the_generator(tokenizer):
    task = reasoning_gym_task(
        "chain_sum", tokenizer, seed=0, config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    assert {task.prompt(i).data["metadata"]["num_terms"] for i in range(20)} == {2}


def test_a_scorer_that_fails_gives_zero(tokenizer):  # it reads the factors as integers
    task = reasoning_gym_task("prime_factorization", tokenizer, seed=0)
    with pytest.raises(ValueError):
        create_dataset("prime_factorization").score_answer("garbage", task.prompt(0).data)
    assert task.score(task.prompt(0), plain(tokenizer, "garbage")) == 0.0


def test_a_scorer_beyond_the_limit_gives_zero(tokenizer, monkeypatch):
    class Endless:
        def call(self, *arguments):
            raise TimeoutError

    monkeypatch.setattr(reasoning, "scoring_process", Endless)
    task = reasoning_gym_task("countdown", tokenizer, seed=0)
    assert task.score(task.prompt(0), plain(tokenizer, "9**9**9**9")) == 0.0


@pytest.mark.parametrize(
    "text, answer",
    [
        ("42", "42"),
        ("  42\n", "42"),
        ("", ""),
        ("The answer is 42.", "The answer is 42."),
        ("Answer: 42", "42"),
        ("answer: 1\nno, ANSWER:\n42\n43\n", "42\n43"),
        ("so \\boxed{42}.", "42"),
        ("\\boxed{1} \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{4", "\\boxed{4"),
        ("answer: 1 \\boxed{2}", "2"),
        ("<answer>1</answer> Answer: 2 \\boxed{3}", "1"),
        ("<answer>1</answer><answer>\n2\n</answer>", "2"),
        ("between <answer> and </answer>: <answer>5</answer>", "5"),
        ("<answer> <answer>5</answer>", "5"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer></answer>", ""),
        ("<answer>5", "<answer>5"),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("chain_sums", {}, "name must be a generator of reasoning-gym such as chain_sum.*, got 'chain_sums'"),
        ("", {}, "name must be a generator of reasoning-gym such as ab, .*, got ''"),
        (
            "chain_sum",
            {"config": {"terms": 2}},
            "config of chain_sum must have keys among allow_negation, max_digits, max_terms, min_digits, min_terms, "
            "got 'terms'",
        ),
        ("chain_sum", {"config": {"seed": 2}}, "config of chain_sum must have keys among .*, got 'seed'"),
        (
            "chain_sum",
            {"config": {"min_terms": 9}},
            r"config of chain_sum must be what the generator accepts \(max_terms must be >= min_terms\), "
            "got {'min_terms': 9}",
        ),
        (
            "chain_sum",
            {"config": {"min_terms": "two"}},
            "config of chain_sum must be what the generator accepts .*'two'",
        ),
        ("composite", {}, r"config of composite must be what the generator accepts \(Must specify at least"),
        ("chain_sum", {"seed": -1}, r"seed must be in \[0, 2\*\*30\], got -1"),
        ("chain_sum", {"seed": 2**30 + 1}, r"seed must be in \[0, 2\*\*30\], got 1073741825"),
        ("chain_sum", {"size": 0}, r"size must be 1 to 2\*\*30 or None, got 0"),
        ("chain_sum", {"size": "a"}, r"size must be 1 to 2\*\*30 or None, got 'a'"),
        ("chain_sum", {"split": "test"}, "split must be one of train, held_out, got 'test'"),
    ],
)
def test_errors_are_one_line(tokenizer, name, settings, message):
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        reasoning_gym_task(name, tokenizer, **{"seed": 0, **settings})
    assert "\n" not in str(caught.value)


def test_generators_that_differ_between_processes_are_refused(tokenizer, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0 be set before the start, got 'word_ladder'"):
        reasoning_gym_task("word_ladder", tokenizer, seed=0)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert reasoning_gym_task("ransom_note", tokenizer, seed=0).prompt(0)


def test_the_package_is_not_installed(tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        ImportError, match="reasoning_gym must be installed, got none: install rz with the extra `tasks`"
    ):
        reasoning_gym_task("chain_sum", tokenizer, seed=0)
