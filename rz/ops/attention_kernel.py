"""Attention of rows to keys on processors, computed only in ways in which a row's bits are its own.

With AVX-512 torch's fused kernel computes it. In float32 its products keep their order up to TILE keys, so that longer
sequences are cut into tiles, whose partial results are combined here in ascending order. How many that are depends on
the processor's maker, for MKL has other kernels for each. In bfloat16 they keep it at any length, and the kernel itself
combines runs of SPLIT keys. Processors without AVX-512 take batched products.
In all of them the numbers of rows and keys must be padded, and rz.ops.probe checks that this is enough.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FUSED = torch.backends.cpu.get_cpu_capability() == "AVX512"  # ATEN_CPU_CAPABILITY=avx2 takes the products instead
SPLIT = 512  # keys that the kernel takes at once: where a call in bfloat16 may begin
KEY_QUANTUM = 32  # and keys to one of this: bfloat16 products sum pairs of 16
LOWEST = -3.0e38  # stands for the log-sum-exp of no scores


def maker(cpuinfo: str) -> str:
    """The vendor_id of the text of /proc/cpuinfo; empty if it has none."""
    found = (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("vendor_id"))
    return next(found, "")


def tile(maker: str, *, fused: bool) -> int:
    """Keys of one call in float32: the most that a sum runs over before MKL cuts it, where that was measured."""
    return {"GenuineIntel": 256, "AuthenticAMD": 192}.get(maker, 128) if fused else 128


_CPUINFO = Path("/proc/cpuinfo")
MAKER = maker(_CPUINFO.read_text(encoding="utf-8") if _CPUINFO.exists() else "")
TILE = tile(MAKER, fused=FUSED)


def up(value: int, quantum: int) -> int:
    """The least multiple of quantum that is >= value."""
    return -(-value // quantum) * quantum


def compute_dtype(dtype: torch.dtype, width: int) -> torch.dtype:
    """bfloat16 for bfloat16 heads of width [D] if the processor has AMX, where it was measured, and sums no odd rest;
    else float32. A pure function of the machine: learner and engine take the same."""
    narrow = dtype == torch.bfloat16 and width % KEY_QUANTUM == 0
    return torch.bfloat16 if narrow and FUSED and torch.cpu._is_amx_tile_supported() else torch.float32


def row_quantum(width: int) -> int:
    """To a multiple of how many the rows of heads of width [D] are padded: products of fewer take another order."""
    if FUSED and MAKER == "AuthenticAMD":
        return 4
    return 8 if FUSED and width <= 128 else 16


def fused(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention of all rows to all keys, scaled by D**-0.5.

    Args:
        queries: [I, H, R, D], keys and values: [I, Hk, K, D], same dtype; any strides but the last. Head h reads
            kv head h // (H // Hk).
        mask: [I or 1, 1, R or 1, K] in that dtype, 0 or -inf, added to the scores.
        causal: row i sees the keys up to i, rows from K on see all; then without mask.
    Returns: [I, H, R, D] of memory [I, R, H, D], and the log-sum-exp [I, H, R] float32. A row that sees no key gives 0
        and 0.
    """
    if not FUSED:
        return _products(queries, keys, values, _causal_mask(queries, keys) if causal else mask)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, causal, attn_mask=mask, scale=queries.shape[-1] ** -0.5
    )


def _causal_mask(queries: Tensor, keys: Tensor) -> Tensor:
    places = torch.arange(queries.shape[2])[:, None]
    return additive(masked_keys(places, torch.arange(keys.shape[2]), None), queries.dtype)[None, None]


