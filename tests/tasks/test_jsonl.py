import json
import os

import pytest
from test_text import byte_tokenizer, plain

from rz.tasks.jsonl import jsonl_task
from rz.tasks.verifiers import exact, math_verify, number

GOOD = b'{"prompt": "1+1=", "answer": "2"}'


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(content, **settings):
        path = tmp_path / "q.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else "\n".join(content).encode())
        return jsonl_task(path, tokenizer, **settings)

    return load


def questions(task, tokenizer):
    return [(tokenizer.decode(list(task.prompt(i).token_ids)), task.prompt(i).data) for i in range(len(task))]


def test_prompts_and_scores(load, tokenizer):
    task = load(GOOD + b'\n{"id": 7, "prompt": "5+7=", "answer": 12}\n')
    assert questions(task, tokenizer) == [("1+1=", "2"), ("5+7=", "12")]
    assert task.prompt(3).token_ids == plain(tokenizer, "5+7=")
    assert task.score(task.prompt(1), (*plain(tokenizer, "12"), 1)) == 1.0
    assert task.score(task.prompt(1), (*plain(tokenizer, "13"), 1)) == 0.0


def test_fields_and_verifier_are_arguments(load, tokenizer):
    task = load(
        [json.dumps({"question": "half?", "solution": "1/2"})],
        prompt_field="question",
        answer_field="solution",
        verifier=number,
    )
    assert task.score(task.prompt(0), plain(tokenizer, "it is 0.50.")) == 1.0


@pytest.mark.parametrize(
    "written, answer", [("3.50", "3.50"), ("-3", "-3"), ("12345678901234567890", None), ("0.1", None)]
)
def test_a_number_stands_for_its_text(load, written, answer):
    task = load(f'{{"prompt": "q", "answer": {written}}}'.encode(), verifier=number)
    assert task.prompt(0).data == (answer or written)


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        GOOD + b"\n",
        GOOD + b"\r\n",
        GOOD + b"\n\n \r\n\n",
        b"\xef\xbb\xbf" + GOOD,
        b"  " + GOOD,
    ],
)
def test_mark_line_ends_and_blank_lines_at_the_end(load, tokenizer, content):
    assert questions(load(content), tokenizer) == [("1+1=", "2")]
    two = content.rstrip() + (b"\r\n" if b"\r" in content else b"\n") + content.removeprefix(b"\xef\xbb\xbf")
    assert questions(load(two), tokenizer) == [("1+1=", "2")] * 2


def test_separators_of_unicode_do_not_end_a_line(load, tokenizer):
    task = load('{"prompt": "a\u2028b\u0085c", "answer": "é"}'.encode())
    assert questions(task, tokenizer) == [("a\u2028b\u0085c", "é")]


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", "line must be JSON, got '{'"),
        (b"{'prompt': 1}", "line must be JSON, got \"{'prompt': 1}\""),
        (b"x" * 100, "line must be JSON, got 'x{56}[.]{3}$"),
        (b"[" * 100_000, "line must be JSON, got '\\[{56}[.]{3}$"),
        (b"\xef\xbb\xbf" + GOOD, "line must be JSON, got "),
        (b"[1, 2]", "line must be a JSON object, got \\[1, 2\\]"),
        (b"null", "line must be a JSON object, got null"),
        (b'"a"', "line must be a JSON object, got 'a'"),
        (b"1.5", "line must be a JSON object, got 1.5"),
        (b'{"prompt": "\xff"}', "line must be UTF-8, got byte 0xff at 12"),
        (b"  ", "line must hold an object, got a blank line before the last object"),
        (b"{}", "prompt must be there, got fields ''"),
        (b'{"question": "a", "answer": "b"}', "prompt must be there, got fields 'question, answer'"),
        (b'{"prompt": "a"}', "answer must be there, got fields 'prompt'"),
        (b'{"prompt": 5, "answer": "b"}', "prompt must be a string, got 5"),
        (b'{"prompt": null, "answer": "b"}', "prompt must be a string, got null"),
        (b'{"prompt": ["a"], "answer": "b"}', 'prompt must be a string, got \\["a"\\]'),
        (b'{"prompt": "a", "answer": true}', "answer must be a string or a number, got true"),
        (b'{"prompt": "a", "answer": null}', "answer must be a string or a number, got null"),
        (b'{"prompt": "a", "answer": [1.5]}', "answer must be a string or a number, got \\[1.5\\]"),
        (b'{"prompt": "a", "answer": NaN}', "answer must be a string or a number, got NaN"),
        (b'{"prompt": "", "answer": "b"}', "prompt must not be blank, got ''"),
        (b'{"prompt": "\\n ", "answer": "b"}', r"prompt must not be blank, got '\\n '"),
        (b'{"prompt": "a", "answer": ""}', "answer must not be blank, got ''"),
        (b'{"prompt": "\\ud800", "answer": "b"}', "prompt must not hold half of a surrogate pair, got "),
    ],
)
def test_a_bad_line_is_named(load, tmp_path, line, message):
    with pytest.raises(ValueError, match=f"^{tmp_path}/q.jsonl:2: {message}") as caught:
        load(GOOD + b"\n" + line + b"\n" + GOOD)
    assert "\n" not in str(caught.value)


