"""The loop with the real plain engine and the real update: what alignment means for training."""

import asyncio
from functools import partial

import pytest
import torch

from rz.audit import online_audit
from rz.batch import Prompt
from rz.engine.plain import PlainEngine
from rz.loop import train
from rz.models.policy import response_logprobs
from rz.schedule import Settings
from rz.steps import PolicyState, adamw_init, update


class Counting:
    """Reward: the share of even tokens. A response ends with token 0."""

    stop_ids = (0,)

    def prompt(self, index):
        return Prompt(index=index, token_ids=[1 + index % 90, 2, 3][: 1 + index % 3])

    def score(self, prompt, response_ids):
        return sum(token % 2 == 0 for token in response_ids) / len(response_ids)


def run(model, *, updates, max_lag, learning_rate, temperature, dtype=torch.float32):
    """(records of the run, its last state)."""
    _, config, params = model
    engine = PlainEngine(config, params, dtype=dtype, slots=20, max_length=32, step_tokens=40)
    state = PolicyState(params=params, optimizer=adamw_init(params), version=0)
    logprobs = lambda params, batch: response_logprobs(params, config, batch, dtype=dtype)
    records = []
    state = asyncio.run(
        train(
            state=state,
            engine=engine,
            task=Counting(),
            settings=Settings(group_size=2, groups_per_update=2, max_lag=max_lag, slots=20, updates=updates),
            run_seed=5,
            max_tokens=10,
            temperature=temperature,
            update=partial(update, logprobs_fn=logprobs, learning_rate=learning_rate),
            audit=online_audit(config, dtype=dtype, share=1.0, run_seed=5),
            on_update=records.append,
            reward_timeout_s=60.0,
        )
    )
    return records, state


@pytest.mark.parametrize("temperature, dtype", [(1.0, torch.float32), (0.6, torch.bfloat16)])
def test_at_rate_zero_every_ratio_of_50_updates_is_exactly_one(model, temperature, dtype):
    records, state = run(model, updates=50, max_lag=3, learning_rate=0.0, temperature=temperature, dtype=dtype)
    assert state.version == 50 and all(torch.equal(state.params[name], value) for name, value in model[2].items())
    assert max(record.metrics["lag_max"] for record in records) > 0
    for record in records:
        metrics = record.metrics
        assert metrics["k1"] == metrics["k2"] == metrics["k3"] == metrics["gap_max"] == 0
        assert metrics["ratio_max"] == 1 and metrics["ess"] == pytest.approx(1, abs=1e-12)
        assert metrics["differing_tokens"] == 0
    trained = sum(record.metrics["tokens"] for record in records)
    assert sum(record.metrics["audited_tokens"] for record in records) >= trained > 1000


def test_while_learning_at_lag_four_no_token_differs_and_the_bound_holds(model):
    records, state = run(model, updates=30, max_lag=4, learning_rate=1e-3, temperature=1.0)
    assert any((state.params[name] != value).any() for name, value in model[2].items())
    for record in records:
        lags = (record.state.version - 1 - record.batch.policy_versions)[record.batch.mask]
        assert 0 <= lags.min() and lags.max() <= 4 and record.metrics["differing_tokens"] == 0
        fresh = record.metrics["tokens_lag_0"]
        assert fresh == 0 or record.metrics["gap_max_lag_0"] == 0  # at lag 0 even a learning run has ratio 1
    assert max(record.metrics["lag_max"] for record in records) == 4
    assert max(record.metrics["gap_max"] for record in records) > 0


def test_at_lag_zero_every_ratio_is_one_while_learning(model):
    records, _ = run(model, updates=10, max_lag=0, learning_rate=1e-3, temperature=0.6)
    assert all(record.metrics["ratio_max"] == 1 and record.metrics["lag_max"] == 0 for record in records)
    assert records[-1].metrics["grad_norm"] > 0
