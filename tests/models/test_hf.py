import json

import attrs
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rz.models.dense import FAMILIES, DenseConfig, parameter_shapes, random_params
from rz.models.hf import INDEX, WEIGHTS, load_config, load_params, save_checkpoint, whole_folder
from rz.models.make import make_tiny

SMALL = dict(vocab_size=40, hidden_size=32, intermediate_size=24, heads=2, kv_heads=1, head_dim=16, max_positions=64)


def example(model_type="qwen3", **changes):
    fields = SMALL | dict(layers=2, rms_eps=1e-6, rope_theta=1e4, tied=True, windows=(None, None))
    fields |= dict(model_type=model_type, qkv_bias=model_type == "qwen2", qk_norm=model_type == "qwen3")
    return DenseConfig(**fields | changes)


def noisy(config, seed=2):
    """Parameters in which no two entries agree by design: norms and biases random too."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(config).items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def rewrite(folder, change):
    """Apply change to the dict of tensors of a one-file checkpoint."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def saved(tmp_path):
    config = example()
    params = noisy(config)
    save_checkpoint(tmp_path / "model", params, config)
    return tmp_path / "model", config, params


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_every_bit(model_type, tied, tmp_path):
    config = example(model_type, tied=tied)
    params = noisy(config)
    save_checkpoint(tmp_path / "ours", params, config)
    assert load_config(tmp_path / "ours") == config
    assert same(load_params(tmp_path / "ours", config), params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert type(model).__name__ == FAMILIES[model_type][0]
    model.save_pretrained(tmp_path / "theirs")
    assert load_config(tmp_path / "theirs") == config
    assert same(load_params(tmp_path / "theirs", config), params)


def test_fused_rows_by_hand(saved):
    folder, _, params = saved
    tensors = load_file(folder / WEIGHTS)
    # H 2, Hk 1, D 16: rows 0-31 of qkv are q, 32-47 k, 48-63 v. I 24: rows 0-23 of gate_up are gate, 24-47 up.
    layer, qkv, gate_up = "model.layers.1.", params["layers.1.qkv.weight"], params["layers.1.gate_up.weight"]
    assert torch.equal(tensors[layer + "self_attn.q_proj.weight"], qkv[:32])
    assert torch.equal(tensors[layer + "self_attn.k_proj.weight"], qkv[32:48])
    assert torch.equal(tensors[layer + "self_attn.v_proj.weight"], qkv[48:])
    assert torch.equal(tensors[layer + "mlp.gate_proj.weight"], gate_up[:24])
    assert torch.equal(tensors[layer + "mlp.up_proj.weight"], gate_up[24:])
    assert "lm_head.weight" not in tensors and len(tensors) == 2 + 2 * 11
    with safe_open(folder / WEIGHTS, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}  # transformers 4 refuses a file without


@given(st.integers(1, 30_000))
@settings(max_examples=10, deadline=None)
def test_any_shard_size_gives_the_same_params(tmp_path_factory, limit):
    folder, config = tmp_path_factory.mktemp("shards") / "model", example("qwen2", tied=False)
    params = noisy(config)
    save_checkpoint(folder, params, config, shard_bytes=limit)
    assert same(load_params(folder, config), params)
    total = 4 * sum(value.numel() for value in params.values())
    assert json.loads((folder / INDEX).read_text())["metadata"]["total_size"] == total
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or 4 * sum(value.numel() for value in tensors.values()) <= limit


def test_transformers_loads_shards(tmp_path):
    config = example()
    params = noisy(config)
    save_checkpoint(tmp_path / "model", params, config, shard_bytes=9000)
    # Bytes in order: embedding 5120, norm 128 | q 4096, k, v 2048 each, q/k norms 64 each | o 4096, norm 128, gate 3072
    # | up, down 3072 each, norm 128 of layer 1 | q ... | o ... | up, down, final norm. One more would pass 9000.
    assert len(list((tmp_path / "model").glob("model-0000?-of-00007.safetensors"))) == 7
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, params["layers.1.down.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_files_are_widened_exactly(dtype, tmp_path):
    config = example()
    params = noisy(config)
    save_checkpoint(tmp_path / "model", params, config, dtype=dtype)
    loaded = load_params(tmp_path / "model", config)
    assert same(loaded, {name: value.to(dtype).float() for name, value in params.items()})
    read = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert read.dtype == dtype


def test_rotary_buffers_are_ignored_and_an_equal_tied_head_too(saved):
    folder, config, params = saved

    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, change)
    assert same(load_params(folder, config), params)


def test_source_gives_token_ids_and_companions(saved):
    folder, config, params = saved
    raw = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [5, 6], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    other = noisy(config, seed=9)
    for target in (folder.with_name("copy"), folder):  # beside its source, then over it
        save_checkpoint(target, other, config, source=folder)
        assert files(target) == ["config.json", "generation_config.json", WEIGHTS, "tokenizer.json"]
        written = json.loads((target / "config.json").read_text())
        assert written["eos_token_id"] == [5, 6] and written["torch_dtype"] == "float32" and "dtype" not in written
        assert same(load_params(target, config), other)
    assert files(folder.parent) == ["copy", "model"]
    with pytest.raises(ValueError, match="source must have the config of params, got .*model with another"):
        changed = attrs.evolve(config, rms_eps=1e-5)
        save_checkpoint(folder, other, changed, source=folder)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(O_PROJ), rf"must hold the tensor {O_PROJ} \[32, 32\], got none"),
        (put(O_PROJ, torch.zeros(32, 31)), rf"{O_PROJ} must have the shape \[32, 32\], got \[32, 31\]"),
        (put("model.norm.weight", torch.zeros(32, dtype=torch.int8)), "model.norm.weight must be of F32, .* got I8"),
        (put("model.norm.weight", torch.zeros(32).double()), "model.norm.weight must be of F32, F16, BF16, got F64"),
        (put("model.norm.weight", torch.tensor([0.0] * 31 + [torch.nan])), "model.norm.weight must be finite, got nan"),
        (put("model.norm.weight", torch.tensor([-torch.inf] + [1.0] * 31)), "norm.weight must be finite, got -inf"),
        (put("model.layers.2.mlp.up_proj.weight", torch.zeros(1)), r"Qwen3ForCausalLM, got model\.layers\.2\.mlp\.up"),
        (put("model.layers.0.self_attn.q_proj.bias", torch.zeros(1)), r"got model\.layers\.0\.self_attn\.q_proj\.bias"),
        (put("lm_head.weight", torch.zeros(40, 32)), r"lm_head.weight must equal model.embed_tokens.weight \(tied\)"),
    ],
)
def test_a_bad_tensor_is_named(change, message, saved):
    folder, config, _ = saved
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_params(folder, config)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_broken_file_is_named(saved):
    folder, config, params = saved
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=f"{WEIGHTS} must be a whole safetensors file, got"):
        load_params(folder, config)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=f"model must hold {WEIGHTS} or {INDEX}, got neither"):
        load_params(folder, config)
    (folder / INDEX).write_text('{"weight_map": [1]}')
    with pytest.raises(ValueError, match=f"{INDEX}: weight_map must map tensors to files, got list"):
        load_params(folder, config)
    save_checkpoint(folder, params, config, shard_bytes=9000)
    (folder / "model-00002-of-00007.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00007.safetensors must be a readable file, got"):
        load_params(folder, config)


