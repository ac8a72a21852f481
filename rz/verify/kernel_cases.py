"""One launch of every kernel with every tile of a device class, over tensors without memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rz.ops import (
    tiles,
    triton_attention,
    triton_experts,
    triton_linear,
    triton_logprobs,
    triton_rms_norm,
    triton_rope,
    triton_swiglu,
    triton_whole,
)
from rz.ops.launch import Launch
from rz.ops.triton_attention import KernelPlan, Keys

Cases = Iterator[tuple[str, Launch]]
ROWS = 100  # of tokens; no kernel is specialised by it
WIDE, SMALL, ODD = tiles.WIDE_COLUMNS, 1024, 1000  # ODD is no multiple of a tile
VOCABULARY, EXPERTS = 151936, 128


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _singles(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.float32)


def _products(target: str) -> Cases:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for size in (WIDE, SMALL) if dtype != torch.float32 else (WIDE,):
            x, weight = _empty(ROWS, size, dtype=dtype), _empty(size, size, dtype=dtype)
            make = lambda *tensors, **how: triton_linear.gemm_launch(*tensors, target=target, **how)  # noqa: B023
            yield f"{size}", make(x, weight, _empty(size, dtype=dtype), x)
            if dtype != torch.float16:
                yield f"{size} to x", make(x, weight, None, x, b_transposed=True)
                yield f"{size} to weight", make(x, x, None, weight, a_transposed=True, b_transposed=True)
    x, weight = _empty(ROWS, ODD), _empty(SMALL, ODD)
    yield f"{SMALL} of {ODD}", triton_linear.gemm_launch(x, weight, None, _empty(ROWS, SMALL), target=target)


def _experts(target: str) -> Cases:
    for size in (WIDE, SMALL):
        x, weight, ends, places = _empty(ROWS, size), _empty(EXPERTS, size, size), _ints(EXPERTS), (_ints(9), _ints(9))
        source = _empty(ROWS, dtype=torch.int64)
        for name, transposed in ((f"{size}", False), (f"{size} to x", True)):
            yield (
                name,
                triton_experts.product_launch(x, source, weight, ends, places, x, transposed=transposed, target=target),
            )
        yield f"{size} to weight", triton_experts.outer_launch(x, x, ends, weight, target=target)
    slots, gates = _empty(ROWS, 8, dtype=torch.int64), _singles(ROWS, 8)
    yield f"{WIDE}", triton_experts.combine_launch(_empty(ROWS, WIDE), slots, gates, _empty(ROWS, WIDE))


def _rows() -> Cases:
    for dtype, width in ((torch.bfloat16, WIDE), (torch.bfloat16, 128), (torch.float32, SMALL)):
        x, weight, scale = _empty(ROWS, width, dtype=dtype), _empty(width, dtype=dtype), _singles(ROWS)
        yield f"{width}", triton_rms_norm.forward_launch(x, None, weight, None, x, scale, eps=1e-6)
        yield f"{width} after a sum", triton_rms_norm.forward_launch(x, x, weight, x, x, scale, eps=1e-6)
        yield f"{width}", triton_rms_norm.backward_launch(x, x, weight, scale, x, x, _singles(256, width))
    x, table = _empty(ROWS, 32, 128), _singles(ROWS, 64)
    yield "32 heads of 128", triton_rope.rope_launch(x, table, table, x, backward=False)
    gated, plain = _empty(ROWS, 2 * WIDE), _empty(ROWS, WIDE)
    yield f"{WIDE}", triton_swiglu.forward_launch(gated, plain)
    yield f"{WIDE}", triton_swiglu.backward_launch(plain, gated, gated)
    row, targets = _singles(ROWS), _empty(ROWS, dtype=torch.int64)
    logits = _empty(ROWS, VOCABULARY)
    made = triton_logprobs.launches(
        logits, row, row, row, every=_singles(ROWS, VOCABULARY), targets=targets, chosen=row, grad=row
    )
    for launch in made.values():
        yield f"{VOCABULARY}", launch


def _attention(target: str) -> Cases:
    plan = KernelPlan(
        query_starts=_ints(5), key_counts=_ints(4), table=_ints(4, 9), page_size=16, tokens=ROWS, most_keys=4096
    )
    places, heads, kv_heads = (_ints(9), _ints(4)), 32, 8
    for dtype, width, window, sinks in (
        *((dtype, width, None, False) for dtype in (torch.bfloat16, torch.float32) for width in (64, 128, 256)),
        (torch.float16, 128, None, False),
        (torch.bfloat16, 96, 1024, True),
    ):
        q, lse = _empty(ROWS, heads, width, dtype=dtype), _singles(ROWS, heads)
        k = _empty(ROWS, kv_heads, width, dtype=dtype)
        keys = Keys(k=k, v=k, page_rows=8, position_rows=8, head_rows=1)
        name = f"heads of {width}" + (f", window {window}, sinks" if sinks else "")
        attend, combine = triton_attention.attention_launches(
            q,
            keys,
            kv_heads,
            plan,
            places,
            _singles(heads) if sinks else None,
            q,
            lse,
            window=window,
            target=target,
        )
        yield name, attend
        if dtype == torch.bfloat16:
            yield name, combine
        if dtype != torch.float16:
            for launch in triton_whole.backward_launches(
                q, k, k, q, lse, lse, plan, (places, places), (q, k, k), window=window, target=target
            ):
                yield name, launch


def kernel_cases(target: str) -> Cases:
    """(what is special about it, launch) of a device class of rz.ops.tiles."""
    yield from _products(target)
    yield from _experts(target)
    yield from _rows()
    yield from _attention(target)
