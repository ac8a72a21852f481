"""Batches for the tests of the steps, made directly of tensors, and a toy policy."""

import attrs
import torch
from hypothesis import strategies as st

from rz.batch import TrainBatch
from rz.steps import PolicyState, adamw_init


def batch_of(behaviour, mask=None, *, rewards=None, group_ids=None, versions=None, response_ids=None):
    """[B, T] behaviour_logprobs and whatever else the test is about; all live, version 0, one group by default."""
    behaviour = torch.as_tensor(behaviour, dtype=torch.float32)
    rows, width = behaviour.shape
    return TrainBatch(
        prompt_ids=torch.zeros(rows, 1, dtype=torch.int64),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        response_ids=torch.zeros(rows, width, dtype=torch.int64) if response_ids is None else response_ids,
        mask=torch.ones(rows, width, dtype=torch.bool) if mask is None else torch.as_tensor(mask),
        behaviour_logprobs=behaviour,
        policy_versions=torch.zeros(rows, width, dtype=torch.int64) if versions is None else torch.tensor(versions),
        rewards=torch.zeros(rows) if rewards is None else torch.as_tensor(rewards, dtype=torch.float32),
        group_ids=torch.zeros(rows, dtype=torch.int64) if group_ids is None else torch.as_tensor(group_ids),
        temperature=1.0,
    )


@st.composite
def cases(draw):
    """(logprobs [B, T] float64, a batch with any mask, advantages [B], weights [B, T])."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    normal = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)
    batch = batch_of(-normal(rows, width).abs(), normal(rows, width) > -0.5)
    return -normal(rows, width).abs(), batch, normal(rows), normal(rows, width).exp()


V, T, B = 5, 6, 8


def table_logprobs(params, batch):
    """A policy without context: position t has the logits table[t] + bias. Reads response_ids and nothing else."""
    rows = (params["table"] + params["bias"]).log_softmax(-1)[None].expand(len(batch.mask), -1, -1)
    return rows.gather(2, batch.response_ids[:, :, None]).squeeze(2).masked_fill(~batch.mask, 0)


def initial(version=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    params = {"table": torch.randn(T, V, generator=rng), "bias": torch.randn(V, generator=rng)}
    return PolicyState(params=params, optimizer=adamw_init(params), version=version)


def sampled(state, *, noise=0.3, seed=1, lengths=(6, 1, 3, 0, 4, 6, 2, 5)):
    """Eight responses in three groups, ids interleaved, with q near p; one is empty."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.arange(T)[None, :] < torch.tensor(lengths)[:, None]
    batch = batch_of(
        torch.zeros(B, T), mask, rewards=[1, 0, 0.5, 0.7, 0, 1, 0.7, 0.3], group_ids=[2, 9, 2, 4, 9, 2, 4, 2],
        versions=torch.randint(0, 4, (B, T), generator=rng).tolist(),
        response_ids=torch.randint(V, (B, T), generator=rng),
    )  # fmt: skip
    behaviour = table_logprobs(state.params, batch) + noise * torch.randn(B, T, generator=rng)
    return attrs.evolve(batch, behaviour_logprobs=behaviour.masked_fill(~mask, torch.nan))


def bits(params):
    return {name: tensor.view(torch.int32).clone() for name, tensor in params.items()}


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