def test_params_that_do_not_fit_are_not_written(saved):
    folder, config, params = saved
    new = folder.with_name("new")
    for changed, message in (
        ({"norm.weight": torch.zeros(31)}, r"norm.weight must have the shape \[32\], got \[31\]"),
        ({"norm.weight": torch.full((32,), torch.nan)}, "norm.weight must be finite in torch.float32, got NaN or inf"),
        ({"other": torch.zeros(1)}, "params must hold the model's own names only, got other"),
    ):
        with pytest.raises(ValueError, match=message):
            save_checkpoint(new, params | changed, config)
    with pytest.raises(ValueError, match="norm.weight must be finite in torch.float16"):
        save_checkpoint(new, params | {"norm.weight": torch.full((32,), 1e9)}, config, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"dtype must be torch\.float32, .*, got torch\.int8"):
        save_checkpoint(new, params, config, dtype=torch.int8)
    with pytest.raises(ValueError, match="shard_bytes must be >= 1, got 0"):
        save_checkpoint(new, params, config, shard_bytes=0)
    assert files(folder.parent) == ["model"]


def test_a_checkpoint_is_replaced_whole(saved):
    folder, config, params = saved
    save_checkpoint(folder, params, config, shard_bytes=9000)
    save_checkpoint(folder, noisy(config, seed=5), config)
    assert files(folder) == ["config.json", WEIGHTS]
    assert same(load_params(folder, config), noisy(config, seed=5))
    assert files(folder.parent) == ["model"]


def test_an_error_half_way_leaves_the_old_one(saved):
    folder, config, params = saved
    with pytest.raises(RuntimeError, match="half way"), whole_folder(folder) as partial:
        (partial / "config.json").write_text("{")
        raise RuntimeError("half way")
    assert files(folder.parent) == ["model"]
    assert same(load_params(folder, config), params)


def test_only_a_checkpoint_is_replaced(saved):
    folder, config, params = saved
    (folder / "notes.txt").write_text("mine")
    for target, name in ((folder, "notes.txt"), (folder / "notes.txt", "notes.txt"), (folder.parent, "model")):
        with pytest.raises(ValueError, match=f"folder must be new, empty or a checkpoint, got .* with {name}"):
            save_checkpoint(target, params, config)
    assert (folder / "notes.txt").read_text() == "mine" and files(folder.parent) == ["model"]


def test_a_folder_that_cannot_be_written_is_one_line(saved):
    folder, config, params = saved
    target = folder / "config.json" / "inner" / "model"
    with pytest.raises(ValueError, match=r"folder must be one that can be written, got .*/model \(Not a dir") as caught:
        save_checkpoint(target, params, config)
    assert "\n" not in str(caught.value)


def test_a_deeper_folder_is_made(tmp_path):
    config = make_tiny(tmp_path / "a" / "b", layers=1)
    assert same(load_params(tmp_path / "a" / "b", config), random_params(config, seed=0))
