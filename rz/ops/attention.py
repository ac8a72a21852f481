"""Causal attention with grouped key-value heads, over a paged cache and over whole sequences, in one arithmetic.

Both callers hand rows and keys to rz.ops.attention_kernel, with keys from absolute position 0, so a token's output has
the same bits by prefill, chunked prefill, decode, recomputation and the learner.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rz.ops import attention_kernel as kernel
from rz.ops import device
from rz.ops.attention_gradient import Batch, attention_gradient, gradient_batches
from rz.ops.attention_plan import Block, Plan, make_plan
from rz.ops.function import apply


def _attend_batch(q: Tensor, k: Tensor, v: Tensor, batch: Batch, window: int | None) -> tuple[Tensor, Tensor]:
    """Output [I, L - first, H, D] and log-sum-exp [I, L - first, H] of the batch's positions from its first on."""
    dtype = kernel.compute_dtype(q.dtype, q.shape[-1])
    queries, keys, values = (batch.take(x, padded=True).to(dtype).transpose(1, 2) for x in (q, k, v))
    out, lse = kernel.causal_attention(queries[:, :, batch.first :], keys, values, first=batch.first, window=window)
    kept = batch.tokens.shape[1] - batch.first
    return out.transpose(1, 2)[:, :kept], lse.transpose(1, 2)[:, :kept]


class _WholeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, batches: tuple[Batch, ...], window: int | None
    ) -> tuple[Tensor, Tensor]:
        if len(batches) == 1 and batches[0].rows is not None:
            out, lse = _attend_batch(q, k, v, batches[0], window)
            return out.reshape(q.shape).to(q.dtype), lse.reshape(q.shape[:2])
        out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2], dtype=torch.float32)
        for batch in batches:
            parts = _attend_batch(q, k, v, batch, window)
            tokens, own = batch.tokens[:, batch.first :], batch.own[:, batch.first :]
            for x, part in zip((out, lse), parts, strict=True):
                if batch.rows is not None:
                    batch.take(x).copy_(part)
                else:
                    x.index_copy_(0, tokens[own], part[own].to(x.dtype))
        return out, lse

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        q, k, v, ctx.batches, ctx.window = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, _):
        return *attention_gradient(grad, *ctx.saved_tensors, ctx.batches, ctx.window), None, None


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
        self._batches = gradient_batches(self.lengths, self.prefixes)
        self._kernel_plan = None

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
        if q.shape[1] % k.shape[1]:
            raise ValueError(f"heads must be a multiple of kv_heads {k.shape[1]}, got {q.shape[1]}")
        # The kernel takes the last axis as dense.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return apply(_WholeAttention, q, k, v, self._batches, window)[0]


def _check_block_size(size: int) -> None:
    if size % kernel.KEY_QUANTUM:
        raise ValueError(f"block_size must be a multiple of {kernel.KEY_QUANTUM}, got {size}")


