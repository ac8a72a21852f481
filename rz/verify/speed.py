"""Speed of the kernels on the device that is there, against the vendor's library and torch's own attention."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rz.ops import WholeSequences, linear, paged_attention, paged_plan

REPEATS = 20


def milliseconds(work: Callable[[], Tensor]) -> float:
    """The median of REPEATS runs, after three that do not count."""
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[REPEATS // 2]


def product_speed(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Of x [rows, inputs] times a weight; ratio > 1: rz is faster."""
    x = torch.randn(rows, shape[0], dtype=dtype, device=device)
    weight = torch.randn(shape[1], shape[0], dtype=dtype, device=device)
    ours, theirs = milliseconds(lambda: linear(x, weight)), milliseconds(lambda: F.linear(x, weight))
    teraflops = 2 * rows * shape[0] * shape[1] / ours / 1e9
    return {"rz_ms": ours, "library_ms": theirs, "ratio": theirs / ours, "rz_tflops": teraflops}


def prefill_speed(
    length: int, sequences: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Causal attention of whole sequences, against scaled_dot_product_attention with grouped heads."""
    count, kv_count, width = heads
    make = lambda number: torch.randn(sequences * length, number, width, dtype=dtype, device=device)
    q, k, v = make(count), make(kv_count), make(kv_count)
    past = WholeSequences([length] * sequences)
    apart = [x.view(sequences, length, -1, width).transpose(1, 2) for x in (q, k, v)]
    ours = milliseconds(lambda: past.attend(0, q, k, v, window=None))
    theirs = milliseconds(lambda: F.scaled_dot_product_attention(*apart, is_causal=True, enable_gqa=True))
    return {"rz_ms": ours, "sdpa_ms": theirs, "ratio": theirs / ours}


def decode_speed(
    length: int, sequences: int, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """One token a sequence over a paged cache, and the share of it that reading the cache once would take at the
    bandwidth of a device copy."""
    count, kv_count, width = heads
    block = 16
    blocks = -(-length // block)
    cache = torch.randn(sequences * blocks, kv_count, block, 2 * width, dtype=dtype, device=device)
    table = torch.randperm(sequences * blocks, device=device).view(sequences, blocks)
    plan = paged_plan(
        [1] * sequences,
        [length] * sequences,
        table,
        block_size=block,
        heads=count,
        kv_heads=kv_count,
        windows=(None,),
        head_dim=width,
        dtype=dtype,
    )
    q = torch.randn(sequences, count, width, dtype=dtype, device=device)
    other = torch.empty_like(cache)
    copy = milliseconds(lambda: other.copy_(cache)) / 2  # a copy reads and writes
    ours = milliseconds(lambda: paged_attention(q, cache, plan, window=None))
    return {"rz_ms": ours, "cache_read_ms": copy, "ratio": copy / ours}
