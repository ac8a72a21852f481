import importlib
import random

import pytest
import torch
from alignment import normal, threads
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from rz.ops import WholeSequences, paged_attention, paged_plan, write_cache
from rz.ops.attention_kernel import compute_dtype
from rz.ops.attention_plan import make_plan

F32, BF16 = torch.float32, torch.bfloat16
LENGTHS = (1, 5, 17, 127, 128, 129, 255, 256, 257)  # next to the edges of items and of a tile
SHAPES = [(2, 2, 16), (4, 2, 32), (9, 3, 64), (14, 2, 80), (8, 1, 128), (2, 2, 128), (3, 3, 256)]  # H, Hk, D
WINDOWS = (None, 1, 40, 130)


def inputs(lengths, shape, dtype=F32):
    heads, kv_heads, width = shape
    return [normal(sum(lengths), n, width, dtype=dtype, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]


def value_tolerance(dtype, width):
    """In bfloat16 the weights are rounded too: by up to 2^-9 each, of values of about 1."""
    if compute_dtype(dtype, width) == BF16:
        return {"rtol": 1.6e-2, "atol": 4e-3}
    return {"rtol": 1e-5 if dtype == F32 else 1.6e-2, "atol": 1e-5}


def spans(lengths):
    return [slice(sum(lengths[:i]), sum(lengths[: i + 1])) for i in range(len(lengths))]


def whole(q, k, v, lengths, window=None):
    return WholeSequences(lengths).attend(0, q, k, v, window=window)


def reference(q, k, v, lengths, window):
    out = []
    for span in spans(lengths):
        queries, keys, values = (x[span].transpose(0, 1) for x in (q, k, v))
        keys, values = (x.repeat_interleave(len(queries) // len(x), 0) for x in (keys, values))
        scores = queries @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        distance = torch.arange(scores.shape[1])[:, None] - torch.arange(scores.shape[1])
        masked = (distance < 0) | (distance >= (window or len(q)))
        out.append((scores.masked_fill(masked, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


class Engine:
    """A paged cache full of NaN, in shuffled blocks, filled step by step."""

    def __init__(self, q, k, v, lengths, *, block_size, window, seed=0):
        self.q, self.k, self.v, self.lengths, self.window, self.size = q, k, v, lengths, window, block_size
        self.random = random.Random(seed)
        blocks = [-(-length // block_size) for length in lengths]
        numbers = list(range(1, sum(blocks) + 2))
        self.random.shuffle(numbers)
        self.cache = q.new_full((sum(blocks) + 2, k.shape[1], block_size, 2 * k.shape[2]), torch.nan)
        self.table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        for row, count in zip(self.table, blocks, strict=True):
            row[:count] = torch.tensor([numbers.pop() for _ in range(count)])
        self.done = [0] * len(lengths)
        self.out = torch.full_like(q, torch.nan)

    def step(self, tokens):
        """tokens: by sequence, in the order in which they stand in the batch."""
        places = [
            (sequence, position)
            for sequence, count in tokens.items()
            for position in range(self.done[sequence], self.done[sequence] + count)
        ]
        rows = torch.tensor([sum(self.lengths[:sequence]) + position for sequence, position in places])
        slots = torch.tensor([int(self.table[s, p // self.size]) * self.size + p % self.size for s, p in places])
        write_cache(self.cache, self.k[rows], self.v[rows], slots)
        for sequence, count in tokens.items():
            self.done[sequence] += count
        self.out[rows] = paged_attention(self.q[rows], self.cache, self.plan(tokens), window=self.window)

    def plan(self, tokens, windows=None):
        return paged_plan(
            list(tokens.values()),
            [self.done[sequence] for sequence in tokens],
            self.table[list(tokens)],
            block_size=self.size,
            heads=self.q.shape[1],
            kv_heads=self.k.shape[1],
            windows=windows or (self.window,),
            head_dim=self.q.shape[2],
            dtype=self.q.dtype,
        )

    def run(self, chunks):
        """Random sequences in random order, each with a random chunk, until all are done."""
        while left := {i: n - d for i, (n, d) in enumerate(zip(self.lengths, self.done, strict=True)) if n > d}:
            chosen = self.random.sample(sorted(left), self.random.randint(1, len(left)))
            self.step({i: min(left[i], self.random.choice(chunks)) for i in chosen})
        return self.out


def test_value_by_hand():
    # One head of width 16, scaled by 1/4. Scores of the second token: q.k / 4 = 0 and ln 3: weights 1/4 and 3/4.
    one = torch.zeros(1, 16).index_fill(1, torch.tensor(0), 1.0)
    q, k = torch.stack([one, one]), torch.stack([0 * one, 4 * torch.tensor(3.0).log() * one])
    v = torch.stack([8 * one, 4 * one])
    assert_close(whole(q, k, v, (2,))[:, 0, 0], torch.tensor([8.0, 0.25 * 8 + 0.75 * 4]))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 40, 70, 139, 10**9])
def test_value_and_gradients_against_float64(dtype, shape, window):
    lengths = (1, 17, 130, 60, 139, 57, 64, 65)  # 130 and 139, 60 and 57 are padded together
    arguments, past = inputs(lengths, shape, dtype), WholeSequences(lengths)
    above = normal(*arguments[0].shape, dtype=dtype, seed=7)
    attend = lambda *args: past.attend(0, *args, window=window)
    exact = lambda *args: reference(*args, lengths, window)
    doubles = [x.double() for x in arguments]
    got = attend(*arguments)
    assert got.dtype == dtype
    assert_close(got, exact(*doubles).to(dtype), **value_tolerance(dtype, shape[2]))
    grads = torch.func.grad(lambda *args: (attend(*args).float() * above).sum(), argnums=(0, 1, 2))(*arguments)
    wanted = torch.func.grad(lambda *args: (exact(*args) * above.double()).sum(), argnums=(0, 1, 2))(*doubles)
    for grad, want in zip(grads, wanted, strict=True):
        assert grad.dtype == dtype
        # the gradient is taken at the rounded output: bfloat16 has a step of 2^-8 of terms of about 8
        assert_close(grad, want.to(dtype), rtol=1e-4 if dtype == F32 else 2e-2, atol=2e-5 if dtype == F32 else 3e-2)


# Odd lengths: threads do not meet at the edge of a vector; one sequence and kv head: they share a product.
@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ((3, 140, 70, 71, 512, 512), (4, 2, 32)),
        *(((length,), shape) for length in (171, 223, 331) for shape in ((14, 2, 64), (16, 8, 128), (6, 3, 64))),
        *(((length,), shape) for length in (37, 70, 103, 199) for shape in ((1, 1, 16), (8, 1, 64))),
        ((5, 106), (16, 1, 128)),
    ],
)
@pytest.mark.parametrize("window", [None, 100])
def test_gradients_have_the_same_bits_every_time_and_with_any_threads(lengths, shape, window):
    arguments = [x.requires_grad_() for x in inputs(lengths, shape)]
    above = normal(*arguments[0].shape, seed=7)
    results = []
    for count in (1, 1, 2, 3):
        with threads(count):
            results.append(torch.autograd.grad(whole(*arguments, lengths, window), arguments, above))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("length", [64, 70, 129, 192, 200])
@pytest.mark.parametrize("shape", [(4, 2, 32), (2, 2, 16)])
def test_a_last_axis_that_is_not_dense(length, shape):
    dense = inputs((length,), shape)
    above = normal(*dense[0].shape, seed=7)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*dense, above)]
    results = []
    for *arguments, slope in ((*dense, above), apart):
        leaves = [x.detach().requires_grad_() for x in arguments]
        out = whole(*leaves, (length,))
        results.append((out, *torch.autograd.grad(out, leaves, slope)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_alone_packed_and_paged_have_the_same_bits(dtype, shape, window):
    lengths = LENGTHS if window != 130 else (*LENGTHS[:4], 130, 131, 260)
    q, k, v = inputs(lengths, shape, dtype)
    packed = whole(q, k, v, lengths, window)
    for span, length in zip(spans(lengths), lengths, strict=True):
        assert torch.equal(whole(q[span], k[span], v[span], (length,), window), packed[span]), length
    for block_size in (32, 128, 384) if dtype == F32 else (32,):
        engine = Engine(q, k, v, lengths, block_size=block_size, window=window, seed=block_size)
        assert torch.equal(engine.run((1, 2, 5, 30, 64, 65, 200)), packed), block_size


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [None, 40])
def test_decode_token_by_token(dtype, window):
    lengths = (130, 20, 259, 1, 520)
    q, k, v = inputs(lengths, (4, 2, 32), dtype)
    engine = Engine(q, k, v, lengths, block_size=32, window=window)
    engine.step({0: 126, 2: 120, 4: 490})
    while left := [i for i in range(5) if engine.done[i] < lengths[i]]:
        engine.step(dict.fromkeys(left, 1))
    assert torch.equal(engine.out, whole(q, k, v, lengths, window))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_long_sequence(dtype):
    lengths = (1500, 3)
    q, k, v = inputs(lengths, (4, 2, 32), dtype)
    packed = whole(q, k, v, lengths)
    doubles = [x.double() for x in (q, k, v)]
    assert_close(packed, reference(*doubles, lengths, None).to(dtype), **value_tolerance(dtype, 32))
    for chunks in ((2000,), (256,), (700, 64)):
        engine = Engine(q, k, v, lengths, block_size=128, window=None)
        assert torch.equal(engine.run(chunks), packed), chunks
    assert torch.equal(whole(q[:1023], k[:1023], v[:1023], (1023,)), packed[:1023])
    engine = Engine(q, k, v, lengths, block_size=128, window=600)  # steps begin at later keys than the whole
    assert torch.equal(engine.run((300, 40, 1)), whole(q, k, v, lengths, 600))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_thread_count_does_not_matter(dtype):
    q, k, v = inputs(LENGTHS, (14, 2, 64), dtype)
    results = []
    for count in (1, 2):
        with threads(count):
            results += [whole(q, k, v, LENGTHS), Engine(q, k, v, LENGTHS, block_size=32, window=None).run((1, 70, 9))]
    assert all(torch.equal(result, results[0]) for result in results)


def test_order_and_neighbours_do_not_matter():
    q, k, v = inputs(LENGTHS, (4, 2, 32))
    packed, parts = whole(q, k, v, LENGTHS), spans(LENGTHS)
    for order in (range(8, -1, -1), (3, 8, 0)):
        rows = torch.cat([torch.arange(parts[i].start, parts[i].stop) for i in order])
        assert torch.equal(whole(q[rows], k[rows], v[rows], [LENGTHS[i] for i in order]), packed[rows])
    k[parts[4]], v[parts[4]] = torch.nan, torch.inf
    rows = torch.cat([torch.arange(parts[i].start, parts[i].stop) for i in range(9) if i != 4])
    assert torch.equal(whole(q, k, v, LENGTHS)[rows], packed[rows])


def test_blocks_are_cut_anywhere(monkeypatch):
    q, k, v = inputs(LENGTHS, (4, 2, 32))
    packed = whole(q, k, v, LENGTHS)
    monkeypatch.setattr(importlib.import_module("rz.ops.attention_plan"), "BLOCK_SCORES", 1)
    assert torch.equal(whole(q, k, v, LENGTHS), packed)
    assert torch.equal(Engine(q, k, v, LENGTHS, block_size=32, window=None).run((1, 9)), packed)


def test_layers_of_several_windows_share_a_plan():
    q, k, v = inputs(LENGTHS, (4, 2, 32))
    engine = Engine(q, k, v, LENGTHS, block_size=32, window=None)
    engine.step({i: length - 1 for i, length in enumerate(LENGTHS) if length > 1})
    last = {i: 1 for i in range(len(LENGTHS))}
    engine.step(last)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    plan = engine.plan(last, (40, None, 130))
    for window in (40, None, 130):
        got = paged_attention(q[ends], engine.cache, plan, window=window)
        assert torch.equal(got, whole(q, k, v, LENGTHS, window)[ends]), window


def test_what_lies_before_the_window_is_not_read():  # an engine frees those blocks: their table entries are block 0
    lengths, window = (300, 200), 40
    q, k, v = inputs(lengths, (4, 2, 32))
    engine = Engine(q, k, v, lengths, block_size=32, window=window)
    engine.step({0: 299, 1: 199})
    engine.table[0, : (299 - 39) // 32] = 0
    engine.table[1, : (199 - 39) // 32] = 0
    engine.step({0: 1, 1: 1})
    ends = torch.tensor([299, 499])
    assert torch.equal(engine.out[ends], whole(q, k, v, lengths, window)[ends])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_run_is_filled_with_zeros_when_its_first_slot_is_written(dtype):
    # Block 1 of two heads, four runs of 32 slots: the last two slots of its run 0, then the first two of run 1.
    cache = torch.full((2, 2, 128, 8), torch.nan, dtype=dtype)
    k, v = normal(4, 2, 4, dtype=dtype), normal(4, 2, 4, dtype=dtype, seed=1)
    write_cache(cache, k, v, torch.arange(158, 162))
    assert torch.equal(cache[1, :, 30:34, :4], k.transpose(0, 1)) and torch.equal(
        cache[1, :, 30:34, 4:], v.transpose(0, 1)
    )
    assert not cache[1, :, 34:64].any()
    assert cache[0].isnan().all() and cache[1, :, :30].isnan().all() and cache[1, :, 64:].isnan().all()
    write_cache(cache, k[:1], v[:1], torch.tensor([162]))
    assert torch.equal(cache[1, :, 30:34], torch.cat((k, v), -1).transpose(0, 1)) and torch.equal(
        cache[1, :, 34, :4], k[0]
    )


def test_scores_of_any_size():  # differences of 1,000 between scores; equal keys give the mean of the values
    q, k, v = inputs((200,), (2, 1, 16))
    out = whole(100 * q, 100 * k, v, (200,))
    assert_close(out, reference(*(x.double() for x in (100 * q, 100 * k, v)), (200,), None).float())
    assert_close(whole(q, 0 * k, v, (200,))[-1, 0], v.mean(0)[0])


@pytest.mark.parametrize("length", [64, 200])
def test_gradients_at_scores_of_any_size(length):
    arguments = [x * scale for x, scale in zip(inputs((length,), (2, 1, 16)), (100, 100, 1), strict=True)]
    above = normal(*arguments[0].shape, seed=7)
    loss = lambda *args: (whole(*args, (length,)) * above).sum()
    exact = lambda *args: (reference(*args, (length,), None) * above.double()).sum()
    wanted = torch.func.grad(exact, argnums=(0, 1, 2))(*(x.double() for x in arguments))
    for got, want in zip(torch.func.grad(loss, argnums=(0, 1, 2))(*arguments), wanted, strict=True):
        assert (got - want).abs().max() < 0.02 * want.abs().max()  # scores of 10^4 have a step of 10^-3


@pytest.mark.parametrize("window", [None, 40])
def test_a_shared_prefix_changes_no_bit_and_its_gradients_add_up(window):
    prefix, ends = 130, (1, 70, 200)
    q, k, v = inputs((prefix, 9, *ends), (4, 2, 32))
    own = [slice(prefix + 9 + sum(ends[:i]), prefix + 9 + sum(ends[: i + 1])) for i in range(3)]
    rows = torch.cat(
        [torch.arange(prefix + 9), *(torch.cat([torch.arange(prefix), torch.arange(x.start, x.stop)]) for x in own)]
    )
    lengths = (prefix, 9, *(prefix + end for end in ends))
    packed = WholeSequences((prefix, 9, *ends), (None, None, 0, 0, 0))
    shared = packed.attend(0, q, k, v, window=window)
    place = [prefix + 9 + prefix * (i + 1) + sum(ends[:i]) for i in range(3)]
    answers = torch.cat([torch.arange(prefix + 9), *(torch.arange(a, a + n) for a, n in zip(place, ends, strict=True))])
    assert torch.equal(shared, whole(q[rows], k[rows], v[rows], lengths, window)[answers])
    above = normal(*shared.shape, seed=7)
    arguments = [x.double() for x in (q, k, v)]
    loss = lambda *args: (packed.attend(0, *args, window=window) * above).sum()
    exact = lambda *args: (reference(*(x[rows] for x in args), lengths, window)[answers] * above.double()).sum()
    grads = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    for grad, want in zip(grads, torch.func.grad(exact, argnums=(0, 1, 2))(*arguments), strict=True):
        assert_close(grad, want.float(), rtol=1e-4, atol=1e-4)


@st.composite
def shared(draw):
    """Lengths, and prefixes in any order: each sequence follows another, which has none, or none itself."""
    lengths = draw(st.lists(st.sampled_from([1, 2, 9, 10, 30, 46, 50, 96, 150]), min_size=2, max_size=6))
    roots = sorted(draw(st.sets(st.sampled_from(range(len(lengths))), min_size=1)))
    return lengths, [None if i in roots else draw(st.sampled_from([None, *roots])) for i in range(len(lengths))]


@example(([1, 1], [1, None]))
@example(([96, 50, 46], [None, None, 1]))
@example(([10, 50, 50, 10], [None, 0, None, 2]))
@settings(max_examples=40, deadline=None)
@given(shared())
def test_gradients_of_shared_prefixes_in_any_order(packing):
    lengths, prefixes = packing
    own = [torch.arange(span.start, span.stop) for span in spans(lengths)]
    whole_rows = [rows if p is None else torch.cat((own[p], rows)) for rows, p in zip(own, prefixes, strict=True)]
    ends = torch.tensor([len(rows) for rows in whole_rows]).cumsum(0).tolist()
    answers = torch.cat([torch.arange(end - len(rows), end) for end, rows in zip(ends, own, strict=True)])
    q, k, v = inputs(lengths, (4, 2, 16))
    above, packed = normal(*q.shape, seed=7), WholeSequences(lengths, prefixes)
    loss = lambda *args: (packed.attend(0, *args, window=None) * above).sum()
    unpacked = lambda x: x[torch.cat(whole_rows)]
    counts = [len(rows) for rows in whole_rows]
    exact = lambda *args: (reference(*map(unpacked, args), counts, None)[answers] * above.double()).sum()
    wanted = torch.func.grad(exact, argnums=(0, 1, 2))(*(x.double() for x in (q, k, v)))
    for grad, want in zip(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), wanted, strict=True):
        assert_close(grad, want.float(), rtol=1e-4, atol=1e-4)


def test_errors_name_argument_rule_and_value():
    q, k, v = inputs((3, 2), (4, 2, 32))
    with pytest.raises(ValueError, match=r"lengths must be at least one, each >= 1, got \[\]"):
        WholeSequences([])
    with pytest.raises(ValueError, match=r"lengths must be at least one, each >= 1, got \[3, 0\]"):
        WholeSequences([3, 0])
    with pytest.raises(ValueError, match=r"prefixes must be one a sequence \(2\), got 1"):
        WholeSequences([3, 1], [None])
    for prefixes in ([None, 2], [1, 0], [0, None]):
        with pytest.raises(ValueError, match=r"prefixes must be sequences without a prefix, got"):
            WholeSequences([3, 1], prefixes)
    with pytest.raises(ValueError, match=r"q must have 4 tokens, got 5"):
        whole(q, k, v, (3, 1))
    with pytest.raises(ValueError, match=r"heads must be a multiple of kv_heads 3, got 4"):
        whole(q, normal(5, 3, 32), normal(5, 3, 32), (3, 2))
    with pytest.raises(ValueError, match=r"block_size must be a multiple of 32, got 48"):
        Engine(q, k, v, (3, 2), block_size=48, window=None).step({0: 1})
    with pytest.raises(ValueError, match=r"block_size must be a multiple of 32, got 16"):
        Engine(q, k, v, (3, 2), block_size=16, window=None).plan({0: 1})
    with pytest.raises(ValueError, match=r"query length must be in \[0, 3\] of sequence 1, got 4"):
        make_plan(
            [1, 4],
            [2, 3],
            heads=1,
            kv_heads=1,
            windows=(None,),
            key_runs=lambda *_: None,
            short_queries=64,
            dtype=F32,
            row_quantum=16,
        )
