import json

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.models.dense import FAMILIES, DenseConfig
from rz.models.hf_config import config_json, load_config, parse_config

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 3,
}
LLAMA = QWEN3 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
QWEN2 = QWEN3 | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}


def without(raw, *names):
    return {name: value for name, value in raw.items() if name not in names}


def test_every_field_is_read():
    assert parse_config(QWEN3) == DenseConfig(
        model_type="qwen3",
        vocab_size=96,
        hidden_size=48,
        intermediate_size=80,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=32,
        rms_eps=1e-6,
        rope_theta=1000000,
        rope_scaling=None,
        max_positions=4096,
        tied=True,
        qkv_bias=False,
        qk_norm=True,
        windows=(None, None, None),
    )
    assert parse_config(QWEN2).qkv_bias and not parse_config(QWEN2).qk_norm
    assert not parse_config(LLAMA).qkv_bias and not parse_config(LLAMA).qk_norm


def test_absent_fields_mean_what_they_mean_in_transformers():
    sparse = without(LLAMA, "head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings", "hidden_act")
    config = parse_config(sparse)
    assert (config.head_dim, config.kv_heads, config.rope_theta, config.tied) == (12, 4, 10000.0, False)
    assert parse_config(without(QWEN3, "head_dim")).head_dim == 128


def test_both_forms_of_rope_are_one():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}
    new = without(LLAMA, "rope_theta", "rope_scaling")
    new["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    assert parse_config(old) == parse_config(new)
    assert parse_config(old).rope_scaling == {"rope_type": "llama3", **LLAMA3}
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}
    assert parse_config(without(QWEN3, "rope_theta", "rope_scaling") | plain) == parse_config(QWEN3)


def test_original_length_is_the_configs_then_the_scalings_then_max_positions():
    yarn, name = {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings"
    original = lambda raw: parse_config(QWEN3 | raw).rope_scaling[name]
    assert original({"rope_scaling": yarn}) == 4096
    assert original({"rope_scaling": yarn | {name: 1024}}) == 1024
    assert original({"rope_scaling": yarn | {name: 1024}, name: 512}) == 512


def test_sliding_windows_only_where_turned_on():
    sliding = {"sliding_window": 64, "max_window_layers": 1}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse_config(QWEN2 | sliding).windows == (None, None, None)
    on = QWEN2 | sliding | {"use_sliding_window": True}
    assert parse_config(on).windows == (None, 64, 64)
    assert parse_config(on | {"layer_types": kinds}).windows == (64, None, 64)
    assert parse_config(on | {"sliding_window": None}).windows == (None, None, None)


@st.composite
def configs(draw):
    model_type = draw(st.sampled_from(sorted(FAMILIES)))
    count, layers, kv_heads = st.integers(1, 5), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    scalings = [None, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "llama3"} | LLAMA3]
    window = None if model_type == "llama" else draw(st.sampled_from([None, 7]))
    return DenseConfig(
        model_type=model_type,
        vocab_size=draw(count),
        hidden_size=heads * draw(count),
        intermediate_size=draw(count),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=2 * draw(count),
        rms_eps=draw(st.floats(1e-8, 1e-2)),
        rope_theta=draw(st.floats(2.0, 1e7)),
        rope_scaling=draw(st.sampled_from(scalings)),
        max_positions=draw(count),
        tied=draw(st.booleans()),
        qkv_bias=FAMILIES[model_type][1],
        qk_norm=FAMILIES[model_type][2],
        windows=tuple(draw(st.sampled_from([None, window])) for _ in range(layers)),
    )


@given(configs())
@settings(max_examples=50, deadline=None)
def test_what_is_written_is_read_back(config):
    assert parse_config(json.loads(json.dumps(config_json(config)))) == config


def test_windows_without_a_form_are_refused():
    config = parse_config(QWEN3 | SLIDING)
    with pytest.raises(ValueError, match=r"windows must be .* of one size for others, got \(8, 9, None\)"):
        config_json(attrs.evolve(config, windows=(8, 9, None)))


KNOWN = "Qwen3ForCausalLM, LlamaForCausalLM, Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (QWEN3 | {"architectures": ["MistralForCausalLM"]}, rf"architectures must be one of {KNOWN}, got \['Mistral"),
        (without(QWEN3, "architectures"), rf"architectures must be one of {KNOWN}, got None"),
        (QWEN3 | {"model_type": "llama"}, "model_type must be \"qwen3\" for Qwen3ForCausalLM, got 'llama'"),
        (QWEN3 | {"hidden_act": "gelu"}, "hidden_act must be \"silu\" for Qwen3ForCausalLM, got 'gelu'"),
        (QWEN3 | {"attention_bias": True}, "attention_bias must be false for Qwen3ForCausalLM, got True"),
        (LLAMA | {"attention_bias": True}, "attention_bias must be false for LlamaForCausalLM, got True"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias must be false for LlamaForCausalLM, got True"),
        (LLAMA | {"sliding_window": 8}, "sliding_window must be null for LlamaForCausalLM, got 8"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config must be null for .*'bits': 4"),
        (without(QWEN3, "vocab_size"), "vocab_size must be given, got none"),
        (QWEN3 | {"num_hidden_layers": "3"}, "num_hidden_layers must be a whole number >= 1, got '3'"),
        (QWEN3 | {"num_key_value_heads": 3}, r"num_attention_heads .* of num_key_value_heads \(3\), got 4"),
        (QWEN3 | {"rms_norm_eps": 0}, "rms_norm_eps must be a number > 0 and finite, got 0"),
        (QWEN3 | {"max_position_embeddings": -1}, "max_position_embeddings must be a whole number >= 1, got -1"),
        (QWEN3 | {"tie_word_embeddings": None}, "tie_word_embeddings must be True or False, got None"),
        (without(QWEN2, "head_dim") | {"hidden_size": 50}, r"hidden_size .* of num_attention_heads \(4\), got 50"),
        (QWEN3 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type must be .*'dynamic'"),
        (QWEN3 | {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type must be .*'longrope'"),
        (QWEN3 | {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor must be a number > 0, got None"),
        (QWEN3 | {"rope_parameters": {"full_attention": {}}}, "rope_parameters must be one mapping of numbers"),
        (QWEN3 | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be 1\.0, got 0\.5"),
        (QWEN3 | {"rope_theta": "1e6"}, "rope_theta must be a number > 1 and finite, got '1e6'"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 3}, r"layer_types .* is off\), got 'sliding_attention'"),
        (QWEN2 | {"layer_types": "full_attention"}, "layer_types must be a list, got 'full_attention'"),
        (QWEN2 | {"layer_types": ["full_attention"]}, r"layer_types must have one entry a layer \(3\), got 1"),
        (QWEN2 | SLIDING | {"sliding_window": 0.5}, "sliding_window must be .* got 0.5"),
        (QWEN2 | SLIDING | {"max_window_layers": None}, "max_window_layers must be a whole number, got None"),
    ],
)
def test_what_the_model_cannot_do_is_one_line(raw, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message) as caught:
        load_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must be a readable file, got No such file"),
        ("{", "must be JSON, got Expecting"),
        ("[]", "must hold one JSON object, got list"),
    ],
)
def test_a_broken_file_is_named(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config.json {message}"):
        load_config(tmp_path)
