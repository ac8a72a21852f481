"""Addition with a tokenizer of one character a token: small enough to learn in minutes."""

import random
from collections.abc import Sequence
from typing import ClassVar

import attrs

from rz.batch import Prompt
from rz.tasks.split import check_split, is_held_out

VOCABULARY = ("<pad>", "<bos>", "<eos>", "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "+", "=")
SPECIAL = VOCABULARY[:3]


class CharTokenizer:
    """The digits, "+" and "=", one token each; a token's id is its place in VOCABULARY."""

    pad_token_id: ClassVar[int] = VOCABULARY.index("<pad>")
    bos_token_id: ClassVar[int] = VOCABULARY.index("<bos>")
    eos_token_id: ClassVar[int] = VOCABULARY.index("<eos>")

    def __len__(self) -> int:
        return len(VOCABULARY)

    def encode(self, text: str) -> tuple[int, ...]:
        """One id a character; no special token is added or read.

        Raises: ValueError naming the first character that is not in the vocabulary, and its place.
        """
        for place, character in enumerate(text):
            if character not in VOCABULARY:
                rule = f"one of {''.join(VOCABULARY[len(SPECIAL) :])}"
                raise ValueError(f"each character must be {rule}, got {character!r} at {place} of {text!r}")
        return tuple(VOCABULARY.index(character) for character in text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids; an id beyond the vocabulary, which a model with a wider head can sample, reads as "<id>"."""
        shown = (VOCABULARY[token] if 0 <= token < len(VOCABULARY) else f"<{token}>" for token in ids)
        return "".join(token for token in shown if not (skip_special_tokens and token in SPECIAL))


@attrs.frozen(kw_only=True)
class Arithmetic:
    """Sums of two numbers: the prompt is BOS and "37+45=", the right response "82" and EOS.

    Numbers are plain, without leading zeros: "7+45=", not "07+45=". Each operand is uniform in [0, 10**digits), drawn
    again until the pair is of the split. Questions never end (there is no len) and may repeat.

    The two splits share no question: a pair of operands is held out or not by a hash of the pair, and of nothing else,
    so that runs with other seeds or digits agree on it. 37+45 and 45+37 are the same pair.

    Args:
        digits: 1 to 9. The longest operand. A response needs at most digits + 2 tokens.
        seed: draws the order of the questions.
        held_out: in [0.05, 0.5]. The part of all pairs that is held out.
        split: "train" or "held_out".
    Raises: ValueError naming the field, the rule and the value.
    """

    digits: int = 2
    seed: int = 0
    held_out: float = 0.125
    split: str = "train"
    tokenizer: ClassVar[CharTokenizer] = CharTokenizer()
    stop_ids: ClassVar[tuple[int, ...]] = (CharTokenizer.eos_token_id,)

    def __attrs_post_init__(self) -> None:
        for name, kind in (("digits", int), ("seed", int), ("held_out", float)):
            if type(value := getattr(self, name)) is not kind:
                raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r}")
        if not 1 <= self.digits <= 9:
            raise ValueError(f"digits must be 1 to 9, got {self.digits}")
        if not 0.05 <= self.held_out <= 0.5:
            raise ValueError(f"held_out must be in [0.05, 0.5], got {self.held_out}")
        check_split(self.split)

    def operands(self, index: int) -> tuple[int, int]:
        """The pair at index: a function of (digits, seed, held_out, split, index)."""
        rng = random.Random(f"{self.seed}/{index}")
        while True:
            a, b = rng.randrange(10**self.digits), rng.randrange(10**self.digits)
            if is_held_out(f"{min(a, b)}+{max(a, b)}", share=self.held_out) == (self.split == "held_out"):
                return a, b

    def prompt(self, index: int) -> Prompt:
        """The question at index; its data is the right answer as text."""
        a, b = self.operands(index)
        ids = (self.tokenizer.bos_token_id, *self.tokenizer.encode(f"{a}+{b}="))
        return Prompt(index=index, token_ids=ids, data=str(a + b))

    def solution(self, index: int) -> tuple[int, ...]:
        """The right response to the question at index: the digits of the sum, then EOS."""
        return (*self.tokenizer.encode(str(sum(self.operands(index)))), self.tokenizer.eos_token_id)

    def score(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """1.0 if the response is the digits of the sum and EOS, and nothing else; otherwise 0.0."""
        return float(tuple(response_ids) == (*self.tokenizer.encode(prompt.data), self.tokenizer.eos_token_id))

    def decode(self, ids: Sequence[int]) -> str:
        """Text for logs, special tokens shown."""
        return self.tokenizer.decode(ids)
