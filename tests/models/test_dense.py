import attrs
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.models.dense import DenseConfig, check_params, forward, head_weight, parameter_shapes, random_params
from rz.models.hf import load_config, load_params
from rz.ops import WholeSequences, linear

SIZES = dict(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    max_position_embeddings=256,
)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
# With D = 16 and theta 100 the wavelengths are 6 to 353 positions: an original length of 64 puts pairs into all three
# bands of llama3 (below 64 / 4, between, above 64 / 1) and onto YaRN's ramp.
LONG = dict(original_max_position_embeddings=64, rope_theta=100.0)
WINDOW = dict(use_sliding_window=True, sliding_window=7)
CASES = {
    "qwen3": ("Qwen3", dict(head_dim=32, tie_word_embeddings=True)),
    "qwen3 untied, sliding": ("Qwen3", dict(head_dim=16, max_window_layers=0, **WINDOW)),
    "llama": ("Llama", dict(tie_word_embeddings=True, rms_norm_eps=1e-2)),
    "llama, llama3": ("Llama", dict(rope_parameters=LLAMA3 | LONG)),
    "llama, yarn": ("Llama", dict(rope_parameters=dict(rope_type="yarn", factor=4.0) | LONG)),
    "llama, linear": ("Llama", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=100.0))),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2 untied, mixed": ("Qwen2", dict(max_window_layers=1, **WINDOW)),
}


