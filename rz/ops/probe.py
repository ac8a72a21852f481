"""Does this machine have the properties that the aligned operations rely on?

How a matrix product or a sum is ordered is a choice of the processor's libraries: it may change with the number of
rows, columns or threads, or with the place in memory. Each check computes the same rows in several ways and compares
bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from rz.ops.attention import WholeSequences, paged_attention, paged_plan, write_cache
from rz.ops.attention_kernel import (
    KEY_QUANTUM,
    SPLIT,
    TILE,
    additive,
    compute_dtype,
    fused,
    masked_keys,
    row_quantum,
)
from rz.ops.linear import MIN_ROWS, linear
from rz.ops.logprobs import tempered_logprobs, token_logprobs
from rz.ops.rms_norm import head_rms_norm, rms_norm
from rz.ops.rope import inverse_frequencies, rope, rope_tables
from rz.ops.swiglu import swiglu

ROWS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65)
MANY_ROWS = (257, 1000)
SHAPES = ((64, 64), (64, 192), (33, 65), (128, 96))  # inputs, outputs
FEW_OUTPUTS = (1, 2, 4, 8, 20)
WORK = 1 << 30  # multiplications and additions that one shape may cost
VALUES = (1, 3, 7, 8, 15, 16, 31, 33, 100, 999)  # lengths of vectors

Cases = Iterable[tuple[str, Tensor, Tensor]]


@attrs.frozen(kw_only=True)
class ProbeResult:
    """One property. detail says what was compared, or where the first difference is."""

    name: str
    passed: bool
    detail: str


def _result(name: str, cases: Cases) -> ProbeResult:
    compared = 0
    for case, got, expected in cases:
        if not torch.equal(got, expected):
            wrong = (got != expected).flatten(1).any(-1)
            most = (got.double() - expected.double()).abs().max().item()
            detail = f"{case}: {int(wrong.sum())} of {len(wrong)} rows differ, by up to {most:.1e}"
            return ProbeResult(name=name, passed=False, detail=detail)
        compared += len(got)
    return ProbeResult(name=name, passed=True, detail=f"{compared} rows equal")


def _parts(op: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int] = ROWS) -> Cases:
    """The rows of op(x) when fewer rows, other rows, or the same rows in another order are passed."""
    whole = op(x)
    for rows in counts:
        for start in sorted({0, 1, len(x) - rows}):
            yield f"rows {start} to {start + rows} alone", op(x[start : start + rows]), whole[start : start + rows]
    order = torch.arange(len(x)).flip(0).roll(5)
    yield "in another order", op(x[order]), whole[order]
    yield "from transposed memory", op(x.transpose(0, 1).contiguous().transpose(0, 1)), whole


@attrs.frozen(kw_only=True, eq=False)
class _Inputs:
    """Random inputs of one probe, drawn from a generator of its own."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape).normal_(generator=self.generator).to(dtype or self.dtype)

    def factors(self, *shape: int) -> Tensor:
        """Left sides of products, in the dtype that the product is taken in: rounding would hide most differences."""
        return self.normal(*shape, dtype=self.weight_dtype)

    def wide(self, *shape: int) -> Tensor:
        """For what computes in float32 whatever its dtype."""
        return self.normal(*shape, dtype=torch.float32)

    def weight(self, width: int, outputs: int) -> Tensor:
        return (self.wide(outputs, width) * width**-0.5).to(self.dtype).to(self.weight_dtype)


def _linear(inputs: _Inputs, width: int, outputs: int) -> Cases:
    counts = [1, 3, 16]
    for more in (ROWS, (*ROWS, *MANY_ROWS)):
        if 2 * outputs * width * 3 * (sum(more) + more[-1]) <= WORK:
            counts = list(more)
    weight, x = inputs.weight(width, outputs), inputs.factors(counts[-1] + 8, width)
    yield from _parts(lambda x: linear(x, weight), x, counts)


