import pytest
import torch
from examples import assert_near, gradients, normal
from torch import Tensor

from rz.ops import WholeSequences, paged_attention, paged_plan, triton_whole, write_cache
from rz.ops.tiles import Tile
from rz.ops.triton_attention import attention, whole_keys, whole_plan
from rz.ops.triton_whole import whole_attention

pytestmark = pytest.mark.usefixtures("on_kernels")
TILE, SPLIT = 16, 48  # keys, of the interpreter's table


def exact(q, k, v, lengths, window, sinks=None):
    """Softmax attention by its definition, sequence by sequence."""
    out, start, group = [], 0, q.shape[1] // k.shape[1]
    for length in lengths:
        rows = slice(start, start + length)
        keys, values = (x[rows].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * q.shape[-1] ** -0.5
        distance = torch.arange(length)[:, None] - torch.arange(length)
        scores = scores.masked_fill((distance < 0) | (distance >= (window or length)), -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, length, 1)), -1)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values))
        start += length
    return torch.cat(out)


def inputs(tokens, heads, kv_heads, width, dtype=torch.float32):
    return tuple(
        normal(tokens, count, width, dtype=dtype, seed=seed) for seed, count in enumerate((heads, kv_heads, kv_heads))
    )


@pytest.mark.parametrize(
    "lengths, heads, kv_heads, width, window, dtype",
    [
        ((1, 15, 17), 2, 2, 32, None, torch.float32),
        ((50, 1, 16), 4, 2, 64, None, torch.bfloat16),
        ((63,), 3, 1, 80, 20, torch.float16),
        ((33, 2), 2, 1, 256, 16, torch.bfloat16),
        ((40,), 7, 1, 16, None, torch.float32),
    ],
)
def test_values_and_gradients(lengths, heads, kv_heads, width, window, dtype):
    q, k, v = inputs(sum(lengths), heads, kv_heads, width, dtype)
    op = lambda q, k, v: WholeSequences(lengths).attend(0, q, k, v, window=window)
    by_definition = lambda q, k, v: exact(q, k, v, lengths, window)
    wide = [x.double() for x in (q, k, v)]
    assert_near(op(q, k, v), by_definition(*wide), dtype, 2)
    for got, expected in zip(gradients(op, q, k, v), gradients(by_definition, *wide), strict=True):
        assert_near(got, expected, dtype, 8)


def test_sinks():
    q, k, v = inputs(60, 4, 2, 32)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 30.0])
    op = lambda q, k, v, sinks: whole_attention(q, k, v, whole_plan([59, 1], q.device), window=None, sinks=sinks)
    by_definition = lambda q, k, v, sinks: exact(q, k, v, [59, 1], None, sinks)
    wide = [x.double() for x in (q, k, v, sinks)]
    assert_near(op(q, k, v, sinks), by_definition(*wide), torch.float32, 2)
    for got, expected in zip(gradients(op, q, k, v, sinks), gradients(by_definition, *wide), strict=True):
        assert_near(got, expected, torch.float32, 32)


def test_log_sum_exp():
    """Equal scores over n keys give log n; scores here are 0."""
    q, k, v = torch.zeros(50, 1, 16), torch.zeros(50, 1, 16), normal(50, 1, 16)
    out, lse = attention(q, whole_keys(k, v), 1, whole_plan([50], q.device), window=None)
    torch.testing.assert_close(lse[:, 0], torch.arange(1, 51).log())
    torch.testing.assert_close(out[:, 0], v[:, 0].cumsum(0) / torch.arange(1, 51)[:, None])


