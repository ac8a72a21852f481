"""vLLM's own model as a rollout engine: what rz replaces, for comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rz.engine.vllm import VllmEngine
from rz.models.dense import DenseConfig

PLACES = {  # rz's name within a layer: vLLM's
    "input_norm": "input_layernorm",
    "qkv": "self_attn.qkv_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "o": "self_attn.o_proj",
    "post_norm": "post_attention_layernorm",
    "gate_up": "mlp.gate_up_proj",
    "down": "mlp.down_proj",
}


def stock_engine(
    folder: Path, config: DenseConfig, params: Mapping[str, Tensor], *, dtype: torch.dtype, **sizes: Any
) -> VllmEngine:
    """A VllmEngine whose logits are those of vLLM's own model, attention and kernels.

    The sampler stays rz's, and so does the way weights are published: beside the engine of rz, only the kernels differ.
    Its logprobs are near those of the learner and have other bits; `weights` is not there.

    Args:
        folder, config, params, dtype, sizes, errors: as VllmEngine.
    """
    return VllmEngine(folder, config, params, dtype=dtype, model=stock_model, write=write_stock, **sizes)


def stock_model() -> dict[str, Any]:
    """No setting of vllm.LLM: it chooses its own model for the folder."""
    return {}


@torch.no_grad()
def write_stock(model: Any, params: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
    """Copy float32 masters into vLLM's own loaded model, rounded to dtype, where a forward reads them.

    On a CPU vLLM packs a layer's weight after loading and throws the plain one away; so each gets a new plain one, and
    is packed again.
    """
    for name, value in params.items():
        layer, kind = place(model, name)
        held, new = getattr(layer, kind), value.to(dtype)
        if held.numel() == 0:
            setattr(layer, kind, torch.nn.Parameter(new.clone(), requires_grad=False))
        else:  # a vocabulary is padded; a bias may be held in float32, which the layer's packing is made for
            held[: len(new)].copy_(new)
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)


def place(model: Any, name: str) -> tuple[Any, str]:
    """(module of vLLM's model, name of its tensor) that a parameter of rz.models.dense belongs to."""
    *path, kind = name.split(".")
    if path[0] == "layers":
        return model.model.get_submodule(f"layers.{path[1]}.{PLACES[path[2]]}"), kind
    return (model if path[0] == "lm_head" else model.model).get_submodule(path[0]), kind
