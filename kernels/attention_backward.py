"""Gradients of attention over whole packed sequences. One program owns each gradient it writes: no order can vary."""

import triton
import triton.language as tl
from rz.kernels.numbers import dot, is_seen, narrow


@triton.jit(do_not_specialize=["sequences"])
def attention_to_queries(
    q,  # [N, KV_HEADS * HEAD_GROUP, WIDTH]
    k,  # [N, KV_HEADS, WIDTH]
    v,  # the same
    grad,  # like q
    lse,  # [N, heads] float32
    delta,  # [N, heads] float32: the product of grad and output, summed over the width
    starts,  # [sequences + 1] int32
    tile_sequences,
    tile_starts,
    to_q,  # like q
    scale,
    sequences,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of query rows, laid out as in rz.kernels.attention."""
    TOKENS: tl.constexpr = BLOCK_M // HEAD_GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequences + tile)
    if sequence >= sequences:
        return
    start = tl.load(starts + sequence)
    tokens = tl.load(starts + sequence + 1) - start
    first_token = (tile - tl.load(tile_starts + sequence)) * TOKENS
    last_token = tl.minimum(first_token + TOKENS, tokens) - 1
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = first_token + r // HEAD_GROUP
    valid = (r < TOKENS * HEAD_GROUP) & (token <= last_token)
    row = (start + token).to(tl.int64) * (KV_HEADS * HEAD_GROUP) + kv_head * HEAD_GROUP + r % HEAD_GROUP
    mask = valid[:, None] & (d < WIDTH)[None, :]
    queries = tl.load(q + row[:, None] * WIDTH + d[None, :], mask=mask, other=0.0)
    above = tl.load(grad + row[:, None] * WIDTH + d[None, :], mask=mask, other=0.0)
    logs = tl.load(lse + row, mask=valid, other=0.0)
    dots = tl.load(delta + row, mask=valid, other=0.0)
    result = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(0, first_token - WINDOW + 1) // BLOCK_N * BLOCK_N
    for begin in range(first_key, last_token + 1, BLOCK_N):
        key = begin + tl.arange(0, BLOCK_N)
        place = (start + tl.minimum(key, last_token)).to(tl.int64) * KV_HEADS + kv_head
        keys = tl.load(k + place[:, None] * WIDTH + d[None, :], mask=(d < WIDTH)[None, :], other=0.0)
        values = tl.load(v + place[:, None] * WIDTH + d[None, :], mask=(d < WIDTH)[None, :], other=0.0)
        zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        seen = is_seen(token[:, None] - key[None, :], WINDOW)
        scores = tl.where(seen, dot(queries, tl.trans(keys), zeros) * scale - logs[:, None], float("-inf"))
        to_scores = tl.exp(scores) * (dot(above, tl.trans(values), zeros) - dots[:, None])
        result = dot(narrow(to_scores, keys.dtype), keys, result)
    tl.store(to_q + row[:, None] * WIDTH + d[None, :], narrow(result * scale, to_q.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["sequences"])
def attention_to_keys(
    q,
    k,
    v,
    grad,
    lse,
    delta,
    starts,
    tile_sequences,  # as in attention_to_queries, but of tiles of BLOCK_N keys
    tile_starts,
    to_k,  # like k
    to_v,  # like v
    scale,
    sequences,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of keys of one key-value head: its query rows are added in ascending order."""
    TOKENS: tl.constexpr = BLOCK_M // HEAD_GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_sequences + tile)
    if sequence >= sequences:
        return
    start = tl.load(starts + sequence)
    tokens = tl.load(starts + sequence + 1) - start
    first_key = (tile - tl.load(tile_starts + sequence)) * BLOCK_N
    r, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    key = first_key + tl.arange(0, BLOCK_N)
    key_place = (start + key).to(tl.int64)[:, None] * (KV_HEADS * WIDTH) + kv_head * WIDTH + d[None, :]
    key_mask = (key < tokens)[:, None] & (d < WIDTH)[None, :]
    keys = tl.load(k + key_place, mask=key_mask, other=0.0)
    values = tl.load(v + key_place, mask=key_mask, other=0.0)
    sum_k = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    sum_v = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    end = tokens
    if WINDOW:
        end = tl.minimum(tokens, first_key + BLOCK_N - 1 + WINDOW)
    for begin in range(first_key // TOKENS * TOKENS, end, TOKENS):
        token = begin + r // HEAD_GROUP
        valid = (r < TOKENS * HEAD_GROUP) & (token < tokens)
        row = (start + token).to(tl.int64) * (KV_HEADS * HEAD_GROUP) + kv_head * HEAD_GROUP + r % HEAD_GROUP
        mask = valid[:, None] & (d < WIDTH)[None, :]
        queries = tl.load(q + row[:, None] * WIDTH + d[None, :], mask=mask, other=0.0)
        above = tl.load(grad + row[:, None] * WIDTH + d[None, :], mask=mask, other=0.0)
        logs = tl.load(lse + row, mask=valid, other=0.0)
        dots = tl.load(delta + row, mask=valid, other=0.0)
        zeros = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        seen = is_seen(token[None, :] - key[:, None], WINDOW) & valid[None, :]
        scores = tl.where(seen, dot(keys, tl.trans(queries), zeros) * scale - logs[None, :], float("-inf"))
        weights = tl.exp(scores)
        sum_v = dot(narrow(weights, above.dtype), above, sum_v)
        to_scores = weights * (dot(values, tl.trans(above), zeros) - dots[None, :])
        sum_k = dot(narrow(to_scores, queries.dtype), queries, sum_k)
    tl.store(to_k + key_place, narrow(sum_k * scale, to_k.dtype.element_ty), mask=key_mask)
    tl.store(to_v + key_place, narrow(sum_v, to_v.dtype.element_ty), mask=key_mask)
