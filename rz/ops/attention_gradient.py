"""The gradient of attention over packed sequences, in float32: of short ones by torch's kernel, of long ones by batched
products. Only the forward must be aligned; here, the bits must not change from run to run or with the threads."""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from rz.ops.attention_kernel import KEY_QUANTUM, additive, masked_keys, up

BATCH_TOKENS = 4096  # of padded sequences that are computed together
SHORT = 128  # the longest sequences that torch's kernel takes, whose scores then stay in a core's own cache
QUERY_BLOCK = 64  # queries of longer ones whose scores are held at once


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


def _short(
    above: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [I, L, H or Hk, D] float32 by torch's kernel; above is the gradient of out."""
    mask = None
    if window is not None:
        places = torch.arange(q.shape[1])
        mask = additive(masked_keys(places[:, None], places, window), torch.float32)
    above, q, k, v, out = (x.float().transpose(1, 2) for x in (above, q, k, v, out))
    parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        above,
        q,
        k,
        v,
        out,
        lse.transpose(1, 2).contiguous(),
        0.0,
        window is None,
        attn_mask=mask,
        scale=q.shape[-1] ** -0.5,
    )
    return tuple(x.transpose(1, 2) for x in parts)


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """[I, L, H, C] -> [I * Hk, L * G, C] float32: the rows of the G heads that share keys, position before head."""
    x = x.unflatten(2, (kv_heads, -1)).transpose(1, 2)
    x = x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()  # the format counts for a cast only
    return x.flatten(2, 3).flatten(0, 1)


def _block_mask(window: int | None) -> tuple[Tensor, int]:
    """[QUERY_BLOCK, B + QUERY_BLOCK], 1 where a query of a block sees a key and 0 elsewhere, of the keys that some of
    the block's queries may not see: the B before the block and its own. And B."""
    before = 0 if window is None else window - 1
    seen = torch.ones(QUERY_BLOCK, before + QUERY_BLOCK).tril_(before)
    return seen if window is None else seen.triu_(), before


def _long(
    above: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int | None, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [I, L, H, D] in their dtype, and of keys and values [I, L, Hk, D] in float32; above is the
    gradient of out. Those of queries before `first`, where above is 0, are not written.

    QUERY_BLOCK queries at a time, with the weights P = exp(S - lse) of all keys that they see, and the gradient of
    their scores, dS = P * (dP - sum of above * out). Queries of heads that share keys are rows of one product.
    """
    (items, length, _, width), kv_heads, group = q.shape, k.shape[2], q.shape[2] // k.shape[2]
    slope = (above.float() * out.float()).contiguous().sum(-1, keepdim=True)  # strided, in another order
    queries, keys, values, above, logs, slope = (
        _by_kv_head(x, kv_heads) for x in (q, k, v, above, lse[..., None], slope)
    )
    keys = keys * width**-0.5  # for the scores and for the gradient of the queries; that of the keys is scaled last
    of_q, of_k, of_v = torch.empty(q.shape, dtype=q.dtype), torch.zeros_like(keys), torch.zeros_like(values)
    window = None if window is None or window >= length else window
    mask, before = _block_mask(window)
    mask = mask.repeat_interleave(group, 0)  # rows are in order of position, then head
    for start in range(first, length, QUERY_BLOCK):
        end, low = min(start + QUERY_BLOCK, length), max(0, start - before)  # from low on, keys are masked
        rows, seen = slice(start * group, end * group), slice(0 if window is None else low, end)
        part = mask[: (end - start) * group, low - start + before : end - start + before]
        weights = torch.bmm(queries[:, rows], keys[:, seen].transpose(1, 2)).sub_(logs[:, rows])
        # Not -inf: MKL's exp takes several times as long where its result is 0.
        masked = weights[..., low - end :].mul_(part)
        weights.exp_()
        masked.mul_(part)
        of_v[:, seen] += torch.bmm(weights.transpose(1, 2), above[:, rows])
        of_scores = torch.bmm(above[:, rows], values[:, seen].transpose(1, 2)).sub_(slope[:, rows]).mul_(weights)
        of_k[:, seen] += torch.bmm(of_scores.transpose(1, 2), queries[:, rows])
        of_rows = torch.bmm(of_scores, keys[:, seen]).view(items, kv_heads, end - start, group, width)
        of_q[:, start:end] = of_rows.transpose(1, 2).flatten(2, 3)
    of_k.mul_(width**-0.5)
    return of_q, *(x.unflatten(0, (items, kv_heads)).transpose(1, 2) for x in (of_k, of_v))


def _batch_gradient(
    batch: Batch, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients [I, L, H or Hk, D] of a batch's queries, in their dtype or float32 and only where batch.own, and of its
    keys and values in float32."""
    above, *others = (batch.take(x) for x in (grad, q, k, v, out, lse))
    if batch.rows is None:
        above = above.masked_fill(~batch.own[..., None, None], 0)
    items, length = batch.tokens.shape
    if alone := items * k.shape[1] == 1:  # the threads would share one product, whose sums then depend on their number
        above, *others = (torch.cat((x, x)) for x in (above, *others))
    parts = _short(above, *others, window) if length <= SHORT else _long(above, *others, window, batch.first)
    return tuple(x[:1] for x in parts) if alone else parts


def _packed(part: Tensor, like: Tensor) -> Tensor:
    """[I, L, ...] -> [N, ...] in the dtype of like, copied once at most."""
    return part.to(like.dtype, memory_format=torch.contiguous_format).flatten(0, 1)


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
    """Gradients of q, k and v, taken in float32, each rounded once.

    Args:
        grad, q, out: [N, H, D].  k, v: [N, Hk, D].  lse: [N, H] float32, log-sum-exp of the scaled scores.
    Returns: tensors of the shapes and dtypes of q, k and v.
    """
    if len(batches) == 1 and batches[0].rows is not None:
        parts = _batch_gradient(batches[0], grad, q, k, v, out, lse, window)
        return tuple(_packed(part, x) for x, part in zip((q, k, v), parts, strict=True))
    to_q = torch.empty(q.shape, dtype=q.dtype)
    to_k, to_v = (torch.zeros(x.shape, dtype=torch.float32) for x in (k, v))
    for batch in batches:
        of_q, of_k, of_v = _batch_gradient(batch, grad, q, k, v, out, lse, window)
        if batch.rows is not None:
            batch.take(to_q).copy_(of_q)
            batch.take(to_k).add_(of_k)  # to what sequences that share these tokens may have added
            batch.take(to_v).add_(of_v)
        else:
            to_q.index_copy_(0, batch.tokens[batch.own], of_q[batch.own].to(q.dtype))
            to_k.index_add_(0, batch.tokens[batch.live], of_k[batch.live])
            to_v.index_add_(0, batch.tokens[batch.live], of_v[batch.live])
    return to_q, to_k.to(k.dtype), to_v.to(v.dtype)
