"""Questions and answers from a file with one JSON object a line."""

import json
import os
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from rz.tasks.split import check_split, is_held_out
from rz.tasks.text import TextTask
from rz.tasks.verifiers import exact


def _short(value: Any) -> str:
    shown = repr(value) if isinstance(value, str) else json.dumps(value, default=float)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _read(line: bytes, prompt_field: str, answer_field: str, verifier: Callable[[str, str], float]) -> tuple[str, str]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"line must be UTF-8, got byte 0x{line[error.start]:02x} at {error.start}") from error
    if not text.strip():
        raise ValueError("line must hold an object, got a blank line before the last object")
    try:
        row = json.loads(text, parse_float=Decimal)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line must be JSON, got {_short(text.rstrip())}") from error
    if not isinstance(row, dict):
        raise ValueError(f"line must be a JSON object, got {_short(row)}")
    for field in (prompt_field, answer_field):
        if field not in row:
            raise ValueError(f"{field} must be there, got fields {_short(', '.join(row))}")
    prompt, answer = row[prompt_field], row[answer_field]
    if not isinstance(prompt, str):
        raise ValueError(f"{prompt_field} must be a string, got {_short(prompt)}")
    if isinstance(answer, bool) or not isinstance(answer, str | int | Decimal):
        raise ValueError(f"{answer_field} must be a string or a number, got {_short(answer)}")
    for field, value in ((prompt_field, prompt), (answer_field, str(answer))):
        if not value.strip():
            raise ValueError(f"{field} must not be blank, got {_short(value)}")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError(f"{field} must not hold half of a surrogate pair, got {_short(value)}")
    try:
        verifier(str(answer), "")
    except ValueError as error:
        raise ValueError(f"{error} in field {answer_field}") from error
    return prompt, str(answer)


def _rows(lines: list[bytes], *read: Any) -> Iterator[tuple[str, str] | ValueError]:
    for line in lines:
        try:
            yield _read(line, *read)
        except ValueError as error:
            yield error


def jsonl_task(
    path: str | os.PathLike[str],
    tokenizer: Any,
    *,
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    verifier: Callable[[str, str], float] = exact,
    split: str = "train",
    held_out: float = 0.0,
    chat_template: bool | None = None,
    stop_ids: tuple[int, ...] | None = None,
) -> TextTask:
    """The questions of a JSONL file, in its order, and again from the start after the last.

    The file is UTF-8, one object a line; other fields are ignored. A byte order mark, CRLF line ends, and blank lines
    after the last object are allowed; blank lines elsewhere are not. An answer is a string or a number; a
    number stands for its decimal text, 3.50 for "3.50". The file is read once, and every line is checked then.

    Args:
        verifier: (answer, text) -> reward. Called once a line with an empty text at load time: a ValueError says that
            the answer can never be right.
        split, held_out: with held_out in (0, 1) about that part of the questions, by a hash of the prompt, is the
            split "held_out", and the rest is "train": equal prompts are on the same side. With 0 all are "train".
        tokenizer, chat_template, stop_ids: see TextTask.
    Raises: OSError if the file cannot be read. ValueError if it is empty, the split is, or lines are bad: one line of
        text with file, line number, field, rule and value of the first, and the number of the others.
    """
    check_split(split)
    if isinstance(held_out, str) or not 0 <= held_out < 1:
        raise ValueError(f"held_out must be in [0, 1), got {held_out}")
    if split == "held_out" and held_out == 0:
        raise ValueError(f"held_out must be > 0 for the split held_out of {path}, got 0: 0.1 holds out a tenth")
    lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip().split(b"\n")
    if lines == [b""]:
        raise ValueError(f"{path} must hold at least one line, got an empty file")
    rows = list(_rows(lines, prompt_field, answer_field, verifier))
    if bad := [(number, row) for number, row in enumerate(rows, start=1) if isinstance(row, ValueError)]:
        others = f" ({len(bad) - 1} more bad lines, next {bad[1][0]})" if len(bad) > 1 else ""
        raise ValueError(f"{path}:{bad[0][0]}: {bad[0][1]}{others}")
    chosen = [row for row in rows if is_held_out(row[0], share=held_out) == (split == "held_out")]
    if not chosen:
        raise ValueError(f"held_out must leave questions in the split {split}, got {held_out} of {len(rows)} in {path}")
    return TextTask(
        tokenizer=tokenizer,
        question=chosen.__getitem__,
        verifier=verifier,
        size=len(chosen),
        chat_template=chat_template,
        stop_ids=stop_ids,
    )
