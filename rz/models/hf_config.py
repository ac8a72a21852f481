"""config.json of dense Hugging Face checkpoints, read and written."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rz.models.dense import FAMILIES, DenseConfig

HF_NAMES = {  # field of DenseConfig: field of config.json
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "rms_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "windows": "sliding_window",
}


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds. Raises ValueError naming the file if it cannot be read or holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} must be a readable file, got {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold one JSON object, got {type(value).__name__}")
    return value


def _rope(raw: Mapping[str, Any], name: str, max_positions: Any) -> tuple[Any, dict[str, Any] | None]:
    given = raw.get(name) or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"{name} must be one mapping of numbers for all layers, got {given!r}")
    rest = {key: value for key, value in given.items() if value is not None}
    theta = rest.pop("rope_theta", raw.get("rope_theta") or 10000.0)
    partial = rest.pop("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0)
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor must be 1.0, got {partial!r}")
    old, kind = rest.pop("type", "default"), rest.pop("rope_type", None)
    kind = old if kind is None else kind
    if kind == "default":
        return theta, None
    if kind in ("llama3", "yarn"):
        name = "original_max_position_embeddings"
        rest[name] = raw.get(name) or rest.get(name) or max_positions  # in the order of transformers
    return theta, {"rope_type": kind, **rest}


def _windows(raw: Mapping[str, Any], model_type: str, layers: Any) -> tuple[int | None, ...]:
    size, kinds = raw.get("sliding_window"), raw.get("layer_types")
    if model_type == "llama":
        if size is not None:
            raise ValueError(f"sliding_window must be null for LlamaForCausalLM, got {size!r}")
        return (None,) * layers
    slides = size is not None and raw.get("use_sliding_window", False)
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        if slides and type(first) is not int:
            raise ValueError(f"max_window_layers must be a whole number, got {first!r}")
        return tuple(size if slides and i >= first else None for i in range(layers))
    if not isinstance(kinds, list | tuple):
        raise ValueError(f"layer_types must be a list, got {kinds!r}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types must have one entry a layer ({layers}), got {len(kinds)}")
    allowed = ("full_attention", "sliding_attention") if slides else ("full_attention",)
    for kind in kinds:
        if kind not in allowed:
            turned = "on" if slides else "off"
            raise ValueError(
                f"layer_types must be of {', '.join(allowed)} (use_sliding_window is {turned}), got {kind!r}"
            )
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def parse_config(raw: Mapping[str, Any]) -> DenseConfig:
    """The DenseConfig that the fields of a config.json describe, in the form of transformers 4 or 5.

    Defaults are those of transformers: hidden_act silu, rope_theta 10000, head_dim hidden_size / heads (Qwen3: 128), as
    many kv heads as heads, an untied head, no biases, no sliding window. A sliding window counts only where
    use_sliding_window is true, from max_window_layers on or where layer_types says so.
    Raises: ValueError naming the field of config.json, the rule and the value, for whatever this model cannot compute.
    """
    architectures = {architecture: model_type for model_type, (architecture, _, _) in FAMILIES.items()}
    got = raw.get("architectures")
    if not isinstance(got, list) or len(got) != 1 or got[0] not in architectures:
        raise ValueError(f"architectures must be one of {', '.join(architectures)}, got {got!r}")
    model_type = architectures[got[0]]
    for name, default, allowed in (
        ("model_type", model_type, (model_type,)),
        ("hidden_act", "silu", ("silu",)),
        ("attention_bias", False, (False, None) if model_type != "qwen2" else (False, True, None)),
        ("mlp_bias", False, (False, None)),
        ("quantization_config", None, (None,)),
    ):
        if (value := raw.get(name, default)) not in allowed:
            raise ValueError(f"{name} must be {json.dumps(allowed[0])} for {got[0]}, got {value!r}")
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    for name in (*names, "rms_norm_eps", "max_position_embeddings"):
        if raw.get(name) is None:
            raise ValueError(f"{name} must be given, got none")
    for name in names:
        if type(raw[name]) is not int or raw[name] < 1:
            raise ValueError(f"{name} must be a whole number >= 1, got {raw[name]!r}")
    vocab_size, hidden_size, intermediate_size, layers, heads = (raw[name] for name in names)
    head_dim = raw.get("head_dim") or (128 if model_type == "qwen3" else hidden_size // heads)
    if raw.get("head_dim") is None and model_type != "qwen3" and hidden_size % heads:
        raise ValueError(f"hidden_size must be a multiple of num_attention_heads ({heads}), got {hidden_size}")
    max_positions = raw["max_position_embeddings"]
    rope_name = "rope_parameters" if raw.get("rope_parameters") and not raw.get("rope_scaling") else "rope_scaling"
    theta, scaling = _rope(raw, rope_name, max_positions)
    try:
        return DenseConfig(
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            layers=layers,
            heads=heads,
            kv_heads=heads if raw.get("num_key_value_heads") is None else raw["num_key_value_heads"],
            head_dim=head_dim,
            rms_eps=raw["rms_norm_eps"],
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=max_positions,
            tied=raw.get("tie_word_embeddings", False),
            qkv_bias=FAMILIES[model_type][1],
            qk_norm=FAMILIES[model_type][2],
            windows=_windows(raw, model_type, layers),
        )
    except ValueError as error:
        theirs = HF_NAMES | {"rope_scaling": rope_name}
        pattern = rf"\b({'|'.join(theirs)})\b"
        raise ValueError(re.sub(pattern, lambda match: theirs[match[0]], str(error))) from None


def load_config(folder: Path | str) -> DenseConfig:
    """parse_config of the config.json in a folder.

    Raises: ValueError naming the file, the field, the rule and the value.
    """
    path = Path(folder) / "config.json"
    raw = read_json(path)
    try:
        return parse_config(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def config_json(config: DenseConfig) -> dict[str, Any]:
    """The fields of a config.json from which parse_config makes config again; read by transformers 4 and 5."""
    sizes = sorted({window for window in config.windows if window is not None})
    if len(sizes) > (config.model_type != "llama"):
        raise ValueError(f"windows must be None for llama, of one size for others, got {config.windows}")
    raw = {
        "architectures": [FAMILIES[config.model_type][0]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.model_type == "llama":
        return raw | {"attention_bias": False, "mlp_bias": False}
    raw |= {"use_sliding_window": bool(sizes), "sliding_window": sizes[0] if sizes else None}
    raw["max_window_layers"] = next((i for i, window in enumerate(config.windows) if window), config.layers)
    raw["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return raw if config.model_type == "qwen2" else raw | {"attention_bias": False}
