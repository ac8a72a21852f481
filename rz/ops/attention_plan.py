"""Which query row meets which keys: index arithmetic shared by all layers of one forward pass.

Queries are cut into items. An item is a run of consecutive tokens of one sequence, for one key-value head all of its
query heads' rows together (token-major), padded to a multiple of row_quantum. Items of equal row count form a block and
are computed together. Keys are cut into tiles from absolute position 0 as rz.ops.attention_kernel needs it, and read in
runs of KEY_QUANTUM consecutive positions.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import attrs
import numpy as np
import torch
from torch import Tensor

from rz.ops.attention_kernel import KEY_QUANTUM, SPLIT, TILE, additive, masked_keys, up

RUN, SHORT_RUN = 128, 16  # query tokens of an item at most, of a sequence with many and with few
LEAST_RUN = 16  # lengths are rounded up to this
BLOCK_SCORES = 1 << 20  # scores of a block at most, over all its tiles

KeyRuns = Callable[[np.ndarray, np.ndarray], np.ndarray]


@attrs.frozen(kw_only=True, eq=False)
class Tile:
    """One key tile of a block, for its first `items` items and for query rows from `first_row` on."""

    items: int
    first_row: int
    keys: int
    key_runs: Tensor  # [items * kv_heads * keys / KEY_QUANTUM] runs of the key-value storage
    # By window; of all rows, or [.., 1, ..] for all rows alike:
    masks: dict[int | None, Tensor | None]  # [items, 1, rows, keys], 0 or -inf; None = 0 everywhere
    empty: dict[int | None, Tensor]  # [items, 1, rows] bool, rows without a key here, if there are any


@attrs.frozen(kw_only=True, eq=False)
class Block:
    """Items of `rows` query rows each, in order of falling key count."""

    items: int
    rows: int
    query_rows: Tensor  # [items * rows * kv_heads] rows of the queries seen as [N * H, D]
    tiles: tuple[Tile, ...]


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """How N query tokens attend; made once a forward pass, read by every layer.

    output_rows: [N * H], where row (token, head) lies among the rows of all blocks.
    """

    blocks: tuple[Block, ...]
    output_rows: Tensor
    kv_heads: int
    dtype: torch.dtype  # that attention is computed in


class _Item(NamedTuple):
    sequence: int
    first_token: int  # row of its first query among the N
    first_position: int
    tokens: int


def _block(
    items: Sequence[_Item],
    tokens: int,
    heads: int,
    kv_heads: int,
    windows: Sequence[int | None],
    key_runs: KeyRuns,
    dtype: torch.dtype,
    row_quantum: int,
) -> tuple[Block, np.ndarray, np.ndarray]:
    """A block, and for its valid rows: the (token, head) row they answer and where they lie in the block."""
    group = heads // kv_heads
    rows = up(tokens * group, row_quantum)
    sequence, first_token, first_position, count = np.array(items).T
    row = np.arange(rows)
    valid = row < count[:, None] * group  # [I, R]
    offset = np.where(valid, row // group, 0)
    alone = int(count.max()) == 1  # then the rows of an item are at one position, and share a row of the mask
    positions = first_position[:, None] + (offset[:, :1] if alone else offset)
    head = np.arange(kv_heads) * group + (row % group)[:, None]  # [R, Hk]
    answers = (first_token[:, None] + offset)[:, :, None] * heads + head  # [I, R, Hk]; padding repeats the first token
    last = first_position + count - 1
    tiles = []
    widest = None if None in windows else max(windows)
    oldest = (np.zeros_like(last) if widest is None else first_position - widest + 1)[:, None]
    newest_key, quantum = int(last[0]), TILE if dtype == torch.float32 else SPLIT
    begin = max(0, int(oldest.min())) // quantum * quantum
    width = TILE if dtype == torch.float32 else up(newest_key + 1 - begin, KEY_QUANTUM)
    for start in range(begin, newest_key + 1, width):
        active = int((last >= start).sum())
        keys = min(width, up(newest_key + 1 - start, KEY_QUANTUM))
        # Rows that lie before the tile's first key in every item are left out; at least row_quantum rows are kept.
        skipped = max(0, start - int(first_position[:active].max())) * group
        first_row = min(skipped // row_quantum * row_quantum, rows - row_quantum)
        key = np.arange(start, start + keys)
        masked = {w: masked_keys(positions[:active, first_row:, None], key, w)[:, None] for w in set(windows)}
        several = start > begin or start + width <= newest_key  # of one tile nothing is combined
        empty = {w: mask.all(-1) for w, mask in masked.items()} if several else {}
        # A run past the end, or before the widest window, may hold anything: read the newest, which is finite.
        run, newest = key[::KEY_QUANTUM] // KEY_QUANTUM, last[:active, None] // KEY_QUANTUM
        read = np.where((run <= newest) & (run >= oldest[:active] // KEY_QUANTUM), run, newest)
        tiles.append(
            Tile(
                items=active,
                first_row=first_row,
                keys=keys,
                key_runs=torch.from_numpy(key_runs(sequence[:active], read)),
                masks={w: additive(torch.from_numpy(m), dtype) if m.any() else None for w, m in masked.items()},
                empty={w: torch.from_numpy(left) for w, left in empty.items() if left.any()},
            )
        )
    block = Block(items=len(items), rows=rows, query_rows=torch.from_numpy(answers.ravel()), tiles=tuple(tiles))
    places = np.arange(answers.size).reshape(answers.shape)
    if alone:  # as below, without a search
        return block, answers[:, :group].ravel(), places[:, :group].ravel()
    return block, answers[valid].ravel(), places[valid].ravel()


def make_plan(
    query_lengths: Sequence[int],
    sequence_lengths: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    windows: Sequence[int | None],
    key_runs: KeyRuns,
    short_queries: int,
    dtype: torch.dtype,
    row_quantum: int,
) -> Plan:
    """Plan causal attention for the last query_lengths[i] tokens of each sequence.

    Args:
        query_lengths: tokens of each sequence among the N, in packing order; 0 is allowed.
        sequence_lengths: keys of each sequence, its query tokens included.
        heads, kv_heads: H and Hk; Hk divides H.
        windows: the distinct sliding windows of the layers (None = all earlier tokens; w = the last w, own included).
        key_runs: (sequence [I], run of its positions [I, K]) -> [I * kv_heads * K] runs of the key-value storage, head
            before run. What is read of a run past its newest position must be finite.
        short_queries: a sequence of at most this many query tokens is cut into items of SHORT_RUN tokens, batched with
            those of all other such sequences; a longer one into items of RUN tokens, batched by first position.
        dtype: that attention is computed in, float32 or bfloat16.
        row_quantum: rows of an item are padded to a multiple of this.
    Raises: ValueError if kv_heads does not divide heads, or a sequence is shorter than its query.
    """
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads {kv_heads}, got {heads}")
    single: list[_Item] = []
    short: list[_Item] = []
    long: list[_Item] = []
    token = 0
    for sequence, (queries, keys) in enumerate(zip(query_lengths, sequence_lengths, strict=True)):
        if not 0 <= queries <= keys:
            raise ValueError(f"query length must be in [0, {keys}] of sequence {sequence}, got {queries}")
        items, run = (long, RUN) if queries > short_queries else (short, SHORT_RUN) if queries > 1 else (single, 1)
        items += [
            _Item(
                sequence=sequence,
                first_token=token + i,
                first_position=keys - queries + i,
                tokens=min(run, queries - i),
            )
            for i in range(0, queries, run)
        ]
        token += queries
    groups = [(1, chunk) for chunk in _batches(single, 1, heads)]
    groups += [(max(item.tokens for item in chunk), chunk) for chunk in _batches(short, SHORT_RUN, heads)]
    by_size: dict[tuple[int, int], list[_Item]] = {}
    for item in long:
        by_size.setdefault((up(item.tokens, _width(item.tokens)), item.first_position), []).append(item)
    groups += [(size, chunk) for (size, _), items in by_size.items() for chunk in _batches(items, size, heads)]
    blocks, output_rows, base = [], np.empty(token * heads, dtype=np.int64), 0
    for tokens, items in groups:
        block, answers, rows = _block(items, tokens, heads, kv_heads, windows, key_runs, dtype, row_quantum)
        output_rows[answers] = rows + base
        base += len(block.query_rows)
        blocks.append(block)
    return Plan(blocks=tuple(blocks), output_rows=torch.from_numpy(output_rows), kv_heads=kv_heads, dtype=dtype)


def _width(tokens: int) -> int:
    """Lengths are rounded up to this, so that sequences of similar length share a block at little waste."""
    return max(LEAST_RUN, 1 << max(0, tokens.bit_length() - 4))


def _batches(items: list[_Item], tokens: int, heads: int) -> list[list[_Item]]:
    """Runs of falling key count: at most BLOCK_SCORES scores each, no item padded to more than twice its keys."""
    rows = tokens * heads
    batches: list[list[_Item]] = []
    longest = 0
    for item in sorted(items, key=lambda item: -(item.first_position + item.tokens)):
        keys = item.first_position + item.tokens
        full = batches and (len(batches[-1]) + 1) * rows * longest > BLOCK_SCORES
        if not batches or full or longest > max(128, 2 * keys):
            batches.append([])
            longest = keys
        batches[-1].append(item)
    return batches
