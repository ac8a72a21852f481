"""What aligned means, clause by clause, for an operation on rows."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

ROWS = (*range(1, 41), 63, 257, 1000)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_aligned(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """op(x)[i] has the same bits whatever the other rows, their number, the place of row i, and the thread count."""
    whole = op(x)
    assert not whole.isnan().any()
    for rows in (*ROWS, len(x)):
        for start in {0, 1, 3, len(x) - rows}:
            got, expected = op(x[start : start + rows]), whole[start : start + rows]
            assert torch.equal(got, expected), f"{rows} rows from {start}"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(op(x[order]), whole[order]), "another order"
    others = x.flip(0)
    others[7] = x[7]
    assert torch.equal(op(others)[7], whole[7]), "other neighbours"
    for name, moved in placements(x):
        assert torch.equal(op(moved), whole), name
    for count in (1, 2):
        with threads(count):
            assert torch.equal(op(x), whole), f"{count} threads"
            assert torch.equal(op(x[:3]), whole[:3]), f"{count} threads, 3 rows"


def placements(x: Tensor) -> list[tuple[str, Tensor]]:
    """The same values elsewhere in memory."""
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    strided = torch.empty((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype)[..., : x.shape[-1]].copy_(x)
    return [
        ("not on a vector boundary", shifted),
        ("a part of wider rows", strided),
        ("transposed", x.transpose(0, -1).contiguous().transpose(0, -1)),
    ]