def paged(q: Tensor, k: Tensor, v: Tensor, chunks: list[list[int]], window: int | None, block: int = 5) -> Tensor:
    """Attention as an engine computes it. chunks[i]: tokens of sequence i in each step, 0 for none; the cache is full
    of NaN, and its blocks are handed out backwards."""
    lengths = [sum(steps) for steps in chunks]
    blocks = -(-max(lengths) // block)
    cache = torch.full((len(chunks) * blocks + 1, k.shape[1], block, 2 * k.shape[2]), torch.nan, dtype=k.dtype)
    table = torch.arange(len(chunks) * blocks, 0, -1).view(len(chunks), blocks)
    out = torch.full_like(q, torch.nan)
    done = [0] * len(chunks)
    for step in zip(*chunks, strict=True):
        rows = torch.cat(
            [
                sum(lengths[:i]) + torch.arange(before, before + now)
                for i, (before, now) in enumerate(zip(done, step, strict=True))
            ]
        )
        slots = [
            table[i, p // block] * block + p % block for i, n in enumerate(step) for p in range(done[i], done[i] + n)
        ]
        done = [before + now for before, now in zip(done, step, strict=True)]
        write_cache(cache, k[rows], v[rows], torch.stack(slots))
        live = [i for i, now in enumerate(step) if now]
        plan = paged_plan(
            [step[i] for i in live],
            [done[i] for i in live],
            table[live],
            block_size=block,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            windows=(window,),
            head_dim=q.shape[2],
            dtype=q.dtype,
        )
        out[rows] = paged_attention(q[rows], cache, plan, window=window)
    return out


@pytest.mark.parametrize("dtype, window", [(torch.float32, None), (torch.bfloat16, 20), (torch.float16, None)])
def test_decode_prefill_and_whole_have_the_same_bits(dtype, window):
    """At every length near a tile, split or window edge: the last tokens are decoded one by one."""
    lengths = [2, TILE + 1, 2 * TILE + 1, SPLIT + 2, SPLIT + TILE + 2]
    q, k, v = inputs(sum(lengths), 4, 2, 32, dtype)
    whole = WholeSequences(lengths).attend(0, q, k, v, window=window)
    chunks = [[length - 2, 1, 1] for length in lengths]
    assert torch.equal(paged(q, k, v, chunks, window), whole)
    start = sum(lengths[:3])
    alone = [x[start : start + lengths[3]] for x in (q, k, v)]
    assert torch.equal(WholeSequences(lengths[3:4]).attend(0, *alone, window=window), whole[start:][: lengths[3]])


def test_decode_from_the_first_token_has_the_bits_of_prefill():
    q, k, v = inputs(SPLIT * 2 + 3, 2, 1, 16)
    whole = WholeSequences([len(q)]).attend(0, q, k, v, window=None)
    near = [1] * 2 + [TILE - 3, 1, 1, 1, SPLIT - TILE - 3, 1, 1, 1, SPLIT - 1, 1, 1]
    assert torch.equal(paged(q, k, v, [near], None), whole)


@pytest.mark.parametrize("window", [None, 11])
def test_mixed_batches_have_the_same_bits(window):
    """Chunked prefills beside decodes and sequences that wait."""
    q, k, v = inputs(60 + 52 + 5, 2, 2, 32, torch.bfloat16)
    whole = WholeSequences([60, 52, 5]).attend(0, q, k, v, window=window)
    chunks = [[40, 1, 0, 18, 1], [0, 17, 33, 1, 1], [1, 1, 1, 0, 2]]
    assert torch.equal(paged(q, k, v, chunks, window), whole)


def test_gradients_repeat():
    q, k, v = inputs(40, 2, 1, 32)
    run = lambda lengths, *x: gradients(lambda *x: WholeSequences(lengths).attend(0, *x, window=None), *x)
    first, again = run([25, 15], q, k, v), run([25, 15], q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_heads_must_fit():
    with pytest.raises(ValueError, match="heads must be a multiple of kv_heads 2, at most 16 times it, got 3"):
        WholeSequences([4]).attend(0, *inputs(4, 3, 2, 16), window=None)


def test_heads_must_fit_the_tile_of_the_gradient(monkeypatch):
    """Refused before the forward, not after it: tiles of the gradient are the smaller ones on some devices."""
    monkeypatch.setattr(triton_whole, "attention_backward_tile", lambda *sizes: Tile(8, 16, 64, 4, 1))
    with pytest.raises(ValueError, match="heads must be at most 8 times kv_heads 1 where a gradient is taken, got 16"):
        WholeSequences([4]).attend(0, *inputs(4, 16, 1, 16), window=None)


def test_keys_that_do_not_belong_to_the_queries_are_refused():
    q, k, v = inputs(4, 2, 1, 32)
    attend = lambda k, v, window=None: WholeSequences([4]).attend(0, q, k, v, window=window)
    for other in (k[:3], k[..., :16]):
        with pytest.raises(ValueError, match=r"k and v must be \[4, Hk, 32\], got"):
            attend(other, other)
    with pytest.raises(ValueError, match=r"k and v must be \[4, Hk, 32\], got"):
        attend(k, v[:3])
    with pytest.raises(TypeError, match=r"keys and values must be torch.float32, got torch.float16 and torch.float32"):
        attend(k.half(), v)
    for window in (0, -3):
        with pytest.raises(ValueError, match=f"window must be None or >= 1, got {window}"):
            attend(k, v, window)


def test_a_cache_of_another_width_is_refused():
    plan = paged_plan(
        [1],
        [1],
        torch.zeros(1, 1, dtype=torch.int32),
        block_size=4,
        heads=1,
        kv_heads=1,
        windows=(None,),
        head_dim=32,
        dtype=torch.float32,
    )
    with pytest.raises(ValueError, match=r"cache must be \[blocks, Hk, block_size, 64\], got \[1, 1, 4, 32\]"):
        paged_attention(normal(1, 1, 32), normal(1, 1, 4, 32), plan, window=None)
