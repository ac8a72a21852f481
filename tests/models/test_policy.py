import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.batch import TrainBatch
from rz.models.dense import DenseConfig, random_params
from rz.models.policy import pack, packed_logprobs, response_logprobs

CONFIG = DenseConfig(
    model_type="qwen3", vocab_size=50, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2, head_dim=16,
    rms_eps=1e-6, rope_theta=1e4, max_positions=1024, tied=True, qkv_bias=False, qk_norm=True, windows=(None, 20),
)  # fmt: skip
PARAMS = random_params(CONFIG, seed=0, deviation=0.3)


def example(prompts, responses, groups, seed=0):
    """Random tokens: prompts by group, lengths of responses in order."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(CONFIG.vocab_size, shape, generator=rng)
    by_group = {group: draw(max(prompts.values())) for group in prompts}
    lengths = torch.tensor(responses)
    shape = len(responses), max(1, max(responses))
    return TrainBatch(
        prompt_ids=torch.stack([by_group[group] for group in groups]),
        prompt_lengths=torch.tensor([prompts[group] for group in groups]),
        response_ids=draw(*shape),
        mask=torch.arange(shape[1])[None, :] < lengths[:, None],
        behaviour_logprobs=torch.zeros(shape),
        policy_versions=torch.zeros(shape, dtype=torch.int64),
        rewards=torch.zeros(len(responses)),
        group_ids=torch.tensor(groups),
        temperature=0.7,
    )


def unshared(batch):
    """The same responses, each in a group of its own."""
    return attrs.evolve(batch, group_ids=torch.arange(len(batch.group_ids)))


MIXED = example({7: 3, 2: 1, 5: 130}, [4, 9, 1, 0, 150, 2, 6, 1], [7, 2, 7, 7, 5, 2, 5, 5])


@pytest.mark.parametrize("within", [False, True])
def test_gradients_by_torch_func_are_those_of_backward(within):
    batch = example({7: 3, 2: 1}, [4, 9, 1, 0], [7, 2, 7, 7])
    loss = lambda params, batch: response_logprobs(params, CONFIG, batch, dtype=torch.float32).sum()
    rows = batch.rows(1, 4)
    leaves = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
    loss(leaves, rows).backward()
    grads = torch.func.grad(lambda params: loss(params, batch.rows(1, 4) if within else rows))(PARAMS)
    assert all(torch.equal(grads[name], leaf.grad) for name, leaf in leaves.items())


def test_packed_by_hand():
    # Group 7 has prompt a b and responses c d e, f and none; group 2 prompt g and response h i, alone.
    batch = attrs.evolve(
        example({7: 2, 2: 1}, [3, 2, 1, 0], [7, 2, 7, 7]),
        prompt_ids=torch.tensor([[1, 2], [7, 0], [1, 2], [1, 2]]),
        response_ids=torch.tensor([[3, 4, 5], [8, 9, 0], [6, 0, 0], [0, 0, 0]]),
    )
    packed = pack(batch)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 7, 8]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.lengths == (2, 2, 2) and packed.prefixes == (None, 0, None)
    assert packed.rows.tolist() == [1, 2, 3, 4, 5, 1]
    assert packed.targets.tolist() == [3, 4, 5, 8, 9, 6]


def test_equal_prompts_of_two_groups_and_other_prompts_of_one_are_not_shared():
    batch = example({0: 2, 1: 2}, [2, 2], [0, 1])
    same = attrs.evolve(batch, prompt_ids=batch.prompt_ids[:1].expand(2, -1))
    assert pack(same).prefixes == (None, None)
    assert pack(attrs.evolve(batch, group_ids=torch.zeros(2, dtype=torch.int64))).prefixes == (None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_and_alone_have_the_same_bits(dtype):
    with torch.no_grad():
        got = response_logprobs(PARAMS, CONFIG, MIXED, dtype=dtype)
        assert torch.equal(got, response_logprobs(PARAMS, CONFIG, unshared(MIXED), dtype=dtype))
        assert not got[~MIXED.mask].any() and (got[MIXED.mask] < 0).all()
        for row in range(len(got)):
            one = response_logprobs(PARAMS, CONFIG, MIXED.rows(row, row + 1), dtype=dtype)
            assert torch.equal(one[0], got[row]), row


def test_bits_of_whole_sequences():
    for row, count in enumerate(MIXED.mask.sum(1).tolist()):
        if count:
            prompt = MIXED.prompt_ids[row, : MIXED.prompt_lengths[row]]
            tokens = torch.cat((prompt, MIXED.response_ids[row, :count]))
            rows = torch.arange(count) + len(prompt) - 1
            expected = packed_logprobs(PARAMS, CONFIG, tokens, [len(tokens)], rows, temperature=0.7)
            got = response_logprobs(PARAMS, CONFIG, MIXED, dtype=torch.float32)[row, :count]
            assert torch.equal(got, expected), row


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_any_batch_has_the_same_bits(data):
    groups = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
    responses = data.draw(st.lists(st.integers(0, 20), min_size=len(groups), max_size=len(groups)))
    batch = example({group: data.draw(st.integers(1, 40)) for group in range(3)}, responses, groups)
    with torch.no_grad():
        got, alone = (response_logprobs(PARAMS, CONFIG, b, dtype=torch.float32) for b in (batch, unshared(batch)))
    assert torch.equal(got, alone)


@pytest.mark.parametrize(
    "batch",
    [
        MIXED,
        example({0: 10, 1: 50}, [51, 51, 11, 11], [0, 0, 1, 1]),  # whole responses of one as long as the other's prompt
        example({0: 50, 1: 10}, [11, 11, 51, 51], [0, 0, 1, 1]),
        example({0: 40, 1: 40}, [21, 21, 21], [0, 1, 1]),
    ],
    ids=range(4),
)
def test_gradients_of_shared_prompts(batch):
    above = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))

    def grads(batch):
        leaves = {name: value.clone().requires_grad_() for name, value in PARAMS.items()}
        (response_logprobs(leaves, CONFIG, batch, dtype=torch.float32) * above).sum().backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    shared, again, alone = grads(batch), grads(batch), grads(unshared(batch))
    for name, grad in shared.items():
        assert torch.equal(grad, again[name])
        # the same float32 terms added up in another order
        scale = float(alone[name].abs().max())
        torch.testing.assert_close(grad, alone[name], rtol=1e-4, atol=1e-5 * scale)


def test_a_batch_without_tokens_gives_zeros():
    batch = example({0: 2}, [0, 0], [0, 0])
    assert torch.equal(response_logprobs(PARAMS, CONFIG, batch, dtype=torch.float32), torch.zeros(2, 1))