def _products(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    items, heads, rows, width = queries.shape
    if heads > keys.shape[1]:
        keys, values = (x.repeat_interleave(heads // x.shape[1], 1) for x in (keys, values))
    queries, keys, values = (x.flatten(0, 1).contiguous() for x in (queries, keys, values))
    scores = torch.bmm(queries * width**-0.5, keys.transpose(1, 2)).unflatten(0, (items, heads))
    if mask is not None:
        scores += mask
    top = scores.amax(-1, keepdim=True).clamp_(min=LOWEST)
    weights = scores.sub_(top).exp_().flatten(0, 1)
    # A product with ones, not a sum over the last axis: the sum's order depends on how many keys are padded.
    total = torch.mm(weights.flatten(0, 1), weights.new_ones(weights.shape[-1], 16))[:, :1].view_as(top)
    none = total == 0
    total = total.masked_fill_(none, 1)
    out = torch.bmm(weights, values).view(items, heads, rows, -1) / total
    lse = (top + total.log()).masked_fill_(none, 0)[..., 0]
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse


def first_tile(new: tuple[Tensor, Tensor], empty: Tensor | None) -> tuple[Tensor, Tensor]:
    """State that add_tile takes, of the result of fused for a sequence's first keys; empty as there."""
    out, lse = new
    return out, lse if empty is None else lse.masked_fill(empty, LOWEST)


def add_tile(state: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], empty: Tensor | None) -> None:
    """Combine float32 state, in place, with the result of fused for the same rows and later keys.

    empty: bool, broadcast over [I, H, R]: rows that see none of these keys, to which nothing is added; None = none.
    """
    (out, lse), (more, more_lse) = state, new
    if empty is not None:
        more_lse = more_lse.masked_fill(empty, LOWEST)
    top = torch.maximum(lse, more_lse)
    keep, add = (lse - top).exp_(), (more_lse - top).exp_()
    total = keep + add
    out.mul_(keep.div_(total)[..., None]).add_(more * add.div_(total)[..., None])
    lse.copy_(top.add_(total.log_()))


def additive(masked: Tensor, dtype: torch.dtype) -> Tensor:
    """masked bool, True = no attention -> -inf there, else 0."""
    return torch.zeros(masked.shape, dtype=dtype).masked_fill_(masked, -torch.inf)


def masked_keys(positions: Any, keys: Any, window: int | None) -> Any:
    """positions [..., R, 1] of queries, keys [K] positions, tensors or arrays -> [..., R, K] bool, True = not seen."""
    masked = keys > positions
    return masked if window is None else masked | (keys <= positions - window)


def _part(
    queries: Tensor, keys: Tensor, values: Tensor, position: int, first_key: int, window: int | None
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """Rows at positions from `position` on and keys from `first_key` on: the kernel's result and the rows it left."""
    rows, count = queries.shape[2], keys.shape[2]
    if window is None and position == first_key and rows >= count:
        return fused(queries, keys, values, causal=True), None
    if window is None and position >= first_key + count - 1:
        return fused(queries, keys, values), None
    place = torch.arange(position, position + rows)[:, None]
    masked = masked_keys(place, torch.arange(first_key, first_key + count), window)
    empty = masked.all(-1)
    return fused(queries, keys, values, additive(masked, queries.dtype)[None, None]), empty


def causal_attention(
    queries: Tensor, keys: Tensor, values: Tensor, *, first: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of the rows at positions first, first + 1, ... to the keys at 0, 1, ... of their sequences.

    Args:
        queries: [I, H, R, D] float32 or bfloat16.  keys, values: [I, Hk, first + R, D]; both a multiple of KEY_QUANTUM.
        window: None, or the number of latest keys seen, the own included.
    Returns: [I, H, R, D] in the dtype of queries, and the log-sum-exp [I, H, R] float32.
    """
    count = keys.shape[2]
    if count <= TILE or queries.dtype != torch.float32:
        return _part(queries, keys, values, first, 0, window)[0]
    state = None
    for start in range(0, count, TILE):
        end, low = min(start + TILE, count), max(start, first)
        # A causal call answers the rows after the tile too, which see all of its keys.
        bounds = (low, count) if window is None and low == start else (low, end, max(end, first), count)
        parts = []
        for low, high in zip(bounds[::2], bounds[1::2], strict=True):
            if low < high:
                rows = slice(low - first, high - first)
                tile = keys[:, :, start:end], values[:, :, start:end]
                parts.append((rows, *_part(queries[:, :, rows], *tile, low, start, window)))
        if state is None:
            states = [first_tile(new, empty) for _, new, empty in parts]
            state = states[0] if len(states) == 1 else tuple(torch.cat(x, 2) for x in zip(*states, strict=True))
        else:
            for rows, new, empty in parts:
                add_tile(tuple(x[:, :, rows] for x in state), new, empty)
    return state
