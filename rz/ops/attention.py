"""Causal attention with grouped key-value heads, over a paged cache and over whole sequences, in one arithmetic.

Keys are visited in tiles of 128 from absolute position 0. A tile gives a partial (max, sum, output) in float32, and
partials are combined in ascending order; a tile that is masked for a row adds exactly nothing to it. Both callers run
`_attend`, so a token's output has the same bits by prefill, chunked prefill, decode, recomputation and the learner.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rz.ops import device
from rz.ops.attention_gradient import Batch, attention_gradient, gradient_batches
from rz.ops.attention_plan import QUANTUM, Block, Plan, Tile, make_plan
from rz.ops.function import apply

LOWEST = -3.0e38  # stands for the maximum of no scores


def _scores(queries: Tensor, keys: Tensor, tile: Tile, window: int | None) -> Tensor:
    """[items, kv_heads, rows, keys] float32, masked with -inf."""
    items, kv_heads, rows, width = queries.shape
    scores = torch.bmm(queries.reshape(-1, rows, width), keys.transpose(1, 2)).view(items, kv_heads, rows, tile.keys)
    mask = tile.masked[window]
    return scores if mask is None else scores.masked_fill_(mask, -torch.inf)


def _partial(queries: Tensor, keys: Tensor, values: Tensor, tile: Tile, window: int | None) -> list[Tensor]:
    scores = _scores(queries, keys, tile, window)
    top = scores.amax(-1, keepdim=True).clamp_(min=LOWEST)
    weights = scores.sub_(top).exp_().flatten(0, 1)
    # A product with ones, not a sum over the last axis: the sum's order depends on how many keys are padded.
    total = torch.mm(weights.flatten(0, 1), weights.new_ones(tile.keys, QUANTUM))[:, :1]
    out = torch.bmm(weights, values)
    return [top, total.view_as(top), out.view(*top.shape[:-1], -1)]


def _combine(old: Sequence[Tensor], new: Sequence[Tensor]) -> list[Tensor]:
    top = torch.maximum(old[0], new[0])
    keep, add = (old[0] - top).exp_(), (new[0] - top).exp_()
    return [top, old[1] * keep + new[1] * add, old[2] * keep + new[2] * add]


def _attend_block(
    queries: Tensor, block: Block, kv_heads: int, window: int | None, fetch: Callable[[Tile], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """queries [I * Hk * R, D] float32, scaled -> (output of the same shape, log-sum-exp [I * Hk * R])."""
    queries = queries.view(block.items, kv_heads, block.rows, -1)
    state: list[Tensor] | None = None
    for tile in block.tiles:
        keys, values = fetch(tile)
        part = queries[: tile.items, :, tile.first_row :]
        new = _partial(part, keys, values, tile, window)
        if state is None and (tile.items, tile.first_row) == (block.items, 0):
            state = new
            continue
        if state is None:
            one = queries[..., :1]
            state = [torch.full_like(one, LOWEST), torch.zeros_like(one), torch.zeros_like(queries)]
        if tile.items < block.items or tile.first_row:
            views = [old[: tile.items, :, tile.first_row :] for old in state]
            for view, value in zip(views, _combine(views, new), strict=True):
                view.copy_(value)
        else:
            state = _combine(state, new)
    top, total, out = state
    return (out / total).flatten(0, 2), (top + total.log()).flatten()


def _attend(
    q: Tensor, plan: Plan, window: int | None, fetch: Callable[[Tile], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """q [N, H, D] -> (output [N, H, D] in the dtype of q, log-sum-exp [N, H] float32)."""
    width = q.shape[-1]
    rows = q.reshape(-1, width)
    parts = []
    for block in plan.blocks:
        queries = rows.index_select(0, block.query_rows).float().mul_(width**-0.5)
        parts.append(_attend_block(queries, block, plan.kv_heads, window, fetch))
    out, lse = (parts[0][i] if len(parts) == 1 else torch.cat([part[i] for part in parts]) for i in (0, 1))
    out, lse = (x.index_select(0, plan.output_rows).view(*q.shape[:2], *x.shape[1:]) for x in (out, lse))
    return out.to(q.dtype), lse


def _from_rows(rows: Tensor, tile: Tile, kv_heads: int) -> Tensor:
    return rows.index_select(0, tile.key_rows).float().view(tile.items * kv_heads, tile.keys, -1)


class _WholeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, plan: Plan, batches: tuple[Batch, ...], window: int | None
    ) -> tuple[Tensor, Tensor]:
        flat = [x.reshape(-1, x.shape[-1]) for x in (k, v)]
        fetch = lambda tile: tuple(_from_rows(x, tile, plan.kv_heads) for x in flat)
        return _attend(q, plan, window, fetch)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        q, k, v, _, ctx.batches, ctx.window = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _):
        return *attention_gradient(grad, *ctx.saved_tensors, ctx.batches, ctx.window), None, None, None


class WholeSequences:
    """The learner's past: N tokens are whole sequences, packed one after the other; nothing attends across them.

    Args:
        lengths: tokens of each sequence, each >= 1, in packing order.
        prefixes: for each sequence None, or the number of another one, without a prefix itself, whose tokens come
            before its own: its queries see them too, and its positions go on from there. None: no sequence has one.
    Raises: ValueError for a length < 1, or a prefix that is not such a sequence.
    """

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None] | None = None) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"lengths must be at least one, each >= 1, got {list(lengths)}")
        self.lengths = tuple(lengths)
        self.prefixes = (None,) * len(lengths) if prefixes is None else tuple(prefixes)
        if len(self.prefixes) != len(lengths):
            raise ValueError(f"prefixes must be one a sequence ({len(lengths)}), got {len(self.prefixes)}")
        for prefix in self.prefixes:
            if prefix is not None and not (0 <= prefix < len(lengths) and self.prefixes[prefix] is None):
                raise ValueError(f"prefixes must be sequences without a prefix, got {prefix}")
        self._plans: dict[tuple[int, int, int | None], Plan] = {}
        self._batches = gradient_batches(self.lengths, self.prefixes)
        self._kernel_plan = None

    def _plan(self, heads: int, kv_heads: int, window: int | None) -> Plan:
        key = (heads, kv_heads, window)
        if key not in self._plans:
            starts = torch.tensor(self.lengths).cumsum(0) - torch.tensor(self.lengths)
            before = torch.tensor([0 if prefix is None else self.lengths[prefix] for prefix in self.prefixes])
            prefix_starts = starts[[prefix or 0 for prefix in self.prefixes]]

            def key_rows(sequence: Tensor, position: Tensor) -> Tensor:
                shared, own = prefix_starts[sequence][:, None], (starts - before)[sequence][:, None]
                token = position + torch.where(position < before[sequence][:, None], shared, own)
                return (token[:, None, :] * kv_heads + torch.arange(kv_heads)[None, :, None]).flatten()

            self._plans[key] = make_plan(
                self.lengths,
                (torch.tensor(self.lengths) + before).tolist(),
                heads=heads,
                kv_heads=kv_heads,
                windows=(window,),
                key_rows=key_rows,
                short_queries=0,
            )
        return self._plans[key]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """Causal attention of every token to its own sequence.

        Args:
            layer: not used; the learner keeps no cache.
            q: [N, H, D].  k, v: [N, Hk, D], same dtype; Hk divides H; D in 16 to 256.
            window: None, or the number of latest tokens seen, the own included.
        Returns: [N, H, D] in the dtype of q.
        Gradient: to q, k and v, in float32, rounded once; deterministic; not differentiable again.
        Raises: ValueError if N is not the sum of lengths or Hk does not divide H.
        """
        if q.shape[0] != sum(self.lengths):
            raise ValueError(f"q must have {sum(self.lengths)} tokens, got {q.shape[0]}")
        if device.has_kernels(q):
            from rz.ops import triton_attention, triton_whole

            if any(prefix is not None for prefix in self.prefixes):
                raise ValueError("prefixes must be None on a device with kernels, got a shared one")
            if self._kernel_plan is None:
                self._kernel_plan = triton_attention.whole_plan(self.lengths, q.device)
            return triton_whole.whole_attention(q, k, v, self._kernel_plan, window=window)
        plan = self._plan(q.shape[1], k.shape[1], window)
        return apply(_WholeAttention, q, k, v, plan, self._batches, window)[0]


def write_cache(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values of N tokens in place.

    Args:
        cache: [blocks, Hk, block_size, 2 D], keys before values in the last axis.
        k, v: [N, Hk, D].
        slots: [N] int64, block * block_size + offset.
    """
    size, width = cache.shape[2], k.shape[-1]
    block, offset = slots // size, slots % size
    cache[block, :, offset, :width] = k
    cache[block, :, offset, width:] = v


