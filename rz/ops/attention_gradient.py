"""The gradient of attention over packed sequences, by torch's fused kernel; only the forward must be aligned."""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from rz.ops.attention_kernel import KEY_QUANTUM, each_head, up

BATCH_TOKENS = 4096  # of padded sequences that are computed together


@attrs.frozen(kw_only=True, eq=False)
class Batch:
    """Whole sequences of similar length, padded to the longest: I sequences, L positions.

    tokens: [I, L] the row of each position's token; padding repeats a sequence's last.
    own: [I, L] bool, True = a token whose query this sequence answers; neither padding nor a prefix.
    live: [I, L] bool, False = padding.
    padded: [I, P] as tokens, where P is L padded to a multiple of KEY_QUANTUM.
    first: a multiple of KEY_QUANTUM; no token before this position is own.
    rows: the tokens, if all are own and follow one another, else None.
    """

    tokens: Tensor
    own: Tensor
    live: Tensor
    padded: Tensor
    first: int
    rows: slice | None

    def take(self, x: Tensor, *, padded: bool = False) -> Tensor:
        """x [N, ...] -> [I, L, ...], or [I, P, ...] with the padding."""
        tokens = self.padded if padded else self.tokens
        if self.rows is not None and tokens.shape == self.tokens.shape:
            return x[self.rows].unflatten(0, tokens.shape)
        return x.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)


def _grouped(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Sequences whose lengths are at most an eighth apart, in runs of about BATCH_TOKENS tokens."""
    groups: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        quantum = 1 << max(0, length.bit_length() - 4)
        groups.setdefault(-(-length // quantum) * quantum, []).append(sequence)
    for length, members in groups.items():
        size = max(1, BATCH_TOKENS // length)
        yield from (members[start : start + size] for start in range(0, len(members), size))


def gradient_batches(lengths: Sequence[int], prefixes: Sequence[int | None]) -> tuple[Batch, ...]:
    """Plan the gradient for sequences as WholeSequences takes them."""
    of_length, has_prefix = np.array(lengths), np.array([prefix is not None for prefix in prefixes])
    starts = np.cumsum(of_length) - of_length
    of_prefix = np.array([0 if prefix is None else prefix for prefix in prefixes])
    before, prefix_starts = np.where(has_prefix, of_length[of_prefix], 0), starts[of_prefix]
    batches = []
    for members in _grouped((before + of_length).tolist()):
        prefix, start, prefix_start = (x[members, None] for x in (before, starts, prefix_starts))
        end = prefix + of_length[members, None]
        longest = int(end.max())
        position = np.arange(up(longest, KEY_QUANTUM))
        place = np.minimum(position, end - 1)
        padded = place + np.where(place < prefix, prefix_start, start - prefix)
        tokens, position = padded[:, :longest], position[:longest]
        live = position < end
        own = live & (position >= prefix)
        begin = int(tokens[0, 0])
        consecutive = own.all() and np.array_equal(tokens.ravel(), np.arange(begin, begin + tokens.size))
        batches.append(
            Batch(
                tokens=torch.from_numpy(tokens),
                own=torch.from_numpy(own),
                live=torch.from_numpy(live),
                padded=torch.from_numpy(padded),
                first=int(prefix.min()) // KEY_QUANTUM * KEY_QUANTUM,
                rows=slice(begin, begin + tokens.size) if consecutive else None,
            )
        )
    return tuple(batches)


def _window_mask(length: int, window: int | None) -> Tensor | None:
    if window is None:
        return None
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return torch.zeros(length, length).masked_fill_((distance < 0) | (distance >= window), -torch.inf)


def _batch_gradient(
    batch: Batch, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """float32 gradients [I, L, H or Hk, D] of a batch's queries, keys and values."""
    group = q.shape[1] // k.shape[1]
    above, queries, outputs, logs = (batch.take(x).float() for x in (grad, q, out, lse))
    if batch.rows is None:
        above = above.masked_fill(~batch.own[..., None, None], 0)
    mask = _window_mask(batch.tokens.shape[1], window)
    of_q, of_k, of_v = (
        x.transpose(1, 2)
        for x in torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            above.transpose(1, 2),
            queries.transpose(1, 2),
            *(each_head(batch.take(x).float(), group).transpose(1, 2) for x in (k, v)),
            outputs.transpose(1, 2),
            logs.transpose(1, 2).contiguous(),
            0.0,
            mask is None,
            attn_mask=mask,
            scale=q.shape[-1] ** -0.5,
        )
    )
    if group > 1:
        of_k, of_v = (_sum_heads(x.unflatten(2, (-1, group))) for x in (of_k, of_v))
    return of_q, of_k, of_v


def _sum_heads(x: Tensor) -> Tensor:
    """x.sum(3), whose reduction of a short inner axis takes several times as long."""
    first, second, *others = x.unbind(3)
    total = first + second
    for other in others:
        total += other
    return total


def attention_gradient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    batches: Sequence[Batch],
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, taken in float32.

    Args:
        grad, q, out: [N, H, D].  k, v: [N, Hk, D].  lse: [N, H] float32, log-sum-exp of the scaled scores.
    Returns: tensors of the shapes and dtypes of q, k and v.
    """
    if len(batches) == 1 and batches[0].rows is not None:
        parts = _batch_gradient(batches[0], grad, q, k, v, out, lse, window)
        return tuple(part.reshape(x.shape).to(x.dtype) for x, part in zip((q, k, v), parts, strict=True))
    to_q = torch.empty(q.shape, dtype=torch.float32)
    to_k, to_v = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
    for batch in batches:
        of_q, of_k, of_v = _batch_gradient(batch, grad, q, k, v, out, lse, window)
        if batch.rows is not None:
            for x, part in ((to_q, of_q), (to_k, of_k), (to_v, of_v)):
                batch.take(x).copy_(part)
        else:
            to_q.index_copy_(0, batch.tokens[batch.own], of_q[batch.own])
            to_k.index_add_(0, batch.tokens[batch.live], of_k[batch.live])
            to_v.index_add_(0, batch.tokens[batch.live], of_v[batch.live])
    return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype)
