"""Questions of the package reasoning-gym, from any of its generators."""

import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Mapping
from typing import Any

from rz.tasks.scoring import scoring_process
from rz.tasks.split import check_split
from rz.tasks.text import TextTask

INSTRUCTION = "\nGive the final answer, and nothing else, between <answer> and </answer>."
BLOCK = 500
HELD_OUT_OFFSET = 2**30
# Their questions follow the order of a Python set, which differs between processes unless PYTHONHASHSEED is fixed.
HASH_ORDERED = ("isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder")


def final_answer(text: str) -> str:
    """The answer that a response settles on, stripped.

    The first of these that is there: the inside of the last <answer> ... </answer>; the inside of the last \\boxed{...}
    with balanced braces; all that follows the last "answer:", in any case; the whole text.
    """
    if tagged := re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, flags=re.DOTALL):
        return tagged[-1].strip()
    if (start := text.rfind("\\boxed{")) >= 0:
        inside, depth = text[start + len("\\boxed{") :], 1
        for place, character in enumerate(inside):
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                return inside[:place].strip()
    return re.split(r"answer:", text, flags=re.IGNORECASE)[-1].strip()


def _check_config(name: str, config: Mapping[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5) or sorted(DATASETS)
        raise ValueError(f"name must be a generator of reasoning-gym such as {', '.join(close[:5])}, got {name!r}")
    if name in HASH_ORDERED and not os.environ.get("PYTHONHASHSEED", "").isdigit():
        rule = "a generator that gives the same questions in every process, or PYTHONHASHSEED=0 be set before the start"
        raise ValueError(f"name must be {rule}, got {name!r}")
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in config:
        if key not in known:
            raise ValueError(f"config of {name} must have keys among {', '.join(sorted(known))}, got {key!r}")


def reasoning_gym_task(
    name: str,
    tokenizer: Any,
    *,
    seed: int,
    size: int | None = None,
    config: Mapping[str, Any] | None = None,
    split: str = "train",
    chat_template: bool | None = None,
    stop_ids: tuple[int, ...] | None = None,
) -> TextTask:
    """Questions of one generator, INSTRUCTION after each, scored by the generator on `final_answer` of the response.

    A generator draws question i from the random state seed + i. Train questions use the states seed, seed + 1, ...;
    held-out ones those from seed + 2**30 on, so that the two never share a state. Where a generator has few
    different questions, the same one can still come up on both sides: make it harder until that is rare.
    Generators that lay out a table for all their questions get a new table every 500.

    Rewards are the generator's own: mostly 0 or 1, with some a part for a near miss or for an answer with other words
    around it. An answer on which its scorer fails, or computes for more than 5 s of processor time, counts 0.0.

    Args:
        name: a generator such as "chain_sum". size: questions before they repeat, 1 to 2**30, or None for no end.
        seed: in [0, 2**30].
        config: settings of the generator by name, without seed and size.
        split: "train" or "held_out".
        tokenizer, chat_template, stop_ids: see TextTask.
    Raises: ImportError if reasoning-gym is not installed. ValueError, one line: an unknown name (with close ones), a
        setting that is unknown or that the generator refuses, a generator whose questions change from process to
        process (unless PYTHONHASHSEED is fixed), a seed or size out of range.
    """
    try:
        from reasoning_gym import create_dataset
    except ImportError as error:
        raise ImportError("reasoning_gym must be installed, got none: install rz with the extra `tasks`") from error
    check_split(split)
    if not 0 <= seed <= HELD_OUT_OFFSET:
        raise ValueError(f"seed must be in [0, 2**30], got {seed}")
    if size is not None and not (isinstance(size, int) and 1 <= size <= HELD_OUT_OFFSET):
        raise ValueError(f"size must be 1 to 2**30 or None, got {size!r}")
    config = dict(config or {})
    _check_config(name, config)
    first = seed + (HELD_OUT_OFFSET if split == "held_out" else 0)

    @functools.lru_cache(maxsize=8)
    def block(number: int) -> Any:
        return create_dataset(name, **config, seed=first + number * BLOCK, size=BLOCK)

    def question(place: int) -> tuple[str, dict[str, Any]]:
        entry = block(place // BLOCK)[place % BLOCK]
        return entry["question"] + INSTRUCTION, entry

    def verifier(entry: dict[str, Any], text: str) -> float:
        settings = {**config, "seed": first, "size": BLOCK}
        try:
            return scoring_process().call("reasoning_gym", name, settings, final_answer(text), entry)
        except TimeoutError:
            return 0.0

    try:
        question(0)
    except Exception as error:  # a generator checks its settings by assert, or fails on them at the first question
        raise ValueError(f"config of {name} must be what the generator accepts ({error}), got {config}") from error
    return TextTask(
        tokenizer=tokenizer,
        question=question,
        verifier=verifier,
        size=size,
        chat_template=chat_template,
        stop_ids=stop_ids,
    )