def paged_plan(
    query_lengths: Sequence[int],
    sequence_lengths: Sequence[int],
    block_table: Tensor,
    *,
    block_size: int,
    heads: int,
    kv_heads: int,
    windows: Sequence[int | None],
) -> Plan:
    """Plan attention over a paged cache: as make_plan, with block_table [sequences, blocks] of cache block numbers."""
    if device.has_kernels(block_table):
        from rz.ops import triton_attention

        return triton_attention.paged_plan(query_lengths, sequence_lengths, block_table, block_size=block_size)
    table = block_table.long()

    def key_rows(sequence: Tensor, position: Tensor) -> Tensor:
        block = table[sequence[:, None], position // block_size]
        head = torch.arange(kv_heads)[None, :, None]
        return ((block[:, None, :] * kv_heads + head) * block_size + (position % block_size)[:, None, :]).flatten()

    return make_plan(
        query_lengths,
        sequence_lengths,
        heads=heads,
        kv_heads=kv_heads,
        windows=windows,
        key_rows=key_rows,
        short_queries=64,
    )


def paged_attention(q: Tensor, cache: Tensor, plan: Plan, *, window: int | None) -> Tensor:
    """Attention of N query tokens to their sequences' cached keys and values, their own already written.

    Args:
        q: [N, H, D].
        cache: [blocks, Hk, block_size, 2 D], contiguous; unwritten entries may hold anything, NaN included.
        plan: from paged_plan; windows must contain window.
    Returns: [N, H, D] in the dtype of q.
    Gradient: none.
    """
    if device.has_kernels(q):
        from rz.ops import triton_attention

        return triton_attention.paged_attention(q, cache, plan, window=window)
    width = q.shape[-1]
    rows = cache.view(-1, 2 * width)

    def fetch(tile: Tile) -> tuple[Tensor, Tensor]:
        both = _from_rows(rows, tile, plan.kv_heads)
        return both[..., :width], both[..., width:]

    return _attend(q, plan, window, fetch)[0]
