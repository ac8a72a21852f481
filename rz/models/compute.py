"""From float32 master parameters to what the forward uses: the same pure function for learner and engine."""

from collections.abc import Mapping

import torch
from torch import Tensor

PRODUCTS = ("qkv.weight", "o.weight", "gate_up.weight", "down.weight", "lm_head.weight")


def has_narrow_products(dtype: torch.dtype, device: str = "cpu") -> bool:
    """Whether a device multiplies matrices of dtype natively; where it does not, products run in float32."""
    if dtype == torch.float32 or device != "cpu":
        return True
    return dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def compute_params(params: Mapping[str, Tensor], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters as `forward` takes them, so that activations are of dtype.

    Every value is rounded to dtype. Where the processor has no narrow matrix product, the weights of products are then
    held in float32 (the same values, see rz.ops.linear), and a tied head becomes a float32 lm_head.weight beside the
    embedding.

    Args:
        params: float32 masters by name.
        dtype: torch.float32 (the tensors themselves come back), torch.bfloat16 or torch.float16.
    Gradient: passes through the casts unchanged.
    """
    if dtype == torch.float32:
        return dict(params)
    narrow = {name: value.to(dtype) for name, value in params.items()}
    if has_narrow_products(dtype, next(iter(params.values())).device.type):
        return narrow
    if "lm_head.weight" not in narrow:
        narrow["lm_head.weight"] = narrow["embed_tokens.weight"]
    return {name: value.float() if name.endswith(PRODUCTS) else value for name, value in narrow.items()}
