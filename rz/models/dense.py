"""Dense decoders: Qwen3, Llama 3 and Qwen2.5 as one pure function."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from rz.ops import (
    add_rms_norm,
    embedding,
    head_rms_norm,
    inverse_frequencies,
    linear,
    rms_norm,
    rope,
    rope_tables,
    swiglu,
)

FAMILIES = {  # model_type: (architecture, qkv_bias, qk_norm)
    "qwen3": ("Qwen3ForCausalLM", False, True),
    "llama": ("LlamaForCausalLM", False, False),
    "qwen2": ("Qwen2ForCausalLM", True, False),
}


def _mapping_or_none(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if value is None else dict(value)


@attrs.frozen(kw_only=True)
class DenseConfig:
    """The numbers of one dense decoder. E hidden size, I intermediate size, H heads, Hk kv heads, D head_dim.

    Args:
        model_type: "qwen3" (q/k norm), "llama" (neither norm nor bias) or "qwen2" (qkv bias; Qwen2.5 is one of these).
        heads, kv_heads: heads is a multiple of kv_heads; head h reads kv head h // (heads // kv_heads).
        head_dim: even. heads * head_dim need not be hidden_size.
        rms_eps: > 0, added to the mean square in every norm.
        rope_theta: > 1, the base of the rotary frequencies.
        rope_scaling: None, or a mapping with "rope_type" that rz.ops.inverse_frequencies understands.
        max_positions: >= 1, the positions that the model is made for. forward does not check it.
        tied: the head is the embedding.
        windows: one entry a layer, None (full attention) or the keys that a query sees, itself included.
    Raises: ValueError naming the field, the rule and the value.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = attrs.field(default=None, converter=_mapping_or_none, hash=False)
    max_positions: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...] = attrs.field(converter=tuple)

    def __attrs_post_init__(self) -> None:
        if self.model_type not in FAMILIES:
            raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {self.model_type!r}")
        counts = ("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim")
        for name in (*counts, "max_positions"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        for name, least in (("rms_eps", 0), ("rope_theta", 1)):
            if type(value := getattr(self, name)) not in (int, float) or not least < value < float("inf"):
                raise ValueError(f"{name} must be a number > {least} and finite, got {value!r}")
        for name in ("tied", "qkv_bias", "qk_norm"):
            if type(value := getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be True or False, got {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads ({self.kv_heads}), got {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")
        if self.model_type == "llama" and self.hidden_size % self.heads:
            raise ValueError(f"hidden_size must be a multiple of heads ({self.heads}), got {self.hidden_size}")
        for name, rule in zip(("qkv_bias", "qk_norm"), FAMILIES[self.model_type][1:], strict=True):
            if getattr(self, name) is not rule:
                raise ValueError(f"{name} must be {rule} for model_type {self.model_type}, got {getattr(self, name)}")
        if len(self.windows) != self.layers:
            raise ValueError(f"windows must have one entry a layer ({self.layers}), got {len(self.windows)}")
        for window in self.windows:
            if window is not None and (type(window) is not int or window < 1):
                raise ValueError(f"windows must be None or whole numbers >= 1, got {window!r}")
        self.frequencies()

    def frequencies(self) -> tuple[Tensor, float]:
        """([D / 2] float32 rotary frequencies in radians a position, the factor on cos and sin)."""
        return inverse_frequencies(
            self.head_dim, theta=self.rope_theta, scaling=self.rope_scaling, max_position=self.max_positions
        )


def parameter_shapes(config: DenseConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every parameter, in the order of the forward.

    Projections that share an input are stacked along their rows: qkv is q, k and v; gate_up is gate and up.
    lm_head.weight is there only if the head is not tied.
    """
    width, queries, keys = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, width)}
    for i in range(config.layers):
        layer = f"layers.{i}."
        shapes[layer + "input_norm.weight"] = (width,)
        shapes[layer + "qkv.weight"] = (queries + 2 * keys, width)
        if config.qkv_bias:
            shapes[layer + "qkv.bias"] = (queries + 2 * keys,)
        if config.qk_norm:
            shapes[layer + "q_norm.weight"] = (config.head_dim,)
            shapes[layer + "k_norm.weight"] = (config.head_dim,)
        shapes[layer + "o.weight"] = (width, queries)
        shapes[layer + "post_norm.weight"] = (width,)
        shapes[layer + "gate_up.weight"] = (2 * config.intermediate_size, width)
        shapes[layer + "down.weight"] = (width, config.intermediate_size)
    shapes["norm.weight"] = (width,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes


def check_params(params: Mapping[str, Tensor], config: DenseConfig) -> None:
    """Raises ValueError, naming the first parameter at fault, if one is missing, unknown or of a wrong shape."""
    shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        if name not in params:
            raise ValueError(f"params must hold {name} {list(shape)}, got none")
        if params[name].shape != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, got {list(params[name].shape)}")
    for name in params:
        if name not in shapes:
            raise ValueError(f"params must hold the model's own names only, got {name}")


def random_params(config: DenseConfig, *, seed: int, deviation: float = 0.02) -> dict[str, Tensor]:
    """float32 parameters as a fresh Hugging Face model has them: matrices normal(0, deviation), norms 1, biases 0.

    A function of its arguments alone: one generator fills the matrices in the order of parameter_shapes.
    """
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith("norm.weight"):
            params[name] = torch.ones(shape)
        elif name.endswith(".bias"):
            params[name] = torch.zeros(shape)
        else:
            params[name] = torch.empty(shape).normal_(0, deviation, generator=generator)
    return params


@functools.lru_cache(maxsize=16)
def _frequencies(config: DenseConfig) -> tuple[tuple[float, ...], float]:
    """As numbers: a tensor made within torch.func, or under another default device, would be of no use outside."""
    with torch.device("cpu"):
        frequencies, factor = config.frequencies()
    return tuple(frequencies.tolist()), factor


def _unobserved(name: str, value: Tensor) -> None:
    """The default observer of forward: looks away."""


def forward(
    params: Mapping[str, Tensor],
    config: DenseConfig,
    tokens: Tensor,
    positions: Tensor,
    past: Any,
    *,
    observe: Callable[[str, Tensor], None] = _unobserved,
) -> Tensor:
    """Hidden states after the final norm: what the head reads.

    Shapes: N rows (tokens of any number of sequences, packed), E hidden size.
    Args:
        params: as parameter_shapes names them, all in the dtype to compute in. Nothing is cast here.
        tokens: [N] integer ids in [0, V).
        positions: [N] integer, the place of each token in its own sequence, from 0.
        past: how a layer reaches the earlier tokens of each row's sequence. Its method
            `attend(layer, q [N, H, D], k [N, Hk, D], v [N, Hk, D], *, window) -> [N, H, D]` gets the rotated q and k,
            scales by head_dim**-0.5 and is causal; see rz.ops.WholeSequences.
        observe: called with the name of each op ("layers.3.attention") and its result [N, ...], in order.
    Returns: [N, E] in the dtype of the embedding.
    Gradient: to params.
    Edge cases: a row depends on its own sequence only, and each op's row on its own inputs only, so how rows are
        batched does not change a bit.
    Source: Qwen3 technical report, arXiv:2505.09388; Llama 3, arXiv:2407.21783; Qwen2.5, arXiv:2412.15115. Rotary pairs
        are (i, i + D/2), as Hugging Face checkpoints have them.
    """
    frequencies, factor = _frequencies(config)
    frequencies = torch.tensor(frequencies, dtype=torch.float32, device=positions.device)
    cos, sin = rope_tables(positions, frequencies, factor)
    heads = config.heads, config.kv_heads  # queries and keys are normed and rotated together
    residual = embedding(tokens, params["embed_tokens.weight"])
    observe("embedding", residual)
    normed = rms_norm(residual, params["layers.0.input_norm.weight"], eps=config.rms_eps)
    observe("layers.0.input_norm", normed)
    for i in range(config.layers):
        layer = f"layers.{i}."
        qkv = linear(normed, params[layer + "qkv.weight"], params[layer + "qkv.bias"] if config.qkv_bias else None)
        observe(layer + "qkv", qkv)
        both, v = qkv.unflatten(1, (-1, config.head_dim)).split((sum(heads), config.kv_heads), dim=1)
        if config.qk_norm:
            norms = params[layer + "q_norm.weight"], params[layer + "k_norm.weight"]
            both = head_rms_norm(both, norms, heads, eps=config.rms_eps)
            observe(layer + "qk_norm", both)
        both = rope(both, cos, sin)
        observe(layer + "rope", both)
        q, k = both.split(heads, dim=1)
        attended = past.attend(i, q, k, v, window=config.windows[i])
        observe(layer + "attention", attended)
        update = linear(attended.flatten(1), params[layer + "o.weight"])
        observe(layer + "o", update)
        normed, residual = add_rms_norm(update, residual, params[layer + "post_norm.weight"], eps=config.rms_eps)
        observe(layer + "post_norm", normed)
        gated = swiglu(linear(normed, params[layer + "gate_up.weight"]))
        observe(layer + "swiglu", gated)
        update = linear(gated, params[layer + "down.weight"])
        observe(layer + "down", update)
        following = "norm" if i + 1 == config.layers else f"layers.{i + 1}.input_norm"
        normed, residual = add_rms_norm(update, residual, params[following + ".weight"], eps=config.rms_eps)
        observe(following, normed)
    return normed


def head_weight(params: Mapping[str, Tensor]) -> Tensor:
    """[V, E], the rows that turn a hidden state into logits; without lm_head.weight (a tied head) the embedding."""
    return params["lm_head.weight" if "lm_head.weight" in params else "embed_tokens.weight"]