def _few_outputs(inputs: _Inputs) -> Cases:
    for width in (33, 64):  # rows of 33 lie at any distance from a vector boundary
        x = inputs.factors(1024, width)
        for outputs in FEW_OUTPUTS:
            weight = inputs.weight(width, outputs)
            whole = linear(x, weight)
            yield f"{outputs} outputs, in another order", linear(x.flip(0), weight).flip(0), whole
            for rows in (MIN_ROWS, 41, 128):
                case = f"{outputs} outputs, {rows} rows at a time"
                yield case, torch.cat([linear(part, weight) for part in x.split(rows)]), whole


def _fused_rows(inputs: _Inputs, head_dim: int) -> Cases:
    """What each row of the attention kernel gives, output beside log-sum-exp, in calls of other rows and items."""
    dtype, count = compute_dtype(inputs.dtype, head_dim), TILE
    x = inputs.wide(3, count, 3, 3, head_dim).to(dtype).unbind(3)  # memory as the learner has it
    q, k, v = (part.transpose(1, 2) for part in x)
    answer = lambda *arguments, **more: torch.cat([part.float() for part in _columns(arguments, more)], -1)
    mask = additive(masked_keys(torch.arange(count)[:, None], torch.arange(count), None), dtype)[None, None]
    whole = answer(q, k, v, causal=True)
    yield "causal and masked", answer(q, k, v, mask).flatten(0, 2), whole.flatten(0, 2)
    quantum = row_quantum(head_dim)
    for rows in range(quantum, count, quantum):
        for start in sorted({0, quantum, count - rows}):
            part = slice(start, min(start + rows, count))
            got = answer(*(y[1:2, 1:2].contiguous() for y in (q[:, :, part], k, v)), mask[:, :, part])
            yield f"{rows} rows from {start} of one item", got[0, 0], whole[1, 1, part]


def _columns(arguments: Sequence[Tensor], more: Mapping[str, bool]) -> tuple[Tensor, Tensor]:
    out, lse = fused(*arguments, **more)
    return out, lse[..., None]


def _fused_keys(inputs: _Inputs, head_dim: int) -> Cases:
    """The same rows beside fewer or more keys that they do not see."""
    dtype = compute_dtype(inputs.dtype, head_dim)
    count = TILE if dtype == torch.float32 else 2 * SPLIT + 2 * TILE
    q, k, v = (inputs.wide(2, 2, rows, head_dim).to(dtype) for rows in (row_quantum(head_dim), count, count))
    for keys in range(KEY_QUANTUM, count, KEY_QUANTUM):
        for live in (keys, keys - KEY_QUANTUM + 1):
            mask = additive(torch.arange(count) >= live, dtype)[None, None, None]
            both = torch.cat([k[:, :, :keys], v[:, :, :keys]], -1)  # memory as the cache has it
            got = _columns((q, both[..., :head_dim], both[..., head_dim:], mask[..., :keys].contiguous()), {})
            whole = _columns((q, k, v, mask.contiguous()), {})
            for name, part, full in zip(("output", "log-sum-exp"), got, whole, strict=True):
                yield f"{name} of {live} keys, padded to {keys} and to {count}", part.flatten(0, 2), full.flatten(0, 2)


def _functions(inputs: _Inputs) -> Cases:
    x = inputs.wide(1024)
    for name, domain in (("exp", x * 10), ("rsqrt", x.exp()), ("cos", x * 1e4), ("sin", x * 1e4), ("log", x.exp())):
        function = getattr(torch, name)
        whole = function(domain)
        for count in VALUES:
            for start in (0, 1, 24):
                part = slice(start, start + count)
                yield f"{name} of {count} values from {start}", function(domain[part])[:, None], whole[part, None]


def _log_softmax(inputs: _Inputs, vocabulary: int) -> Cases:
    yield from _parts(lambda x: tempered_logprobs(x, temperature=0.7), inputs.wide(20, vocabulary), (1, 2, 3, 16))


def _token_logprobs(inputs: _Inputs) -> Cases:
    hidden, head = inputs.normal(80, 64), inputs.weight(64, 100)
    targets = torch.arange(80)
    whole = tempered_logprobs(linear(hidden, head), temperature=0.7).gather(1, targets[:, None])
    for rows in ROWS:
        got = token_logprobs(hidden[:rows], head, targets[:rows], temperature=0.7)
        yield f"{rows} rows", got[:, None], whole[:rows]


