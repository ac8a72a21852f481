"""Causal attention over keys that lie in pages: a vLLM cache, or a whole packed sequence as one page.

Keys are visited in tiles of fixed size from position 0. A split is a fixed number of tiles; it gives a partial
(max, sum, output) in float32, and partials are folded in ascending order. A sequence with one query token has its
splits computed by separate programs and folded by `combine`; any other folds in place. The partials come from one
binary and the folds are explicit fma, so both ways give the same bits.
"""

import triton
import triton.language as tl
from rz.kernels.numbers import LOWEST, dot, fold, is_seen, narrow


@triton.jit
def load_rows(place, inside, whole: tl.constexpr):
    return tl.load(place) if whole else tl.load(place, mask=inside, other=0.0)


@triton.jit
def split_partial(
    queries,
    scale,
    position,
    k,
    v,
    pages,
    begin,
    end,
    page_size,
    page_rows,
    position_rows,
    first_row,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(max [M], sum [M], output [M, D]) of the keys from begin, a multiple of BLOCK_N, up to end."""
    d = tl.arange(0, BLOCK_D)
    top = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        # Past the end a cache may hold anything, NaN included: the last key is read again, and masked.
        real = tl.minimum(key, end - 1)
        page = tl.load(pages + real // page_size).to(tl.int64)
        row = page * page_rows + (real % page_size) * position_rows + first_row
        keys = load_rows(k + row[None, :] * WIDTH + d[:, None], (d < WIDTH)[:, None], WIDTH == BLOCK_D)
        scores = dot(queries, keys, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)) * scale
        seen = is_seen(position[:, None] - key[None, :], WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        keep = tl.exp(top - new)
        total = tl.fma(total, keep, tl.sum(weights, 1))
        values = load_rows(v + row[:, None] * WIDTH + d[None, :], (d < WIDTH)[None, :], WIDTH == BLOCK_D)
        out = dot(narrow(weights, values.dtype), values, out * keep[:, None])
        top = new
    return top, total, out


@triton.jit
def fold_sink(top, total, out, sinks, valid):
    """A sink is one more partial, the last: its weight is 1 at its own logit, and its output 0."""
    sink = tl.load(sinks, mask=valid, other=0.0)
    return fold(top, total, out, sink, tl.full(total.shape, 1.0, tl.float32), tl.zeros_like(out))


@triton.jit(
    do_not_specialize=[
        "sequences",
        "table_width",
        "page_size",
        "page_rows",
        "position_rows",
        "head_rows",
        "part_rows",
    ]
)
def attend(
    q,  # [N, KV_HEADS * HEAD_GROUP, WIDTH]
    k,  # of head h in page p at k + (p * page_rows + offset in the page * position_rows + h * head_rows) * WIDTH
    v,  # values likewise
    sinks,  # [heads] float32 or None: a logit beside the keys, whose value is 0
    table,  # [sequences, table_width] int32: pages of a sequence
    query_starts,  # [sequences + 1] int32
    key_counts,  # [sequences] int32: keys of a sequence, its query tokens included
    tile_sequences,  # [tiles] int32: which sequence a tile of query rows belongs to; >= sequences = none
    tile_starts,  # [sequences] int32: the first tile of a sequence
    out,  # like q
    lse,  # [N, heads] float32
    part_top,  # [splits, sequences, heads] float32
    part_total,  # the same
    part_out,  # [splits, sequences, heads, WIDTH] float32
    scale,
    sequences,
    table_width,
    page_size,
    page_rows,
    position_rows,
    head_rows,
    part_rows,  # sequences * heads
    WINDOW: tl.constexpr,  # latest keys seen, the own included; 0 = all
    KV_HEADS: tl.constexpr,
    HEAD_GROUP: tl.constexpr,  # query heads of one key-value head
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,  # keys of a split, a multiple of BLOCK_N
):
    """Output and log-sum-exp of a tile of query rows: consecutive tokens, each with all heads of one key-value head."""
    TOKENS: tl.constexpr = BLOCK_M // HEAD_GROUP
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequences + tile)
    if sequence >= sequences:
        return
    query_start = tl.load(query_starts + sequence)
    tokens = tl.load(query_starts + sequence + 1) - query_start
    before = tl.load(key_counts + sequence) - tokens
    first_token = (tile - tl.load(tile_starts + sequence)) * TOKENS
    last_token = tl.minimum(first_token + TOKENS, tokens) - 1
    end = before + last_token + 1
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(0, before + first_token - WINDOW + 1)
    first_split, last_split = first_key // SPLIT, (end - 1) // SPLIT
    single = tokens == 1
    idle = tl.where(single, (part < first_split) | (part > last_split), part > 0)
    if idle:
        return
    first_split, last_split = tl.where(single, part, first_split), tl.where(single, part, last_split)
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = first_token + r // HEAD_GROUP
    valid = (r < TOKENS * HEAD_GROUP) & (token <= last_token)
    head = kv_head * HEAD_GROUP + r % HEAD_GROUP
    row = (query_start + token).to(tl.int64) * (KV_HEADS * HEAD_GROUP) + head
    mask = valid[:, None] & (d < WIDTH)[None, :]
    queries = tl.load(q + row[:, None] * WIDTH + d[None, :], mask=mask, other=0.0)
    position = before + tl.minimum(token, last_token)
    top = tl.full((BLOCK_M,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for split in range(first_split, last_split + 1):
        other_top, other_total, other_out = split_partial(
            queries,
            scale,
            position,
            k,
            v,
            table + sequence.to(tl.int64) * table_width,
            tl.maximum(split * SPLIT, first_key // BLOCK_N * BLOCK_N),
            tl.minimum((split + 1) * SPLIT, end),
            page_size,
            page_rows,
            position_rows,
            kv_head * head_rows,
            WINDOW,
            WIDTH,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
        )
        top, total, result = fold(top, total, result, other_top, other_total, other_out)
    if single:
        place = part.to(tl.int64) * part_rows + sequence * (KV_HEADS * HEAD_GROUP) + head
        tl.store(part_top + place, top, mask=valid)
        tl.store(part_total + place, total, mask=valid)
        tl.store(part_out + place[:, None] * WIDTH + d[None, :], result, mask=mask)
    else:
        if sinks is not None:
            top, total, result = fold_sink(top, total, result, sinks + head, valid)
        total = tl.where(valid, total, 1.0)
        value = narrow(result / total[:, None], out.dtype.element_ty)
        tl.store(out + row[:, None] * WIDTH + d[None, :], value, mask=mask)
        tl.store(lse + row, top + tl.log(total), mask=valid)


@triton.jit(do_not_specialize=["part_rows"])
def combine(
    sinks,
    query_starts,
    key_counts,
    out,
    lse,
    part_top,
    part_total,
    part_out,
    part_rows,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Fold the partials of a sequence with one query token, BLOCK_H heads a program; arguments as those of attend."""
    sequence = tl.program_id(0)
    query_start = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - query_start != 1:
        return
    end = tl.load(key_counts + sequence)
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(0, end - WINDOW)
    head, d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    valid = head < HEADS
    mask = valid[:, None] & (d < WIDTH)[None, :]
    top = tl.full((BLOCK_H,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_H,), dtype=tl.float32)
    result = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    for split in range(first_key // SPLIT, (end - 1) // SPLIT + 1):
        place = split * part_rows.to(tl.int64) + sequence * HEADS + head
        other_top = tl.load(part_top + place, mask=valid, other=LOWEST)
        other_total = tl.load(part_total + place, mask=valid, other=0.0)
        other_out = tl.load(part_out + place[:, None] * WIDTH + d[None, :], mask=mask, other=0.0)
        top, total, result = fold(top, total, result, other_top, other_total, other_out)
    if sinks is not None:
        top, total, result = fold_sink(top, total, result, sinks + head, valid)
    row = query_start.to(tl.int64) * HEADS + head
    total = tl.where(valid, total, 1.0)
    value = narrow(result / total[:, None], out.dtype.element_ty)
    tl.store(out + row[:, None] * WIDTH + d[None, :], value, mask=mask)
    tl.store(lse + row, top + tl.log(total), mask=valid)