def theirs(family, **fields):
    """A transformers model whose every parameter, norms and biases included, is random."""
    config = getattr(transformers, f"{family}Config")(**SIZES | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    for name, value in model.named_parameters():
        shift = 1.0 if "norm" in name else 0.0
        value.data.normal_(shift, 0.25, generator=generator)
    return model


def packed(lengths, seed=3):
    tokens = torch.randint(0, 96, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.cat([torch.arange(length) for length in lengths])


def example(model_type="qwen3", **changes):
    fields = dict(vocab_size=96, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, head_dim=16)
    fields |= dict(rms_eps=1e-6, rope_theta=1e4, max_positions=256, tied=True, windows=(None, None))
    fields |= dict(hidden_size=64) if model_type == "llama" else {}
    fields |= dict(model_type=model_type, qkv_bias=model_type == "qwen2", qk_norm=model_type == "qwen3")
    return DenseConfig(**fields | changes)


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(case, tmp_path):
    model = theirs(CASES[case][0], **CASES[case][1])
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    params = load_params(tmp_path, config)
    lengths = (70, 1, 33)
    tokens, positions = packed(lengths)
    ours = linear(forward(params, config, tokens, positions, WholeSequences(lengths)), head_weight(params))
    with torch.no_grad():
        expected = torch.cat([model(part[None]).logits[0] for part in tokens.split(lengths)])
    assert expected.std() > 0.5
    # Sums of 48 to 80 float32 terms of size 1 in another order, over three layers.
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_gradients_agree_with_transformers(tmp_path):
    model = theirs(*CASES["qwen2"][:1], **CASES["qwen2"][1])
    model.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    tokens, positions = packed((21,))

    def loss(params):
        hidden = forward(params, config, tokens, positions, WholeSequences((21,)))
        return linear(hidden, head_weight(params)).log_softmax(-1)[:, 5].mean()

    grads = torch.func.grad(loss)(load_params(tmp_path, config))
    model(tokens[None]).logits[0].log_softmax(-1)[:, 5].mean().backward()
    layer = model.model.layers[1]
    attention = layer.self_attn
    biases = torch.cat([attention.q_proj.bias.grad, attention.k_proj.bias.grad, attention.v_proj.bias.grad])
    for name, expected in {
        "embed_tokens.weight": model.model.embed_tokens.weight.grad,
        "layers.1.qkv.bias": biases,
        "layers.1.gate_up.weight": torch.cat([layer.mlp.gate_proj.weight.grad, layer.mlp.up_proj.weight.grad]),
        "norm.weight": model.model.norm.weight.grad,
    }.items():
        torch.testing.assert_close(grads[name], expected, rtol=1e-3, atol=1e-5)


def test_frequencies_are_kept_whatever_ran_first():
    config = example(rope_theta=1e3)  # no other test has it
    params, (tokens, positions) = random_params(config, seed=0), packed((9,))
    run = lambda params: forward(params, config, tokens, positions, WholeSequences((9,))).square().sum()
    torch.func.grad(lambda params: torch.func.grad_and_value(run)(params)[1])(params)  # two transforms deep
    assert torch.equal(torch.func.grad_and_value(run)(params)[1], run(params))  # one, and none


def test_frequencies_are_made_on_one_device_whatever_the_default():
    class Alone:
        def attend(self, layer, q, k, v, *, window):
            return q

    config = example(rope_theta=2e3)
    params, (tokens, positions) = random_params(config, seed=0), packed((9,))
    with torch.device("meta"):
        first = forward(params, config, tokens, positions, Alone())
    assert torch.equal(first, forward(params, config, tokens, positions, Alone()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_packed_equals_alone_bit_for_bit(dtype, lengths, seed):
    config = example(windows=(None, 5))
    params = {name: value.to(dtype) for name, value in random_params(config, seed=seed, deviation=0.3).items()}
    tokens, positions = packed(lengths, seed)
    hidden = forward(params, config, tokens, positions, WholeSequences(lengths))
    assert hidden.dtype == dtype
    for part, rows in zip(tokens.split(lengths), hidden.split(lengths), strict=True):
        alone = forward(params, config, part, torch.arange(len(part)), WholeSequences((len(part),)))
        assert torch.equal(alone, rows)


def test_every_parameter_gets_a_gradient_and_params_stay_as_they_were():
    for model_type in ("qwen3", "llama", "qwen2"):
        config = example(model_type, tied=False)
        params = random_params(config, seed=1, deviation=0.3)
        before = {name: value.clone() for name, value in params.items()}
        tokens, positions = packed((9,))

        def loss(params, config=config, tokens=tokens, positions=positions):
            hidden = forward(params, config, tokens, positions, WholeSequences((9,)))
            return linear(hidden, head_weight(params)).logsumexp(-1).sum()

        grads = torch.func.grad(loss)(params)
        assert set(grads) == set(parameter_shapes(config))
        assert all(grad.any() for grad in grads.values())
        assert all(torch.equal(params[name], before[name]) for name in params)


def test_head_is_the_embedding_only_if_there_is_no_other():
    params = {"embed_tokens.weight": torch.zeros(1), "lm_head.weight": torch.ones(1)}
    assert head_weight(params) is params["lm_head.weight"]
    assert head_weight({"embed_tokens.weight": params["embed_tokens.weight"]}) is params["embed_tokens.weight"]


def test_parameter_shapes_by_hand():
    # H 4, Hk 2, D 16, E 32, I 48, V 96: qkv has (4 + 2 * 2) * 16 = 128 rows, gate_up 96.
    layer = {"input_norm.weight": (32,), "qkv.weight": (128, 32), "q_norm.weight": (16,), "k_norm.weight": (16,)}
    layer |= {"o.weight": (32, 64), "post_norm.weight": (32,), "gate_up.weight": (96, 32), "down.weight": (32, 48)}
    expected = {"embed_tokens.weight": (96, 32), "norm.weight": (32,), "lm_head.weight": (96, 32)}
    expected |= {f"layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()}
    assert parameter_shapes(example(tied=False)) == expected
    assert "lm_head.weight" not in parameter_shapes(example())
    qwen2 = parameter_shapes(example("qwen2"))
    assert qwen2["layers.1.qkv.bias"] == (128,) and "layers.0.q_norm.weight" not in qwen2


def test_random_params_are_a_function_of_the_seed():
    config = example("qwen2")
    first, again, other = (random_params(config, seed=seed) for seed in (4, 4, 5))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layers.0.o.weight"], other["layers.0.o.weight"])
    assert torch.equal(first["norm.weight"], torch.ones(32)) and not first["layers.0.qkv.bias"].any()
    assert 0.018 < first["embed_tokens.weight"].std() < 0.022
    check_params(first, config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(model_type="gpt2"), "model_type must be one of qwen3, llama, qwen2, got 'gpt2'"),
        (dict(layers=0), "layers must be a whole number >= 1, got 0"),
        (dict(vocab_size=3.0), r"vocab_size must be a whole number >= 1, got 3\.0"),
        (dict(rms_eps=float("nan")), "rms_eps must be a number > 0 and finite, got nan"),
        (dict(rope_theta=1), "rope_theta must be a number > 1 and finite, got 1"),
        (dict(tied=1), "tied must be True or False, got 1"),
        (dict(heads=3), r"heads must be a multiple of kv_heads \(2\), got 3"),
        (dict(head_dim=15), "head_dim must be even, got 15"),
        (dict(qkv_bias=True), "qkv_bias must be False for model_type qwen3, got True"),
        (dict(qk_norm=False), "qk_norm must be True for model_type qwen3, got False"),
        (dict(windows=(None,)), r"windows must have one entry a layer \(2\), got 1"),
        (dict(windows=(None, 0)), "windows must be None or whole numbers >= 1, got 0"),
        (dict(rope_scaling={"rope_type": "dynamic"}), "rope_type must be one of .*, got 'dynamic'"),
    ],
)
def test_bad_config_names_field_rule_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        attrs.evolve(example(), **changes)


def test_llama_width_must_divide_by_heads():
    with pytest.raises(ValueError, match=r"hidden_size must be a multiple of heads \(4\), got 66"):
        example("llama", hidden_size=66)


def test_config_does_not_share_its_scaling_with_the_caller():
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = example(rope_scaling=scaling)
    scaling["factor"] = 3.0
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert hash(config) == hash(example(rope_scaling={"rope_type": "linear", "factor": 2.0}))


def test_check_params_names_the_parameter():
    config = example()
    params = random_params(config, seed=0)
    with pytest.raises(ValueError, match=r"params must hold norm.weight \[32\], got none"):
        check_params({name: value for name, value in params.items() if name != "norm.weight"}, config)
    with pytest.raises(ValueError, match=r"layers.1.o.weight must have the shape \[32, 64\], got \[64, 32\]"):
        check_params(params | {"layers.1.o.weight": torch.zeros(64, 32)}, config)
    with pytest.raises(ValueError, match="params must hold the model's own names only, got lm_head.weight"):
        check_params(params | {"lm_head.weight": torch.zeros(96, 32)}, config)
