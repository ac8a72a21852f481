"""Attention by Triton kernels: where queries and keys lie, and the two launches of a forward pass."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from rz.kernels.attention import attend, combine
from rz.ops.device import device_class
from rz.ops.launch import Launch, aligned, cdiv
from rz.ops.segments import segment_tiles
from rz.ops.tiles import attention_tile, split_keys

ONE_PAGE = 1 << 30  # a whole sequence is one page that never ends


@attrs.frozen(kw_only=True, eq=False)
class KernelPlan:
    """How N query tokens of S sequences attend; made once a forward pass, read by every layer.

    Args:
        query_starts: [S + 1] int32.
        key_counts: [S] int32; a sequence's queries are its last tokens.
        table: [S, pages] int32, page numbers.
        page_size: tokens of a page.
        tokens: N, or more where the number is padded.
        most_keys: a bound on key_counts; it fixes the launch grid, never a bit.
    """

    query_starts: Tensor
    key_counts: Tensor
    table: Tensor
    page_size: int
    tokens: int
    most_keys: int
    _made: dict[int, tuple[Tensor, Tensor]] = attrs.field(init=False, factory=dict)

    @property
    def sequences(self) -> int:
        return self.key_counts.shape[0]

    def tiles(self, tile_tokens: int) -> tuple[Tensor, Tensor]:
        """Of query tokens, as segment_tiles returns them."""
        if tile_tokens not in self._made:
            self._made[tile_tokens] = segment_tiles(self.query_starts.diff(), self.tokens, tile_tokens)
        return self._made[tile_tokens]


def whole_plan(lengths: Sequence[int], device: torch.device) -> KernelPlan:
    """Whole sequences of `lengths` tokens, packed one after the other."""
    counts = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    starts[1:] = counts.cumsum(0)
    return KernelPlan(
        query_starts=starts.to(device),
        key_counts=counts.to(device),
        table=starts[:-1, None].contiguous().to(device),
        page_size=ONE_PAGE,
        tokens=sum(lengths),
        most_keys=max(lengths),
    )


def paged_plan(
    query_lengths: Sequence[int], sequence_lengths: Sequence[int], block_table: Tensor, *, block_size: int
) -> KernelPlan:
    """As rz.ops.paged_plan."""
    for sequence, (queries, keys) in enumerate(zip(query_lengths, sequence_lengths, strict=True)):
        if not 0 <= queries <= keys:
            raise ValueError(f"query length must be in [0, {keys}] of sequence {sequence}, got {queries}")
    device = block_table.device
    starts = torch.zeros(len(query_lengths) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lengths).cumsum(0)
    return KernelPlan(
        query_starts=starts.to(device),
        key_counts=torch.tensor(sequence_lengths, dtype=torch.int32, device=device),
        table=block_table.to(torch.int32).contiguous(),
        page_size=block_size,
        tokens=int(starts[-1]),
        most_keys=max(sequence_lengths, default=1),
    )


@attrs.frozen(kw_only=True, eq=False)
class Keys:
    """Where keys and values lie, in rows of one head's width: page * page_rows + offset * position_rows + head *
    head_rows."""

    k: Tensor
    v: Tensor
    page_rows: int
    position_rows: int
    head_rows: int


def whole_keys(k: Tensor, v: Tensor) -> Keys:
    """Of packed tokens [N, Hk, D]; the page number is the first token of a sequence."""
    return Keys(k=aligned(k), v=aligned(v), page_rows=k.shape[1], position_rows=k.shape[1], head_rows=1)


def cache_keys(cache: Tensor) -> Keys:
    """Of a cache [blocks, Hk, block_size, 2 D], keys before values."""
    _, heads, size, width = cache.shape
    flat = cache.view(-1)
    return Keys(k=flat, v=flat[width // 2 :], page_rows=2 * heads * size, position_rows=2, head_rows=2 * size)


def attention_launches(
    q: Tensor,
    keys: Keys,
    kv_heads: int,
    plan: KernelPlan,
    tiles: tuple[Tensor, Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    window: int | None,
    target: str,
) -> tuple[Launch, Launch]:
    """Attend, then combine; arguments as those of `attention`, tiles from plan.tiles."""
    _, heads, width = q.shape
    tile = attention_tile(target, width, q.dtype)
    split = split_keys(target, tile)
    parts, sequences = cdiv(plan.most_keys, split), plan.sequences
    top, total = (torch.empty(parts, sequences, heads, dtype=torch.float32, device=q.device) for _ in range(2))
    part_out = torch.empty(parts, sequences, heads, width, dtype=torch.float32, device=q.device)
    shared = {
        "sinks": sinks,
        "query_starts": plan.query_starts,
        "key_counts": plan.key_counts,
        "out": out,
        "lse": lse,
        "part_top": top,
        "part_total": total,
        "part_out": part_out,
        "part_rows": sequences * heads,
    }
    constants = {"WINDOW": window or 0, "WIDTH": width, "SPLIT": split}
    padded = max(16, 1 << (width - 1).bit_length())
    first = Launch(
        kernel=attend,
        grid=(tiles[0].shape[0], kv_heads, parts),
        arguments=shared
        | {
            "q": q,
            "k": keys.k,
            "v": keys.v,
            "table": plan.table,
            "tile_sequences": tiles[0],
            "tile_starts": tiles[1],
            "scale": width**-0.5,
            "sequences": sequences,
            "table_width": plan.table.shape[1],
            "page_size": plan.page_size,
            "page_rows": keys.page_rows,
            "position_rows": keys.position_rows,
            "head_rows": keys.head_rows,
        },
        constants=constants
        | {
            "KV_HEADS": kv_heads,
            "HEAD_GROUP": heads // kv_heads,
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_D": padded,
        },
        warps=tile.warps,
        stages=tile.stages,
    )
    block = max(1, 512 // padded)
    second = Launch(
        kernel=combine,
        grid=(sequences, cdiv(heads, block)),
        arguments=shared,
        constants=constants | {"HEADS": heads, "BLOCK_H": block, "BLOCK_D": padded},
        warps=4,
        stages=1,
    )
    return first, second


def attention(
    q: Tensor, keys: Keys, kv_heads: int, plan: KernelPlan, *, window: int | None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of q [N, H, D] -> (output [N, H, D] in the dtype of q, log-sum-exp [N, H] float32).

    Args:
        keys: their dtype is that of q.
        window: None, or the number of latest tokens seen, the own included.
        sinks: None, or [H] float32, for each head a logit beside the keys whose value is 0.
    Edge cases: rows that no sequence of the plan owns are left as they are in memory.
    Raises: ValueError if kv_heads does not divide H, a group of heads is larger than a tile, D is no multiple of 8 in
        16 to 256, or window < 1; TypeError if dtypes differ.
    """
    if window is not None and window < 1:
        raise ValueError(f"window must be None or >= 1, got {window}")
    if keys.k.dtype != q.dtype or keys.v.dtype != q.dtype:
        raise TypeError(f"keys and values must be {q.dtype}, got {keys.k.dtype} and {keys.v.dtype}")
    heads, width = q.shape[1:]
    target = device_class(q.device)
    tile = attention_tile(target, width, q.dtype)
    if heads % kv_heads or heads // kv_heads > tile.m:
        raise ValueError(f"heads must be a multiple of kv_heads {kv_heads}, at most {tile.m} times it, got {heads}")
    q, sinks = aligned(q), None if sinks is None else aligned(sinks)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    tiles = plan.tiles(tile.m // (heads // kv_heads))
    for launch in attention_launches(q, keys, kv_heads, plan, tiles, sinks, out, lse, window=window, target=target):
        launch.run()
    return out, lse


def paged_attention(q: Tensor, cache: Tensor, plan: KernelPlan, *, window: int | None) -> Tensor:
    """As rz.ops.paged_attention. Raises: as attention; ValueError if the cache is not of the width of q."""
    if cache.shape[3] != 2 * q.shape[2]:
        raise ValueError(f"cache must be [blocks, Hk, block_size, {2 * q.shape[2]}], got {list(cache.shape)}")
    return attention(q, cache_keys(cache), cache.shape[1], plan, window=window)[0]
