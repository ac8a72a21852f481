"""The far end of rz.tasks.scoring: a script that scores responses, one at a time, until its input ends.

It imports nothing of rz, so that it starts fast and stays small. A request is a pickled (seconds, package, arguments);
the reply is a pickled (score, None) or (None, the exception).
"""

import importlib
import logging
import math
import os
import pickle
import resource
import sys
import time
from typing import Any


def math_verify(answer: str, text: str) -> float:
    from math_verify import parse, verify

    marked = "$" in answer or "\\boxed" in answer
    gold = parse(answer if marked else f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"answer must be an expression that math-verify can read, got {answer!r}")
    return float(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(name: str, config: dict[str, Any], answer: str, entry: dict[str, Any]) -> float:
    from reasoning_gym import create_dataset

    key = name, repr(sorted(config.items()))
    if key not in _datasets:
        _datasets[key] = create_dataset(name, **config)
    try:
        return float(_datasets[key].score_answer(answer, entry))
    except Exception:  # several scorers raise on an answer that is not of the form they expect
        return 0.0


_datasets: dict[tuple[str, str], Any] = {}
FUNCTIONS = {"math_verify": math_verify, "reasoning_gym": reasoning_gym}


def limited(seconds: int, package: str, arguments: tuple[Any, ...]) -> float:
    """The function named like its package; beyond `seconds` of processor time the kernel ends this process."""
    importlib.import_module(package)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + seconds, hard))
    try:
        return FUNCTIONS[package](*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def main() -> None:
    logging.disable()
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up among the replies
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = limited(*request), None
        except Exception as error:
            reply = None, error if isinstance(error, ValueError) else RuntimeError(repr(error))
        pickle.dump(reply, replies)
        replies.flush()


if __name__ == "__main__":
    main()
