"""Rotary position embedding by Triton kernel."""

import torch
from torch import Tensor

from rz.kernels.rope import rope as kernel
from rz.ops.launch import Launch, aligned, opaque


def rope_launch(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, backward: bool) -> Launch:
    """x and out [N, H, D], cos and sin [N, D / 2] float32."""
    rows, heads, width = x.shape
    block_h, block_d = 1 << (heads - 1).bit_length(), max(16, 1 << (width // 2 - 1).bit_length())
    return Launch(
        kernel=kernel,
        grid=(rows,),
        arguments={"x": x, "cos": cos, "sin": sin, "out": out, "rows": rows},
        constants={
            "BACKWARD": backward,
            "HEADS": heads,
            "HALF": width // 2,
            "BLOCK_H": block_h,
            "BLOCK_D": block_d,
        },
        warps=4,
        stages=1,
    )


def _run(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    x = aligned(x)
    out = torch.empty_like(x)
    rope_launch(x, aligned(cos), aligned(sin), out, backward=backward).run()
    return out


class Rope(torch.autograd.Function):
    """(x, cos, sin) -> x rotated; the gradient goes to x alone."""

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _run(x, cos, sin, False)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad: Tensor):
        return opaque(_run, grad, *ctx.saved_tensors, True), None, None
