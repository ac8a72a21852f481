"""Log-probabilities: language-model head, temperature, log-softmax and gather."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rz.ops import device
from rz.ops.chunks import row_chunks
from rz.ops.function import apply
from rz.ops.linear import linear

CHUNK_ELEMENTS = 1 << 24  # logits held at once: rows of a chunk times vocabulary


def tempered_logprobs(logits: Tensor, *, temperature: float | Tensor) -> Tensor:
    """log_softmax(logits / temperature) of every row, in float32.

    Args:
        logits: [N, V] float.
        temperature: > 0; a number, or [N] float32, one a row.
    Returns: [N, V] float32, nats. Row i depends on logits[i] and its temperature alone.
    Edge cases: N = 0 gives [0, V].
    """
    if device.has_kernels(logits):
        from rz.ops import triton_logprobs

        return triton_logprobs.tempered_logprobs(logits, temperature=temperature)
    return _log_softmax(_tempered(logits, temperature))


def _tempered(logits: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, float) and temperature == 1:  # x / 1 is x
        return logits.float()
    scale = torch.as_tensor(temperature, dtype=torch.float32, device=logits.device)
    return logits.float() / scale.expand(len(logits))[:, None]


def _log_softmax(x: Tensor, out: Tensor | None = None) -> Tensor:
    if len(x) == 1:  # a single long row is summed in another order than one among others
        row = torch.log_softmax(x.expand(2, -1), -1)[:1]
        return row if out is None else out.copy_(row)
    return torch.log_softmax(x, -1, out=out)


def row_logprobs(hidden: Tensor, head: Tensor, *, temperature: float | Tensor) -> Tensor:
    """The tempered log-probabilities of the whole vocabulary after each row.

    The product is rounded to the dtype of hidden (as `linear` does); everything after it is float32.

    Args:
        hidden: [N, E] float.  head: [V, E], see `linear` for dtypes.
        temperature: > 0; a number, or [N] float32, one a row.
    Returns: [N, V] float32, nats.
    Gradient: none is defined here; `token_logprobs` has one.
    Edge cases: N = 0 gives [0, V].
    """
    return tempered_logprobs(linear(hidden, head), temperature=temperature)


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(16, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        """The logprobs, and if all logits are held at once what the backward reads: in float32 the logprobs of the
        whole vocabulary, else the logits, which take half of their memory."""
        out, kept = hidden.new_empty(hidden.shape[0], dtype=torch.float32), None
        chunks = _chunks(hidden.shape[0], head.shape[0])
        for rows in chunks:
            logits, of_rows, wanted = linear(hidden[rows], head), out[rows], targets[rows, None]
            if len(chunks) == 1:
                kept = torch.empty_like(logits) if logits.dtype == torch.float32 else logits
            for part in row_chunks(len(logits), head.shape[0]):
                whole = None if kept is None or kept is logits else kept[part]
                logprobs = _log_softmax(_tempered(logits[part], temperature), whole)
                of_rows[part] = logprobs.gather(1, wanted[part])[:, 0]
        return out, kept

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        hidden, head, targets, ctx.temperature = inputs
        ctx.save_for_backward(hidden, head, targets, output[1])
        if output[1] is not None:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _):
        hidden, head, targets, kept = ctx.saved_tensors
        to_hidden, to_head = [torch.empty_like(hidden[:0])], None
        for rows in _chunks(hidden.shape[0], head.shape[0]):
            logits = linear(hidden[rows], head) if kept is None else kept
            to_logits = torch.empty_like(logits, dtype=head.dtype)
            gain, wanted = (grad[rows] / ctx.temperature)[:, None], targets[rows, None]
            for part in row_chunks(len(logits), head.shape[0]):
                slope, up = to_logits[part], gain[part]
                if kept is not None and kept.dtype == torch.float32:
                    torch.exp(kept[part], out=slope).mul_(-up).scatter_add_(1, wanted[part], up)
                else:
                    share = torch.softmax(logits[part].float() / ctx.temperature, -1)
                    slope.copy_(share.mul_(-up).scatter_add_(1, wanted[part], up))
            to_hidden.append((to_logits @ head).to(hidden.dtype))
            part = to_logits.t() @ hidden[rows].to(head.dtype)
            to_head = part if to_head is None else to_head.add_(part)
        whole = to_hidden[1] if len(to_hidden) == 2 else torch.cat(to_hidden)
        return whole, torch.zeros_like(head) if to_head is None else to_head, None, None


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
    """The log-probability of one target token a row: row_logprobs(...)[i, targets[i]], bit for bit.

    Memory: logits exist for about CHUNK_ELEMENTS / V rows at a time (16 at least), in the forward and the backward,
    which computes them again if there are more; nothing grows with N times V.

    Args:
        hidden: [N, E] float.  head: [V, E], see `linear`.  targets: [N] int64 in [0, V).
        temperature: > 0, of every row.
    Returns: [N] float32, nats.
    Gradient: to hidden and head; not differentiable again.
    Edge cases: N = 0 gives [0]. A token of probability 0 gives -inf; so does, where kernels run, one outside [0, V),
        which the CPU refuses.
    Raises: ValueError if targets is not [N] or temperature is not > 0.
    """
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [{hidden.shape[0]}], got {list(targets.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
    if device.has_kernels(hidden):
        from rz.ops import triton_logprobs

        return triton_logprobs.TokenLogprobs.apply(hidden, head, targets, float(temperature))
    return apply(_TokenLogprobs, hidden, head, targets, float(temperature))[0]
