import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.batch import Prompt
from rz.tasks.arithmetic import VOCABULARY, Arithmetic, CharTokenizer

EOS = 2
sums = st.text("0123456789+=", max_size=30)


def test_encode_by_hand():  # "0" is id 3, so 7 is 10, 4 is 7, 5 is 8; + and = are the last two of fifteen
    assert CharTokenizer().encode("7+45=") == (10, 13, 7, 8, 14)
    assert len(CharTokenizer()) == 15


@given(sums)
def test_decode_undoes_encode(text):
    assert CharTokenizer().decode(CharTokenizer().encode(text)) == text


def test_special_tokens_are_shown_or_left_out():
    ids = (1, 3, 2, 0)
    assert CharTokenizer().decode(ids) == "<bos>0<eos><pad>"
    assert CharTokenizer().decode(ids, skip_special_tokens=True) == "0"
    assert CharTokenizer().decode((15, -1)) == "<15><-1>"


@pytest.mark.parametrize("text, got", [("1-2", "'-' at 1 of '1-2'"), ("<eos>", "'<' at 0"), ("12é", "'é' at 2")])
def test_unknown_character_is_named(text, got):
    with pytest.raises(ValueError, match=rf"each character must be one of 0123456789\+=, got {got}"):
        CharTokenizer().encode(text)


def test_prompt_and_solution_are_plain_numbers():
    task = Arithmetic(digits=2, seed=3)
    for index in range(50):
        prompt, (a, b) = task.prompt(index), task.operands(index)
        assert prompt.index == index
        assert task.decode(prompt.token_ids) == f"<bos>{a}+{b}="
        assert task.decode(task.solution(index)) == f"{a + b}<eos>"
        assert len(task.solution(index)) <= 2 + 2
    assert {len(str(task.operands(index)[0])) for index in range(50)} == {1, 2}


@pytest.mark.parametrize("split", ["train", "held_out"])
@pytest.mark.parametrize("digits", [1, 2, 9])
@pytest.mark.parametrize("held_out", [0.05, 0.5])
def test_the_solution_and_only_the_solution_scores(split, digits, held_out):
    task = Arithmetic(digits=digits, split=split, held_out=held_out)
    prompt, right = task.prompt(11), task.solution(11)
    assert task.score(prompt, right) == 1.0
    wrong = [(), right[:-1], (*right, EOS), (3, *right), (0, *right), (*right[:-1], 0), (*right[:-1], 0, EOS), (EOS,)]
    assert [task.score(prompt, ids) for ids in wrong] == [0.0] * 8


def test_score_by_hand():  # 7+45 = 52: ids 8, 5
    prompt = Prompt(index=0, token_ids=(1, 10, 13, 7, 8, 14), data="52")
    assert Arithmetic().score(prompt, (8, 5, EOS)) == 1.0
    assert Arithmetic().score(prompt, [8, 5, EOS]) == 1.0
    assert Arithmetic().score(prompt, (5, 8, EOS)) == 0.0


@given(st.integers(0, 10**6), st.integers(0, 2**63))
@settings(max_examples=50, deadline=None)
def test_prompt_depends_on_seed_and_index_alone(index, seed):
    task = Arithmetic(seed=seed)
    first = task.prompt(index)
    task.prompt(index + 1)
    assert task.prompt(index) == first == Arithmetic(seed=seed).prompt(index)


def test_seeds_give_other_questions():
    questions = [tuple(Arithmetic(seed=seed).operands(i) for i in range(20)) for seed in range(5)]
    assert len(set(questions)) == 5


def test_splits_share_no_pair_in_either_order():
    pairs = {
        (split, seed): {tuple(sorted(Arithmetic(seed=seed, split=split).operands(i))) for i in range(2000)}
        for split in ("train", "held_out")
        for seed in (0, 1)
    }
    train, held_out = (pairs[split, 0] | pairs[split, 1] for split in ("train", "held_out"))
    assert not train & held_out
    # 5,050 unordered pairs, 1/8 of them held out: 631 on average, standard deviation sqrt(5050 / 8 * 7 / 8) = 24
    assert 500 < len(held_out) < 760
    both_orders = {Arithmetic(split="held_out").operands(i) for i in range(2000)}
    assert any((b, a) in both_orders for a, b in both_orders if a != b)


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"digits": 0}, ValueError, "digits must be 1 to 9, got 0"),
        ({"digits": 10}, ValueError, "digits must be 1 to 9, got 10"),
        ({"digits": "two"}, TypeError, "digits must be of type int, got 'two'"),
        ({"seed": 1.5}, TypeError, "seed must be of type int, got 1.5"),
        ({"held_out": 0.0}, ValueError, r"held_out must be in \[0.05, 0.5\], got 0.0"),
        ({"held_out": 0.9}, ValueError, r"held_out must be in \[0.05, 0.5\], got 0.9"),
        ({"held_out": float("nan")}, ValueError, r"held_out must be in \[0.05, 0.5\], got nan"),
        ({"split": "test"}, ValueError, "split must be one of train, held_out, got 'test'"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        Arithmetic(**settings)


def test_negative_index():
    with pytest.raises(ValueError, match="index must be >= 0, got -1"):
        Arithmetic().prompt(-1)


def test_every_vocabulary_entry_is_there_once():
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert [VOCABULARY[i] for i in Arithmetic.stop_ids] == ["<eos>"]
