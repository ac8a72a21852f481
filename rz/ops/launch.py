"""A kernel launch as a value: run on a device, or compiled ahead of time from tensors without memory."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen(kw_only=True, eq=False)
class Launch:
    """One launch.

    A kernel is specialised by the constants alone: numbers of rows are no constants, and every tensor starts at a
    multiple of 16 bytes (see `aligned`). So all row counts run one binary.

    Args:
        kernel: a @triton.jit function.
        grid: programs along each axis; 0 = nothing to do.
        arguments: by name, tensors, numbers or None.
        constants: by name, the tl.constexpr parameters.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Tensor | int | float | None]
    constants: dict[str, Any]
    warps: int
    stages: int

    def run(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](**self.arguments, **self.constants, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        """Of the compiler, which may not contract a * b + c by itself: what is fused is written so."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}


def aligned(x: Tensor) -> Tensor:
    """x, or a copy where x is not contiguous or does not start at a multiple of 16 bytes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(function: Callable[..., Any], *inputs: Any) -> Any:
        return function(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        pass

    @staticmethod
    def backward(ctx, *grads: Tensor):
        raise NotImplementedError("kernels must be differentiated once, got a second derivative")


def opaque(function: Callable[..., Any], *inputs: Any) -> Any:
    """function(*inputs) with tensors that have memory: torch.func hands wrappers to the backward of a function."""
    return _Opaque.apply(function, *inputs)


def cdiv(value: int, quantum: int) -> int:
    return -(-value // quantum)
