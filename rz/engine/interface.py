"""What the loop asks of a rollout engine. rz.engine.vllm and rz.engine.plain implement it."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from rz.batch import Request, Rollout


class Engine(Protocol):
    """Samples responses under weights that may change between two steps.

    Every token carries the logprob of the distribution it was drawn from and the version of the forward pass that drew
    it. After `publish` no token is conditioned on keys or values of older weights: running responses keep their tokens,
    and their prefixes are computed anew.
    """

    version: int

    def submit(self, request: Request, sampled: Rollout | None = None) -> None:
        """Queue one response, or with `sampled` (running, of this request) the rest of one that another engine began.

        The continuation has the tokens that the other engine would have sampled under the same weights.
        Raises: ValueError, and queues nothing, if it could never run (an id in use, a prompt that with max_tokens
            exceeds the longest sequence, a setting that the learner cannot reproduce, nothing left to sample)."""

    def step(self) -> list[Rollout]:
        """One forward pass over what is scheduled; the responses that it finished, in order of request id."""

    def running(self) -> list[Rollout]:
        """The responses submitted and not finished, in order of request id, with the tokens they have so far."""

    def publish(self, params: Mapping[str, Tensor], version: int) -> None:
        """Copy float32 master parameters in, cast as the learner casts them. Raises ValueError, and changes nothing,
        if a tensor is missing, unknown or of a wrong shape, or version does not rise."""

    def abort(self, ids: Iterable[tuple[int, int]]) -> None:
        """Forget these requests; ids that are not running are ignored."""

    def close(self) -> None:
        """Free what is held. A second call does nothing; anything else after it raises RuntimeError."""
