from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.tasks import verifiers
from rz.tasks.verifiers import VERIFIERS, exact, math_verify, number


@pytest.mark.parametrize(
    "answer, text, score",
    [
        ("12", "12", 1.0),
        (" 12\n", "\t12 ", 1.0),
        ("12", "12.", 0.0),
        ("Yes", "yes", 0.0),
        ("a b", "a  b", 0.0),
        ("12", "", 0.0),
    ],
)
def test_exact(answer, text, score):
    assert exact(answer, text) == score


@pytest.mark.parametrize(
    "answer, text, score",
    [
        ("42", "42", 1.0),
        ("42", "first 7, then 42", 1.0),
        ("42", "42, not 7", 0.0),  # the last number counts
        ("42", "The answer is 42.", 1.0),
        ("42", "**42**", 1.0),
        ("42", "42%", 1.0),
        ("42", "$42", 1.0),
        ("42", "x=42kg", 1.0),
        ("42", "+42", 1.0),
        ("42", "042", 1.0),
        ("42", "-42", 0.0),
        ("42", "4 2", 0.0),
        ("42", "none", 0.0),
        ("42", "", 0.0),
        ("-3", "it is -3", 1.0),
        ("-3", "x=-3.", 1.0),
        ("-3", "\u22123", 1.0),  # the minus of typography
        ("-3", "-$3", 1.0),
        ("-3", "$-3", 1.0),
        ("-3", "3", 0.0),
        ("3", "10-3", 1.0),  # ... no sign after a digit, a letter or a bracket
        ("3", "top-3", 1.0),
        ("3", "(x)-3", 1.0),
        ("3", "10 - 3", 1.0),
        ("-3", "10 -3", 1.0),
        ("1234", "1,234", 1.0),
        ("1,234", "1234", 1.0),
        ("1234567.5", "$1,234,567.50", 1.0),
        ("23", "1,23", 1.0),  # not thousands: a list of 1 and 23
        ("2345", "1,2345", 1.0),
        ("3", "1, 2, 3", 1.0),
        ("3.5", "3.50", 1.0),
        ("3.50", "3.5", 1.0),
        ("3", "3.", 1.0),
        ("3", "3.000", 1.0),
        (".5", "0.5", 1.0),
        ("0.5", ".5", 1.0),
        ("0.5", "1/2", 1.0),
        ("1/2", "0.5", 1.0),
        ("1/2", "2/4", 1.0),
        ("-1/2", "-0.5", 1.0),
        ("1/3", "0.3333333333333333", 0.0),  # no tolerance
        ("1/3", "1/3.", 1.0),
        ("0.1", "0.1000000000000000055511151231257827", 0.0),  # the same float, not the same number
        ("9007199254740993", "9007199254740992", 0.0),  # 2**53 + 1 is no float
        ("2", "10/5", 1.0),
        ("2", "10 / 2", 1.0),  # with spaces, two numbers
        ("5", "5/0", 0.0),
        ("0", "0", 1.0),
        ("0", "-0", 1.0),
        ("1000", "1e3", 1.0),
        ("0.0015", "1.5E-3", 1.0),
        ("50%", "50", 1.0),
        ("50", "0.5", 0.0),
        ("$5", "5", 1.0),
        ("5.", "5", 1.0),
        ("7", "1e99999999 7", 1.0),
        ("1", "9" * 6000, 0.0),  # longer than int() reads
        ("3", "\u0663", 0.0),  # digits of other scripts are not read
    ],
)
def test_number(answer, text, score):
    assert number(answer, text) == score


@given(st.integers(-(10**12), 10**12), st.integers(0, 4), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_number_finds_a_value_however_it_is_written(numerator, places, zeros):
    value = Decimal(numerator).scaleb(-places)
    answer = f"{value:f}"
    point = "" if places else "."
    written = [
        answer,
        f"{value:,f}",
        f"{numerator}/{10**places}",
        f"{answer}{point}{'0' * zeros}",
        f"{numerator}e-{places}",
    ]
    assert [number(answer, f"1 and then {text}.") for text in written] == [1.0] * 5
    assert number(answer, f"{Fraction(numerator + 1, 10**places)}") == 0.0


@given(st.text(max_size=40))
@settings(max_examples=50, deadline=None)
def test_number_reads_any_text(text):
    assert number("12", text) in (0.0, 1.0)
    assert number("12", f"{text} 12") == 1.0
    assert number("12", f"{text} 13") == 0.0


@pytest.mark.parametrize("answer", ["", "abc", "5 apples", "1 2", "1 1/2", "--3", "1e9999"])
def test_number_refuses_an_answer_that_is_none(answer):
    with pytest.raises(ValueError, match="answer must be a number, got "):
        number(answer, "12")


def test_number_refuses_a_denominator_of_zero():
    with pytest.raises(ValueError, match="answer must have a denominator other than 0, got '1/0'"):
        number("1/0", "1")


@pytest.mark.parametrize(
    "answer, text, score",
    [
        ("1/2", "The answer is $\\frac{1}{2}$.", 1.0),
        ("\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
        ("$\\frac{1}{2}$", "$\\frac{2}{4}$", 1.0),
        ("x+1", "$1 + x$", 1.0),
        ("x+1", "$x - 1$", 0.0),
        ("1,234", "\\boxed{1234}", 1.0),
        ("\\sqrt{8}", "$2\\sqrt{2}$", 1.0),
        ("5", "$4$", 0.0),
        ("5", "no idea", 0.0),
        ("5", " ", 0.0),
    ],
)
def test_math_verify(answer, text, score):
    assert math_verify(answer, text) == score


def test_math_verify_from_many_threads():
    with ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda i: math_verify(str(i), f"$\\frac{{{2 * (i // 2 * 2)}}}{{2}}$"), range(20)))
    assert scores == [1.0, 0.0] * 10  # even i are written as 2i/2, odd ones as 2(i-1)/2


def test_math_verify_counts_a_response_beyond_the_limit_as_wrong(monkeypatch):
    class Endless:
        def call(self, package, answer, text):
            raise TimeoutError

    monkeypatch.setattr(verifiers, "scoring_process", Endless)
    assert math_verify("5", "$9^{9^{9^9}}$") == 0.0


def test_math_verify_refuses_an_answer_that_it_cannot_read():
    with pytest.raises(ValueError, match="answer must be an expression that math-verify can read, got '[$]'"):
        math_verify("$", "5")


def test_names():
    assert VERIFIERS == {"exact": exact, "number": number, "math-verify": math_verify}


@settings(max_examples=20, deadline=None)
@given(st.integers(-(10**6), 10**6))
def test_math_verify_agrees_with_number_on_integers(value):
    for text in (str(value), str(value + 1)):
        assert math_verify(str(value), f"\\boxed{{{text}}}") == number(str(value), text)