def _rope(inputs: _Inputs, head_dim: int) -> Cases:
    frequencies, factor = inverse_frequencies(head_dim, theta=1e6, scaling=None, max_position=1 << 15)
    x, positions = inputs.normal(80, 3, head_dim), torch.arange(80) * 409
    whole = rope(x, *rope_tables(positions, frequencies, factor))
    for rows in ROWS:
        for part in (slice(0, rows), slice(80 - rows, 80)):
            yield f"{rows} rows", rope(x[part], *rope_tables(positions[part], frequencies, factor)), whole[part]


def _rounds(lengths: Sequence[int], chunks: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Steps of an engine: (sequence, tokens done, tokens of this step) of those that are not finished."""
    done = [0] * len(lengths)
    while any(left := [length - before for length, before in zip(lengths, done, strict=True)]):
        step = [(i, done[i], min(chunks[(i + done[i]) % len(chunks)], left[i])) for i in range(len(left)) if left[i]]
        yield step
        for sequence, _, tokens in step:
            done[sequence] += tokens


def _paged(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], chunks: Sequence[int], window: int | None
) -> Tensor:
    """Attention of packed sequences as an engine computes it: step by step, over a cache that was full of NaN."""
    size, blocks = 32, [-(-length // 32) for length in lengths]
    cache = q.new_full((sum(blocks) + 1, k.shape[1], size, 2 * k.shape[2]), torch.nan)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    for i, count in enumerate(blocks):
        table[i, :count] = sum(blocks) - sum(blocks[:i]) - torch.arange(count)
    out = torch.full_like(q, torch.nan)
    for step in _rounds(lengths, chunks):
        rows = torch.cat([torch.arange(starts[i] + before, starts[i] + before + count) for i, before, count in step])
        slots = [table[i, p // size] * size + p % size for i, b, count in step for p in range(b, b + count)]
        write_cache(cache, k[rows], v[rows], torch.stack(slots))
        plan = paged_plan(
            [count for _, _, count in step],
            [before + count for _, before, count in step],
            table[[i for i, _, _ in step]],
            block_size=size,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            windows=(window,),
            head_dim=q.shape[2],
            dtype=q.dtype,
        )
        out[rows] = paged_attention(q[rows], cache, plan, window=window)
    return out


def _attention(inputs: _Inputs, heads: int, kv_heads: int, head_dim: int) -> Cases:
    lengths, dtype = (1, 9, 17, 40, 64, 129, 140), compute_dtype(inputs.dtype, head_dim)
    q, k, v = (inputs.wide(sum(lengths), count, head_dim).to(dtype) for count in (heads, kv_heads, kv_heads))
    attend = lambda lengths, rows, window: WholeSequences(lengths).attend(0, q[rows], k[rows], v[rows], window=window)
    for window in (None, 40):
        whole = attend(lengths, slice(None), window)
        for i, length in enumerate(lengths):
            rows = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
            yield f"a sequence of {length} alone, window {window}", attend([length], rows, window), whole[rows]
        for name, chunks in (("prefill", (200,)), ("chunks", (5, 70, 1, 16))):
            yield f"paged {name}, window {window}", _paged(q, k, v, lengths, chunks, window), whole
    start = sum(lengths[:-2])
    late, tail = (129, 140), slice(start, None)
    yield "paged decode", _paged(q[tail], k[tail], v[tail], late, (120, 1, 1, 1), None), attend(late, tail, None)


def _threads(inputs: _Inputs, shapes: Sequence[tuple[int, int]], heads: tuple[int, int, int], counts: Sequence[int]):
    lengths = (5, 130, 40)
    q, k, v = (inputs.normal(sum(lengths), count, heads[2]) for count in (heads[0], heads[1], heads[1]))
    products = [
        ("linear {} to {}".format(*shape), inputs.factors(17, shape[0]), inputs.weight(*shape)) for shape in shapes
    ]
    rows = inputs.normal(300, 256)

    def all_ops() -> list[tuple[str, Tensor]]:
        return [
            *((name, linear(x, weight)) for name, x, weight in products),
            ("log-softmax", tempered_logprobs(rows, temperature=0.7)),
            ("rms_norm", rms_norm(rows, rows[0], eps=1e-6)),
            ("swiglu", swiglu(rows)),
            ("attention", WholeSequences(lengths).attend(0, q, k, v, window=None)),
        ]

    before = torch.get_num_threads()
    expected = all_ops()
    try:
        for count in counts:
            torch.set_num_threads(count)
            for (name, got), (_, whole) in zip(all_ops(), expected, strict=True):
                yield f"{name} with {count} threads and with {before}", got, whole
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def probe(
    dtype: torch.dtype,
    shapes: Iterable[tuple[int, int]] = (),
    *,
    attention: tuple[int, int, int] = (4, 2, 32),
    weight_dtype: torch.dtype | None = None,
    threads: Sequence[int] | None = None,
) -> tuple[ProbeResult, ...]:
    """Check on this machine, bit for bit, every property that the aligned operations need.

    Args:
        dtype: of the activations.
        shapes: (inputs, outputs) of a model's own products, beside a few small ones that are always checked.
        attention: heads, kv_heads and head_dim of the model.
        weight_dtype: of the weights of products; None = dtype.
        threads: thread counts that must agree with the present one; None = 1. The present count is restored.
    Returns: one result a property, in a fixed order.
    Edge cases: a rare difference can escape: a pass is evidence, not proof.
    """
    weight_dtype = weight_dtype or dtype
    inputs = _Inputs(dtype=dtype, weight_dtype=weight_dtype, generator=torch.Generator().manual_seed(0))
    heads, kv_heads, head_dim = attention
    shapes = list(dict.fromkeys((*SHAPES, *(tuple(shape) for shape in shapes))))
    weight = inputs.wide(192)
    head_norm = lambda x: head_rms_norm(x, (weight[:32], weight[32:64]), (2, 1), eps=1e-6)
    checks: list[tuple[str, Cases]] = [
        *(("linear {} to {}".format(*shape), _linear(inputs, *shape)) for shape in shapes),
        ("linear with few outputs", _few_outputs(inputs)),
        ("attention kernel, number of rows", _fused_rows(inputs, head_dim)),
        ("attention kernel, number of keys", _fused_keys(inputs, head_dim)),
        ("elementwise functions", _functions(inputs)),
        *((f"log-softmax over {size}", _log_softmax(inputs, size)) for size in (20, 1000, 40000)),
        ("token logprobs", _token_logprobs(inputs)),
        ("rms_norm", _parts(lambda x: rms_norm(x, weight, eps=1e-6), inputs.wide(80, 192))),
        ("rms_norm of heads", _parts(head_norm, inputs.wide(80, 3, 32))),
        ("swiglu", _parts(swiglu, inputs.wide(80, 2 * 75))),
        ("rope", _rope(inputs, head_dim)),
        (f"attention {heads}, {kv_heads}, {head_dim}", _attention(inputs, heads, kv_heads, head_dim)),
        ("number of threads", _threads(inputs, shapes, attention, (1,) if threads is None else threads)),
    ]
    return tuple(_result(name, cases) for name, cases in checks)


def require_aligned(
    dtype: torch.dtype,
    shapes: Iterable[tuple[int, int]],
    *,
    attention: tuple[int, int, int] = (4, 2, 32),
    weight_dtype: torch.dtype | None = None,
    threads: Sequence[int] | None = None,
) -> tuple[ProbeResult, ...]:
    """The results of `probe` with these arguments, if all passed.

    Raises: RuntimeError naming the first property that failed, and where.
    """
    results = probe(dtype, shapes, attention=attention, weight_dtype=weight_dtype, threads=threads)
    for result in results:
        if not result.passed:
            raise RuntimeError(
                f"this machine is not aligned in {str(dtype).removeprefix('torch.')}: {result.name}: {result.detail}"
            )
    return results
