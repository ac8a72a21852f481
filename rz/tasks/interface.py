"""What the loop asks of a task. Arithmetic and TextTask implement it; any object with these members will do."""

from collections.abc import Sequence
from typing import Protocol

from rz.batch import Prompt


class Task(Protocol):
    """Questions in a fixed order, and a reward for each response.

    A task with a last question also has `__len__`: how many there are before they repeat. On one without a last
    question `len(task)` raises TypeError.
    """

    stop_ids: tuple[int, ...]  # a response ends with the first sampled token that is one of these

    def prompt(self, index: int) -> Prompt:
        """The prompt at any index >= 0, a function of index alone: not of earlier calls, nor of the process.
        Prompt.index is the index asked for, also where a finite task begins again. ValueError if index < 0."""

    def score(self, prompt: Prompt, response_ids: Sequence[int]) -> float:
        """The reward of one response to a prompt of this task, the sampled stop token included. The ids are those
        that were sampled; text is only ever made from them, never ids from text. Must give the same reward whenever
        it is called, from any thread. May be a coroutine function."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text for logs, special tokens shown. Never raises."""
