"""Bits of every kernel on the device that is there: the same rows in every company and by every way."""

from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from rz.ops import (
    WholeSequences,
    add_rms_norm,
    combine_experts,
    expert_order,
    grouped_linear,
    linear,
    paged_attention,
    paged_plan,
    rope,
    rope_tables,
    swiglu,
    tempered_logprobs,
    token_logprobs,
    write_cache,
)
from rz.ops.probe import ProbeResult

ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 512, 1000, 1024, 2047, 2048)
SHAPES = {  # (inputs, outputs) of every product
    "Qwen3-0.6B": ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151936)),
    "Qwen3-8B": ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096), (4096, 151936)),
    "4096-wide expert": ((4096, 3072), (1536, 4096)),
}
HEADS = ((16, 8, 128), (32, 8, 128), (14, 2, 64), (8, 2, 256))  # heads, kv_heads, head_dim
LENGTHS = (1, 2, 63, 64, 65, 129, 512, 513, 1025, 2000)
BLOCK = 16  # tokens of a cache block

Pairs = Iterator[tuple[Tensor, Tensor]]


@attrs.frozen(kw_only=True)
class Bits:
    """Values compared, and how many have other bits."""

    compared: int
    differing: int


def count(pairs: Pairs) -> Bits:
    """Over (got, expected) of one shape. NaN differs from everything: nothing here may be NaN."""
    compared = differing = 0
    for got, expected in pairs:
        compared += got.numel()
        differing += int((got != expected).sum())
    return Bits(compared=compared, differing=differing)


def _normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(shape, device=device).normal_(generator=generator).to(dtype)


