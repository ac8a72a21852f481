"""Inputs and comparisons of the kernel tests."""

from collections.abc import Callable

import torch
from torch import Tensor

ODD = (1, 15, 16, 17, 63)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of values near 1: float32 in another order of summation; else half a unit in the last place of the result, and a few
# of those that the float32 reference rounds the other way.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(got: Tensor, exact: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """got is exact, computed in float64, but for the rounding of dtype; scale is that of the terms."""
    assert not got.isnan().any()
    bound = TOLERANCE[dtype] * scale
    torch.testing.assert_close(got.double(), exact, atol=bound, rtol=TOLERANCE[dtype])


def assert_rows_alone(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """op(x)[i] has the same bits among any other rows, in any number, from any place in memory."""
    whole = op(x)
    for start, count in ((0, 1), (len(x) - 1, 1), (1, 15), (3, 17)):
        assert torch.equal(op(x[start : start + count]), whole[start : start + count]), (start, count)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert torch.equal(op(x[order]), whole[order])


def gradients(op: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of the sum of op's result times fixed weights, by torch.func."""

    def loss(*values: Tensor) -> Tensor:
        out = op(*values)
        return (out * normal(*out.shape, dtype=torch.float64, seed=9).to(out.dtype)).double().sum()

    return torch.func.grad(loss, argnums=tuple(range(len(inputs))))(*inputs)
