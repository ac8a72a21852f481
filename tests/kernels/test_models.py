"""The plain engine and the learner, both on kernels: the whole way from a token id to its logprob, and back."""

import pytest
import torch

from rz.audit import replay
from rz.batch import Group, Prompt, Request, stack
from rz.engine.plain import PlainEngine
from rz.models.dense import DenseConfig, random_params
from rz.models.policy import response_logprobs
from rz.steps import PolicyState, adamw_init, update

pytestmark = pytest.mark.usefixtures("on_kernels")
CONFIG = DenseConfig(
    model_type="qwen3",
    vocab_size=32,
    hidden_size=32,
    intermediate_size=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rms_eps=1e-6,
    rope_theta=1e4,
    max_positions=64,
    tied=True,
    qkv_bias=False,
    qk_norm=True,
    windows=(None, 6),
)


def sampled(params, dtype):
    engine = PlainEngine(CONFIG, params, dtype=dtype, slots=3, max_length=20, step_tokens=7)
    prompts = [tuple(range(1, 10)), (3, 4)]
    for index, ids in enumerate(prompts):
        for sample in range(2):
            engine.submit(
                Request(prompt_index=index, sample=sample, prompt_ids=ids, seed=7 * index + sample, max_tokens=2)
            )
    done = []
    while len(done) < 4:
        done += engine.step()
    engine.close()
    return [
        Group(
            prompt=Prompt(index=index, token_ids=ids),
            rollouts=[rollout for rollout in done if rollout.prompt_index == index],
            rewards=[0.0, 1.0],
        )
        for index, ids in enumerate(prompts)
    ]


def test_an_update_without_one_differing_token():
    dtype = torch.bfloat16
    params = random_params(CONFIG, seed=0, deviation=0.3)
    groups = sampled(params, dtype)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    result = replay(params, CONFIG, rollouts, version=0, dtype=dtype)
    assert (result.tokens, result.differing) == (8, 0)
    after, metrics = update(
        PolicyState(params=params, optimizer=adamw_init(params), version=0),
        stack(groups),
        logprobs_fn=lambda params, batch: response_logprobs(params, CONFIG, batch, dtype=dtype),
        learning_rate=1e-2,
    )
    assert metrics["ratio_max"] == 1 and metrics["gap_max"] == 0 and metrics["grad_norm"] > 0
    assert replay(after.params, CONFIG, rollouts, version=0, dtype=dtype).differing == 8
