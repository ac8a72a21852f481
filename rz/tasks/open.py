"""A task from one line of text, as given on the command line."""

import ast
from typing import Any
from urllib.parse import unquote

from rz.tasks.arithmetic import Arithmetic
from rz.tasks.interface import Task
from rz.tasks.jsonl import jsonl_task
from rz.tasks.reasoning import reasoning_gym_task
from rz.tasks.verifiers import VERIFIERS

FORMS = "arithmetic, reasoning-gym:NAME or jsonl:FILE, each with or without ?KEY=VALUE&KEY=VALUE"


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _options(query: str, spec: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&"):
        key, equals, value = part.partition("=")
        if not key or not equals or key in options:
            raise ValueError(f"options must be KEY=VALUE joined by &, each key once, got {part!r} in {spec!r}")
        options[key] = unquote(value)
    return options


def _check_keys(options: dict[str, Any], allowed: tuple[str, ...], kind: str) -> None:
    for key in options:
        if key not in allowed:
            raise ValueError(f"options of {kind} must be among {', '.join(allowed)}, got {key!r}")


def open_task(
    spec: str,
    tokenizer: Any = None,
    *,
    split: str = "train",
    seed: int = 0,
    chat_template: bool | None = None,
    stop_ids: tuple[int, ...] | None = None,
) -> Task:
    """The task that a line of text names.

        arithmetic                  options digits, held_out
        reasoning-gym:chain_sum     options size, and the generator's own: ?min_terms=2&max_terms=2
        jsonl:path/to/file.jsonl    options verifier (exact, number, math-verify), prompt and answer (the fields),
                                    held_out: ?verifier=number&prompt=question&answer=solution

    Options follow the first "?". A value is a Python literal, or else the text as it stands; %26 stands for an "&".

    Args:
        tokenizer, chat_template, stop_ids: see TextTask; arithmetic has its own and reads none of them.
        split: "train" or "held_out".
        seed: draws the questions, except those of a file.
    Raises: ValueError, TypeError, OSError or ImportError, one line: for a bad line of text, or from the task itself.
    """
    head, mark, query = spec.partition("?")
    kind, _, target = head.partition(":")
    options = _options(query, spec) if mark else {}
    if not (head == "arithmetic" or (kind in ("reasoning-gym", "jsonl") and target)):
        raise ValueError(f"task must be {FORMS}, got {spec!r}")
    if kind == "arithmetic":
        _check_keys(options, ("digits", "held_out"), kind)
        return Arithmetic(seed=seed, split=split, **{key: _literal(value) for key, value in options.items()})
    if tokenizer is None:
        raise ValueError(f"tokenizer must be given for {kind}, got None")
    common = {"split": split, "chat_template": chat_template, "stop_ids": stop_ids}
    if kind == "reasoning-gym":
        config = {key: _literal(value) for key, value in options.items()}
        return reasoning_gym_task(target, tokenizer, seed=seed, size=config.pop("size", None), config=config, **common)
    _check_keys(options, ("verifier", "prompt", "answer", "held_out"), kind)
    verifier = options.get("verifier", "exact")
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier must be one of {', '.join(VERIFIERS)}, got {verifier!r}")
    return jsonl_task(
        target,
        tokenizer,
        prompt_field=options.get("prompt", "prompt"),
        answer_field=options.get("answer", "answer"),
        verifier=VERIFIERS[verifier],
        held_out=_literal(options.get("held_out", "0")),
        **common,
    )
