"""Which questions are held out from training."""

import hashlib

SPLITS = ("train", "held_out")


def is_held_out(question: str, *, share: float) -> bool:
    """Whether a question belongs to the held-out side: a function of its text and the share alone.

    So a question is never on both sides, whatever the seed, the order or the process.

    Args:
        question: any text that names the question.
        share: in [0, 1]. The part of all questions that is held out, on average. 0 holds out none, 1 all.
    """
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def check_split(split: str) -> None:
    """Raises: ValueError if split is not one of SPLITS."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
