"""A tiny model, and engines of both kinds over it; vLLM starts once for each of its settings."""

import json

import pytest
import torch

from rz.engine.plain import PlainEngine
from rz.engine.vllm import VllmEngine
from rz.models.dense import random_params
from rz.models.hf import load_config, save_checkpoint
from rz.models.make import make_tiny

SETTINGS = {"slots": 8, "max_length": 512, "step_tokens": 64}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """(folder, config, params). Its config calls half of the vocabulary end-of-sequence: only stop_ids may stop."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    make_tiny(folder.with_name("random"), head_dim=32, vocab_size=96)
    config = load_config(folder.with_name("random"))
    params = random_params(config, seed=0, deviation=0.15)
    save_checkpoint(folder, params, config)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"eos_token_id": list(range(48)), "pad_token_id": 0}))
    return folder, config, params


@pytest.fixture(scope="session")
def other(model):
    """Other weights of the same shapes."""
    return random_params(model[1], seed=1, deviation=0.15)


@pytest.fixture(scope="session")
def several():
    """Lets several engines live in one process: closing one would end vLLM's process groups for all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
        yield


@pytest.fixture(scope="session")
def vllm_float32(several, model):
    engine = VllmEngine(*model, dtype=torch.float32, **SETTINGS)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def vllm_bfloat16(several, model):
    """A cache of 8 blocks for 8 slots, so requests are preempted."""
    engine = VllmEngine(*model, dtype=torch.bfloat16, slots=8, max_length=512, step_tokens=37, cache_tokens=1024)
    yield engine
    engine.close()


@pytest.fixture(params=["plain", "vllm"])
def engine(request, model):
    """A float32 engine with the model's weights, an empty cache and nothing running."""
    if request.param == "plain":
        yield PlainEngine(*model[1:], dtype=torch.float32, **SETTINGS)
        return
    engine = request.getfixturevalue("vllm_float32")
    engine.publish(model[2], engine.version + 1)
    yield engine
    engine.abort([(rollout.prompt_index, rollout.sample) for rollout in engine.running()])