def test_other_bad_lines_are_counted(load):
    with pytest.raises(ValueError, match=r":2: line must be JSON, got '{' \(2 more bad lines, next 4\)$"):
        load(b"\n".join([GOOD, b"{", GOOD, b"[]", b"{}"]))


def test_an_answer_that_the_verifier_refuses_is_a_bad_line(load):
    lines = ['{"prompt": "a", "answer": "1"}', '{"prompt": "a", "answer": "one"}']
    with pytest.raises(ValueError, match=":2: answer must be a number, got 'one' in field answer$"):
        load(lines, verifier=number)
    assert len(load(lines, verifier=exact)) == len(load(lines, verifier=math_verify)) == 2


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b" \r\n"])
def test_an_empty_file(load, content):
    with pytest.raises(ValueError, match="q.jsonl must hold at least one line, got an empty file"):
        load(content)


def test_a_file_that_cannot_be_read(tmp_path, tokenizer):
    with pytest.raises(FileNotFoundError, match="none.jsonl"):
        jsonl_task(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(IsADirectoryError, match=os.fspath(tmp_path)):
        jsonl_task(tmp_path, tokenizer)


def test_held_out_questions_are_not_trained_on(load):
    lines = [json.dumps({"prompt": f"q{i % 150}", "answer": str(i % 150)}) for i in range(300)]
    sides = {
        split: [task.prompt(i).data for i in range(len(task))]
        for split in ("train", "held_out")
        if (task := load(lines, split=split, held_out=0.2))
    }
    assert not set(sides["train"]) & set(sides["held_out"])
    assert sorted(sides["train"] + sides["held_out"], key=int) == [str(i) for i in range(150) for _ in range(2)]
    assert 30 <= len(sides["held_out"]) <= 90  # 150 pairs of equal questions, 1/5 of them: 30 pairs, deviation 5
    assert [int(side) for side in sides["train"]] == sorted(set(map(int, sides["train"]))) * 2  # in the file's order


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"split": "held_out"}, "held_out must be > 0 for the split held_out of .*q.jsonl, got 0: 0.1 holds"),
        (
            {"split": "held_out", "held_out": 1e-9},
            "held_out must leave questions in the split held_out, got 1e-09 of 1 in ",
        ),
        ({"held_out": 1.0}, r"held_out must be in \[0, 1\), got 1.0"),
        ({"held_out": "x"}, r"held_out must be in \[0, 1\), got x"),
        ({"split": "test"}, "split must be one of train, held_out, got 'test'"),
    ],
)
def test_bad_split(load, settings, message):
    with pytest.raises(ValueError, match=message):
        load(GOOD, **settings)
