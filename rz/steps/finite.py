"""What to do about numbers that are not finite. Called on the host, outside torch.func: these read values.

A live token is at fault if p or q is NaN or infinite, or exp(p - q) overflows float32. Three choices, one function
each, all with the signature (logprobs, batch, *, first_row) -> (batch to train on, tokens at fault).
"""

import attrs
import torch
from torch import Tensor

from rz.batch import TrainBatch
from rz.steps.log_ratio import check_logprobs


def require_finite(logprobs: Tensor, batch: TrainBatch, *, first_row: int = 0) -> tuple[TrainBatch, int]:
    """Refuse a batch with a live token at fault.

    Shapes: B responses, T positions.
    Args:
        logprobs: [B, T] float32 or float64, nats: p.
        batch: its behaviour_logprobs are q.
        first_row: the number that row 0 has in the whole update; names the row in the error.
    Returns: (batch itself, 0).
    Gradient: none.
    Edge cases: nothing is read where mask is False. A ratio that underflows to 0 is finite.
    Raises: ValueError naming the value, the row, its group and the position of the first fault, in order of rows;
        TypeError or ValueError as check_logprobs.
    """
    at_fault = _at_fault(logprobs, batch)
    if at_fault.any():
        row, position = at_fault.nonzero()[0].tolist()
        p, q = float(logprobs[row, position].detach()), float(batch.behaviour_logprobs[row, position])
        where = f"in row {first_row + row} (group {int(batch.group_ids[row])}), position {position}"
        for name, value in (("logprobs", p), ("behaviour_logprobs", q)):
            if not torch.tensor(value).isfinite():
                raise ValueError(f"{name} must be finite where mask is True, got {value} {where}")
        raise ValueError(f"the ratio exp(p - q) must be finite in float32, got exp({p - q:.6g}) {where}")
    return batch, 0


def drop_nonfinite(logprobs: Tensor, batch: TrainBatch, *, first_row: int = 0) -> tuple[TrainBatch, int]:
    """Clear the mask of every response with a live token at fault, whole responses, not tokens.

    Such a response then is one without tokens: it contributes 0, the denominator and its group's mean reward still
    count it, and every other response contributes what it did, bit for bit. Dropping only the tokens would make the
    mean over the rest of the response a mean over something else. Either way what is dropped may differ from what is
    kept, which is a bias: the count says how much there is of it.

    Args, gradient, other errors: as require_finite.
    Returns: (batch with its mask cleared there, tokens at fault).
    """
    at_fault = _at_fault(logprobs, batch)
    return attrs.evolve(batch, mask=batch.mask & ~at_fault.any(1, keepdim=True)), int(at_fault.sum())


def count_nonfinite(logprobs: Tensor, batch: TrainBatch, *, first_row: int = 0) -> tuple[TrainBatch, int]:
    """Count the live tokens at fault and change nothing: for weights that bound the ratio themselves.

    Args, gradient, other errors: as require_finite.
    Returns: (batch itself, tokens at fault).
    """
    return batch, int(_at_fault(logprobs, batch).sum())


def _at_fault(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    check_logprobs(logprobs, batch)
    p, q = logprobs.detach(), batch.behaviour_logprobs
    ratio = (p - q).to(torch.float32).exp()
    return batch.mask & ~(p.isfinite() & q.isfinite() & ratio.isfinite())