def _replayed(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """op(x) from a CUDA graph that was captured on other values."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    held = torch.zeros_like(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(held)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = op(held)
    held.copy_(x)
    graph.replay()
    return out


def row_pairs(op: Callable[[Tensor], Tensor], x: Tensor, rows: Sequence[int]) -> Pairs:
    """op on fewer rows, from other places, in another order and from a CUDA graph, against op on all rows."""
    whole = op(x)
    for size in rows:
        for start in sorted({0, 1, len(x) - size} & set(range(len(x) - size + 1))):
            yield op(x[start : start + size]), whole[start : start + size]
        if x.is_cuda:
            yield _replayed(op, x[:size]), whole[:size]
    order = torch.arange(len(x), device=x.device).flip(0)
    yield op(x[order]), whole[order]


def product_bits(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, rows: Sequence[int] = ROWS) -> Bits:
    """Of the product of one shape (inputs, outputs)."""
    x = _normal(max(rows), shape[0], dtype=dtype, device=device)
    weight = _normal(shape[1], shape[0], dtype=dtype, device=device, seed=1) * shape[0] ** -0.5
    return count(row_pairs(lambda x: linear(x, weight), x, rows))


def float32_error(shape: tuple[int, int], device: torch.device, rows: int = 256) -> float:
    """The largest distance of a float32 product of values near 1 from the float64 one. TF32 would give about 1e-3."""
    x = _normal(rows, shape[0], dtype=torch.float32, device=device)
    weight = _normal(shape[1], shape[0], dtype=torch.float32, device=device, seed=1) * shape[0] ** -0.5
    return float((linear(x, weight).double() - x.double() @ weight.double().t()).abs().max())


def row_op_bits(dtype: torch.dtype, device: torch.device, rows: Sequence[int] = ROWS) -> dict[str, Bits]:
    """Of norms, RoPE, SwiGLU and log-softmax; of a token's logprob against the row that it is in."""
    normal = lambda *shape, seed=0: _normal(*shape, dtype=dtype, device=device, seed=seed)
    weight, most = normal(1024), max(rows)
    cos, sin = rope_tables(torch.arange(most, device=device), torch.rand(64, device=device))

    def norm(both: Tensor) -> Tensor:
        return torch.cat(add_rms_norm(both[:, :1024].contiguous(), both[:, 1024:].contiguous(), weight, eps=1e-6), 1)

    def tokens() -> Pairs:
        hidden, head = normal(most, 256), normal(5000, 256, seed=2)
        targets = torch.arange(most, device=device)
        whole = tempered_logprobs(linear(hidden, head), temperature=0.7).gather(1, targets[:, None])[:, 0]
        for size in rows:
            yield token_logprobs(hidden[:size], head, targets[:size], temperature=0.7), whole[:size]

    def rotations() -> Pairs:
        x = normal(most, 8, 128)
        whole = rope(x, cos, sin)
        for size in rows:
            yield rope(x[-size:], cos[-size:], sin[-size:]), whole[-size:]

    return {
        "rms_norm": count(row_pairs(norm, normal(most, 2048), rows)),
        "swiglu": count(row_pairs(swiglu, normal(most, 2 * 1536), rows)),
        "rope": count(rotations()),
        "log_softmax": count(row_pairs(lambda x: tempered_logprobs(x, temperature=0.7), normal(most, 5000), rows)),
        "token_logprobs": count(tokens()),
    }


def expert_bits(dtype: torch.dtype, device: torch.device, rows: Sequence[int] = ROWS) -> Bits:
    """Of tokens that each go to 2 of 8 experts: so many of them, against all."""
    most = max(rows)
    x, weight = (_normal(*shape, dtype=dtype, device=device) for shape in ((most, 256), (8, 192, 256)))
    gates, chosen = torch.rand(most, 2, device=device), torch.rand(most, 8, device=device).argsort(-1)[:, :2]

    def layer(part: slice) -> Tensor:
        order = expert_order(chosen[part], count=8)
        return combine_experts(grouped_linear(x[part], weight, order, by_token=True), gates[part], order)

    whole = layer(slice(0, most))
    return count((layer(slice(most - size, most)), whole[most - size :]) for size in rows)


def _paged(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], last: int, window: int | None) -> Tensor:
    """The output of packed sequences by prefill of all but the last tokens, then decode of those one by one, in a
    cache that was full of NaN; the last from a CUDA graph."""
    blocks = -(-max(lengths) // BLOCK)
    shape = (len(lengths) * blocks, k.shape[1], BLOCK, 2 * k.shape[2])
    cache = torch.full(shape, torch.nan, dtype=k.dtype, device=k.device)
    table = torch.arange(len(lengths) * blocks, device=k.device).flip(0).view(len(lengths), blocks)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    out = torch.full_like(q, torch.nan)
    for step in range(last + 1):
        stops = [max(0, length - last + step) for length in lengths]
        begins = [max(0, length - last + step - 1) if step else 0 for length in lengths]
        live = [i for i in range(len(lengths)) if stops[i] > begins[i]]
        if not live:
            continue
        places = [torch.arange(begins[i], stops[i], device=k.device) for i in live]
        rows = torch.cat([starts[i] + place for i, place in zip(live, places, strict=True)])
        slots = torch.cat(
            [table[i, place // BLOCK] * BLOCK + place % BLOCK for i, place in zip(live, places, strict=True)]
        )
        write_cache(cache, k[rows], v[rows], slots)
        plan = paged_plan(
            [len(place) for place in places],
            [stops[i] for i in live],
            table[live],
            block_size=BLOCK,
            heads=q.shape[1],
            kv_heads=k.shape[1],
            windows=(window,),
            head_dim=q.shape[2],
            dtype=q.dtype,
        )
        attend = lambda x, plan=plan: paged_attention(x, cache, plan, window=window)
        out[rows] = _replayed(attend, q[rows]) if step == last and q.is_cuda else attend(q[rows])
    return out


def attention_bits(
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    window: int | None,
    lengths: Sequence[int] = LENGTHS,
    last: int = 3,
) -> Bits:
    """Each sequence alone, and prefill and decode beside each other, against all sequences in one whole pass."""
    total = sum(lengths)
    q, k, v = (
        _normal(total, number, heads[2], dtype=dtype, device=device, seed=seed)
        for seed, number in enumerate((heads[0], heads[1], heads[1]))
    )
    past = WholeSequences(lengths)
    whole = past.attend(0, q, k, v, window=window)

    def pairs() -> Pairs:
        start = 0
        for length in lengths:
            rows = slice(start, start + length)
            yield WholeSequences([length]).attend(0, q[rows], k[rows], v[rows], window=window), whole[rows]
            start += length
        yield _paged(q, k, v, lengths, last, window), whole
        if q.is_cuda:
            yield _replayed(lambda x: past.attend(0, x, k, v, window=window), q), whole

    return count(pairs())


@torch.no_grad()
def require_device_aligned(
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    device: torch.device,
    rows: Sequence[int] = (1, 16, 65, 257),
    lengths: Sequence[int] = (1, 64, 600),
) -> tuple[ProbeResult, ...]:
    """Compare bits on a device for the products and the attention of one model, on few row counts.

    Returns: one result a product or op.
    Raises: RuntimeError naming what differs.
    """
    found = {f"linear {shape[0]} to {shape[1]}": product_bits(shape, dtype, device, rows) for shape in shapes}
    found |= row_op_bits(dtype, device, rows)
    found["attention"] = attention_bits(heads, dtype, device, None, lengths)
    for name, bits in found.items():
        if bits.differing:
            raise RuntimeError(f"device is not aligned in {dtype}: {name}: {bits.differing} of {bits.compared} differ")
    return tuple(
        ProbeResult(name=name, passed=True, detail=f"{bits.compared} values equal") for name, bits in found.items()
    )
