"""Questions and answers in words, for a model with a Hugging Face tokenizer."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from rz.batch import Prompt


def prompt_ids(tokenizer: Any, question: str, *, chat_template: bool) -> tuple[int, ...]:
    """A question as the model reads it.

    With chat_template: one user turn and the opening of the assistant's, rendered by the tokenizer's template, which
    alone decides on BOS. Without: the question, after BOS if the tokenizer puts one before a text of its own accord.
    Either way there is never a second BOS, nor an EOS that the tokenizer would add at the end. A special token that is
    spelled out in the question is read as that token, as the tokenizer has it.
    """
    if chat_template:
        turns = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    ids = tuple(tokenizer.encode(question, add_special_tokens=False))
    bos = getattr(tokenizer, "bos_token_id", None)
    adds_bos = bos is not None and tokenizer.encode(question, add_special_tokens=True)[:1] == [bos]
    return (bos, *ids) if adds_bos and ids[:1] != (bos,) else ids


def _has_template(value: bool | None, task: "TextTask") -> bool:
    has_one = getattr(task.tokenizer, "chat_template", None) is not None
    if value and not has_one:
        raise ValueError(f"chat_template must be False for a tokenizer without a chat template, got {value}")
    return has_one if value is None else value


def _stop_ids(value: Sequence[int] | None, task: "TextTask") -> tuple[int, ...]:
    eos = getattr(task.tokenizer, "eos_token_id", None)
    if value is None and eos is None:
        raise ValueError("stop_ids must be given for a tokenizer without an eos_token_id, got None")
    return (eos,) if value is None else tuple(value)


@attrs.frozen(kw_only=True, eq=False)
class TextTask:
    """Questions rendered as prompts; responses decoded once and judged as text.

    Args:
        tokenizer: an object with encode, decode, eos_token_id and, for chat_template, apply_chat_template.
        question: place -> (question, answer), a pure function. With a size, places are 0 to size - 1, and a prompt at
            a later index begins again; without, any place >= 0.
        verifier: (answer, text of the response) -> reward. The text has no special tokens. A response that was cut off
            at its length limit is judged like any other.
        size: questions before they repeat, >= 1; None if they never end.
        chat_template: whether to render prompts with the tokenizer's chat template; None: if it has one.
        stop_ids: ids that end a response; None: the tokenizer's eos_token_id. Give the checkpoint's own list where it
            ends turns with another token.
    Raises: ValueError naming the field, the rule and the value.
    """

    tokenizer: Any
    question: Callable[[int], tuple[str, Any]]
    verifier: Callable[[Any, str], float]
    size: int | None
    chat_template: bool = attrs.field(default=None, converter=attrs.Converter(_has_template, takes_self=True))
    stop_ids: tuple[int, ...] = attrs.field(default=None, converter=attrs.Converter(_stop_ids, takes_self=True))

    def __attrs_post_init__(self) -> None:
        if self.size is not None and self.size < 1:
            raise ValueError(f"size must be >= 1 or None, got {self.size}")

    def __len__(self) -> int:
        if self.size is None:
            raise TypeError("len() must not be asked of a task without an end, got size None")
        return self.size

    def prompt(self, index: int) -> Prompt:
        """The question at index; its data is the answer, for the verifier."""
        question, answer = self.question(index if self.size is None else index % self.size)
        ids = prompt_ids(self.tokenizer, question, chat_template=self.chat_template)
        return Prompt(index=index, token_ids=ids, data=answer)

    def score(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """What the verifier says of the response's text."""
        text = self.tokenizer.decode(list(response_ids), skip_special_tokens=True)
        return float(self.verifier(prompt.data, text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text for logs, special tokens shown."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)