def write_cache(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store keys and values of N tokens in place.

    Where the first slot of a run of KEY_QUANTUM is written, zeros fill the rest of the run until its own tokens come:
    on processors runs are read whole, and what an earlier sequence left there need not be finite.

    Args:
        cache: [blocks, Hk, block_size, 2 D], contiguous, keys before values in the last axis.
        k, v: [N, Hk, D].
        slots: [N] int64, block * block_size + offset. A sequence's come in order of position, over all calls.
    Raises: ValueError, on a processor, if block_size is no multiple of KEY_QUANTUM.
    """
    kv_heads, size, width = cache.shape[1], cache.shape[2], k.shape[-1]
    block, offset = slots // size, slots % size
    if device.has_kernels(cache):
        cache[block, :, offset, :width] = k
        cache[block, :, offset, width:] = v
        return
    _check_block_size(size)
    rows = ((block * (kv_heads * size) + offset)[:, None] + torch.arange(kv_heads) * size).flatten()
    fresh = rows[rows % kernel.KEY_QUANTUM == 0] // kernel.KEY_QUANTUM
    cache.view(-1, kernel.KEY_QUANTUM * 2 * width).index_fill_(0, fresh, 0)
    cache.view(-1, 2 * width).index_copy_(0, rows, torch.cat((k, v), -1).flatten(0, 1))


def paged_plan(
    query_lengths: Sequence[int],
    sequence_lengths: Sequence[int],
    block_table: Tensor,
    *,
    block_size: int,
    heads: int,
    kv_heads: int,
    windows: Sequence[int | None],
    head_dim: int,
    dtype: torch.dtype,
) -> Plan:
    """Plan attention over a paged cache: as make_plan, with block_table [sequences, blocks] of cache block numbers.

    head_dim and dtype are those of the queries.

    Raises, on a processor: ValueError if block_size is no multiple of KEY_QUANTUM; otherwise as make_plan.
    """
    if device.has_kernels(block_table):
        from rz.ops import triton_attention

        return triton_attention.paged_plan(query_lengths, sequence_lengths, block_table, block_size=block_size)
    _check_block_size(block_size)
    table, runs = block_table.long().numpy(), block_size // kernel.KEY_QUANTUM  # of a block, for one head

    def key_runs(sequence: np.ndarray, run: np.ndarray) -> np.ndarray:
        number, place = np.divmod(run, runs)
        first = table[sequence[:, None], number] * (kv_heads * runs) + place
        return (first[:, None] + np.arange(kv_heads)[:, None] * runs).ravel()

    return make_plan(
        query_lengths,
        sequence_lengths,
        heads=heads,
        kv_heads=kv_heads,
        windows=windows,
        key_runs=key_runs,
        short_queries=64,
        dtype=kernel.compute_dtype(dtype, head_dim),
        row_quantum=kernel.row_quantum(head_dim),
    )


def _attend_block(q: Tensor, cached: Tensor, block: Block, plan: Plan, window: int | None) -> Tensor:
    """q [N * H, D], cached [runs, KEY_QUANTUM * 2 D] -> [I * R * Hk, D] in the dtype of the plan."""
    width = q.shape[-1]
    queries = q.index_select(0, block.query_rows).to(plan.dtype)
    queries = queries.view(block.items, block.rows, plan.kv_heads, width).transpose(1, 2)
    state: tuple[Tensor, Tensor] | None = None
    for tile in block.tiles:
        both = cached.index_select(0, tile.key_runs).to(plan.dtype).view(tile.items, plan.kv_heads, tile.keys, -1)
        part = queries[: tile.items, :, tile.first_row :]
        new = kernel.fused(part, both[..., :width], both[..., width:], tile.masks[window])
        if state is None:  # every row sees the first tile's keys, or has them masked
            state = new if len(block.tiles) == 1 else kernel.first_tile(new, tile.empty.get(window))
        else:
            kernel.add_tile(tuple(x[: tile.items, :, tile.first_row :] for x in state), new, tile.empty.get(window))
    return state[0].transpose(1, 2).reshape(-1, width)


def paged_attention(q: Tensor, cache: Tensor, plan: Plan, *, window: int | None) -> Tensor:
    """Attention of N query tokens to their sequences' cached keys and values, their own already written.

    Args:
        q: [N, H, D].
        cache: [blocks, Hk, block_size, 2 D], contiguous, filled by write_cache; unwritten runs of KEY_QUANTUM slots may
            hold anything, NaN included.
        plan: from paged_plan; windows must contain window.
    Returns: [N, H, D] in the dtype of q.
    Gradient: none.
    """
    if device.has_kernels(q):
        from rz.ops import triton_attention

        return triton_attention.paged_attention(q, cache, plan, window=window)
    width = q.shape[-1]
    cached, rows = cache.view(-1, kernel.KEY_QUANTUM * 2 * width), q.reshape(-1, width)
    parts = [_attend_block(rows, cached, block, plan, window) for block in plan.blocks]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.index_select(0, plan.output_rows).view(q.shape).to(q.dtype)
