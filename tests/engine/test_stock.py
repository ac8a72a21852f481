import pytest
import torch
from conftest import SETTINGS
from rollouts import audit, finish, mixed

from rz.engine.plain import PlainEngine
from rz.engine.stock import place, stock_engine
from rz.models.dense import parameter_shapes, random_params
from rz.models.make import make_tiny

NOISE = (
    0.2  # nats: bfloat16 kernels of two makes differ by up to 0.06 on these wide logits, other weights by 0.7 and more
)


@pytest.fixture(scope="module")
def stock(several, model):
    engine = stock_engine(*model, dtype=torch.bfloat16, **SETTINGS)
    yield engine
    engine.close()


def test_other_bits_but_the_published_weights(stock, model, other):
    """Each publish is followed: near the learner's logprobs under its own weights, far from those under others."""
    for params, wrong in ((model[2], other), (other, model[2]), (model[2], other)):
        stock.publish(params, stock.version + 1)
        rollouts = list(finish(stock, mixed()).values())
        near, far = (audit({stock.version: weights}, model[1], rollouts, torch.bfloat16) for weights in (params, wrong))
        assert near.tokens == sum(len(rollout.response_ids) for rollout in rollouts) > 200
        assert near.differing > 0.5 * near.tokens and 0 < near.max_abs < NOISE
        assert far.differing > 0.5 * far.tokens and far.max_abs > 2


def test_every_tensor_is_republished(stock, model, other):
    """One tensor alone is of the new weights: the engine's logprobs move with it, for each tensor of the model."""
    request = mixed(3)[2:]
    for name in parameter_shapes(model[1]):
        changed = model[2] | {name: other[name] if other[name].ndim > 1 else other[name] + 1.0}
        stock.publish(changed, stock.version + 1)
        rollouts = list(finish(stock, request).values())
        near, far = (audit({stock.version: w}, model[1], rollouts, torch.bfloat16) for w in (changed, model[2]))
        assert near.max_abs < NOISE < far.max_abs, (name, near, far)


def test_tokens_are_drawn_as_rz_draws_them(stock, model):
    """The same seeds and nearly the same logits give mostly the same tokens as the plain engine."""
    stock.publish(model[2], stock.version + 1)
    plain = PlainEngine(*model[1:], dtype=torch.bfloat16, **SETTINGS)
    first = lambda engine: {key: rollout.response_ids[0] for key, rollout in finish(engine, mixed()).items()}
    drawn = first(stock), first(plain)
    assert sum(drawn[0][key] == drawn[1][key] for key in drawn[1]) >= len(drawn[1]) - 2


def test_an_untied_head_and_biases(several, tmp_path):
    config = make_tiny(tmp_path / "qwen2", family="qwen2", heads=2, kv_heads=1, head_dim=32, vocab_size=96, tied=False)
    weights = [random_params(config, seed=seed, deviation=0.15) for seed in (1, 2)]
    biased = [{n: v + 0.3 if n.endswith("bias") else v for n, v in params.items()} for params in weights]
    engine = stock_engine(tmp_path / "qwen2", config, biased[0], dtype=torch.bfloat16, **SETTINGS)
    engine.publish(biased[1], 1)
    rollouts = list(finish(engine, mixed(6)).values())
    near, without = (audit({1: w}, config, rollouts, torch.bfloat16) for w in (biased[1], weights[1]))
    assert 0 < near.max_abs < NOISE < without.max_abs
    assert place(engine._model, "lm_head.weight")[0] is engine._model.lm_head
    engine.close()
