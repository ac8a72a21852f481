"""Whether a response's text gives the right answer: functions (answer, text) -> 1.0 or 0.0.

A verifier raises ValueError for an answer that it could never find right; jsonl_task asks for that at load time.
"""

import re
from decimal import Decimal
from fractions import Fraction

from rz.tasks.scoring import scoring_process

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# A minus belongs to the number unless something stands right before it, as in 10-3 or top-5.
_SIGN = r"(?:(?<![\w)\].])[-+\u2212])?"
_NUMBER = re.compile(rf"({_SIGN})\$?({_DIGITS})(?:[eE]([-+]?[0-9]{{1,3}})(?![0-9]))?(?:/({_DIGITS}))?")


def exact(answer: str, text: str) -> float:
    """1.0 if the text equals the answer, white space around either left out."""
    return float(text.strip() == answer.strip())


def _value(match: re.Match[str]) -> Fraction | None:
    sign, digits, exponent, denominator = match.groups()
    value = Fraction(Decimal(digits.replace(",", ""))) * Fraction(10) ** int(exponent or 0)
    if denominator is not None:
        if not (divisor := Fraction(Decimal(denominator.replace(",", "")))):
            return None
        value /= divisor
    return -value if sign in ("-", "\u2212") else value


def number(answer: str, text: str) -> float:
    """1.0 if the last number in the text has the value of the answer, compared exactly.

    A number is digits with or without a sign, a "$", commas between thousands, decimals, an exponent of up to three
    digits, or a denominator after "/" without spaces: 1,234 · -3 · $3.50 · 1/2 · 6.02e23. A full stop, a "%" or a unit
    after it is not read. A minus right after a letter, digit or closing bracket is no sign: 10-3 ends in 3.
    Mixed numbers (1 1/2) and LaTeX fractions are not read as one number; math_verify reads those.
    Edge cases: no number in the text, or a denominator of 0, gives 0.0.
    Raises: ValueError if the answer is not one number, alone or with a "%" or full stop after it.
    """
    if (wanted := _NUMBER.match(answer.strip())) is None or answer.strip()[wanted.end() :] not in ("", "%", "."):
        raise ValueError(f"answer must be a number, got {answer!r}")
    if (value := _value(wanted)) is None:
        raise ValueError(f"answer must have a denominator other than 0, got {answer!r}")
    found = list(_NUMBER.finditer(text))
    return float(bool(found) and _value(found[-1]) == value)


def math_verify(answer: str, text: str) -> float:
    """1.0 if the package math-verify finds the text equal to the answer as mathematics.

    The answer is LaTeX or plain; without "$" or "\\boxed" it is taken as the inside of a box. The package's own time
    limits need the main thread and cannot stop a computation within C code, so the work is done in a process of
    its own, from any thread, and a response that takes more than 5 s of processor time counts 0.0.
    Edge cases: a blank text gives 0.0, and nothing is started.
    Raises: ValueError if a text is to be judged and the package finds no expression in the answer; ImportError if the
        package is not installed.
    """
    if not text.strip():
        return 0.0
    try:
        return scoring_process().call("math_verify", answer, text)
    except TimeoutError:
        return 0.0


VERIFIERS = {"exact": exact, "number": number, "math-verify": math_verify}
