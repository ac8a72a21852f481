import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rz.batch import Group, Prompt, Request, Rollout, TrainBatch, stack

EOS = 2


def rollout(prompt_index=0, sample=0, prompt_ids=(1, 5), response_ids=(7, 8, EOS), **changes):
    count = len(response_ids)
    fields = {
        "behaviour_logprobs": -torch.arange(1, count + 1, dtype=torch.float32),
        "policy_versions": torch.arange(count),
        "stop_reason": "stop",
        "seed": 0,
        "temperature": 1.0,
    }
    return Rollout(
        prompt_index=prompt_index, sample=sample, prompt_ids=prompt_ids, response_ids=response_ids, **(fields | changes)
    )


def group(index=0, responses=((7, EOS),), prompt_ids=(1, 5), rewards=None, **changes):
    return Group(
        prompt=Prompt(index=index, token_ids=prompt_ids),
        rollouts=[rollout(index, i, prompt_ids, ids, **changes) for i, ids in enumerate(responses)],
        rewards=[0.0] * len(responses) if rewards is None else rewards,
    )


def request(**changes):
    fields = {"prompt_index": 4, "sample": 1, "prompt_ids": (1, 5), "seed": 3, "max_tokens": 8}
    return Request(**(fields | changes))


def tensors_of(batch):
    values = {field.name: getattr(batch, field.name) for field in attrs.fields(TrainBatch)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


@st.composite
def group_lists(draw):
    ids = st.integers(0, 3)  # few tokens, so that pad_id and EOS turn up among the sampled ones
    responses = st.lists(st.lists(ids, max_size=5), max_size=3)
    groups = draw(st.lists(st.tuples(st.lists(ids, min_size=1, max_size=4), responses), min_size=1, max_size=4))
    groups = [group(i, tuple(map(tuple, r)), tuple(p), list(range(len(r)))) for i, (p, r) in enumerate(groups)]
    return groups if any(g.rollouts for g in groups) else [*groups, group(len(groups))]


@pytest.mark.parametrize("value", [Prompt(index=0, token_ids=(1,)), request(), rollout(), group(), stack([group()])])
def test_values_never_change(value):
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, attrs.fields(type(value))[0].name, None)


def test_ids_become_tuples_of_python_integers():
    prompt = Prompt(index=0, token_ids=torch.tensor([1, 5]))
    assert prompt.token_ids == (1, 5) and type(prompt.token_ids[0]) is int
    assert rollout(response_ids=[7, 8]).response_ids == (7, 8) and request(stop_ids=[2, 9]).stop_ids == (2, 9)
    assert group(rewards=[1]).rewards == (1.0,) and type(group(rewards=[1]).rewards[0]) is float


def test_request_id_and_defaults():
    assert request().id == (4, 1) and request().temperature == 1.0 and request().stop_ids == ()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Prompt(index=-1, token_ids=(1,)), "index must be >= 0, got -1"),
        (lambda: Prompt(index=0, token_ids=()), "token_ids must hold at least one token, got none"),
        (lambda: request(prompt_ids=()), "prompt_ids must hold at least one token, got none"),
        (lambda: request(max_tokens=0), "max_tokens must be >= 1, got 0"),
        (lambda: request(temperature=0.0), "temperature must be > 0 and finite, got 0.0"),
        (lambda: request(temperature=float("inf")), "temperature must be > 0 and finite, got inf"),
        (lambda: request(temperature=float("nan")), "temperature must be > 0 and finite, got nan"),
        (lambda: request(seed=-1), r"seed must be in \[0, 2\*\*63\), got -1"),
        (lambda: request(seed=2**63), r"seed must be in \[0, 2\*\*63\), got 9223372036854775808"),
        (
            lambda: rollout(behaviour_logprobs=torch.zeros(2)),
            r"behaviour_logprobs must have one entry a response token \[3\], got \[2\]",
        ),
        (
            lambda: rollout(policy_versions=torch.zeros(4, dtype=torch.int64)),
            r"policy_versions must have one entry a response token \[3\], got \[4\]",
        ),
        (lambda: rollout(stop_reason="eos"), "stop_reason must be one of stop, length, running, got 'eos'"),
        (lambda: group(rewards=[1.0, 2.0]), r"rewards must be one a rollout \(1\), got 2"),
        (
            lambda: Group(prompt=Prompt(index=1, token_ids=(1,)), rollouts=[rollout(2)], rewards=[0]),
            "rollouts must be of prompt 1, got one of prompt 2",
        ),
        (lambda: group(stop_reason="running"), "rollouts must be finished, got sample 0 still running"),
        (lambda: stack([]), "groups must hold at least one response, got 0 groups with none"),
        (lambda: stack([group(responses=())]), "groups must hold at least one response, got 1 groups with none"),
        (
            lambda: stack([group(0), group(1, temperature=0.6)]),
            r"temperature must be the same for every response, got \[0.6, 1.0\]",
        ),
    ],
)
def test_bad_values_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"behaviour_logprobs": torch.zeros(3).double()},
            "behaviour_logprobs must be torch.float32, got torch.float64",
        ),
        ({"policy_versions": torch.zeros(3)}, "policy_versions must be torch.int64, got torch.float32"),
    ],
)
def test_wrong_dtypes_of_a_rollout_are_refused(changes, message):
    with pytest.raises(TypeError, match=message):
        rollout(**changes)


def test_a_missing_logprob_cannot_become_a_number():
    with pytest.raises((TypeError, RuntimeError)):
        rollout(behaviour_logprobs=torch.tensor([-1.0, None, -2.0]))
    with pytest.raises(AttributeError):
        rollout(behaviour_logprobs=None)


@pytest.mark.parametrize(
    "field, value, error, message",
    [
        ("mask", torch.ones(2, 2), TypeError, "mask must be torch.bool, got torch.float32"),
        ("mask", torch.ones(4).bool(), ValueError, r"mask must have two dimensions \[B, T\], got \[4\]"),
        ("response_ids", torch.zeros(2, 3), ValueError, r"response_ids must have the shape .* got \[2, 3\]"),
        ("behaviour_logprobs", torch.zeros(2, 1), ValueError, r"behaviour_logprobs must have the shape of mask"),
        ("policy_versions", torch.zeros(2), ValueError, r"policy_versions must .* mask \[2, 2\], got \[2\]"),
        ("prompt_lengths", torch.zeros(3), ValueError, r"prompt_lengths must be one a response \[2\], got \[3\]"),
        ("rewards", torch.zeros(2, 1), ValueError, r"rewards must be one a response \[2\], got \[2, 1\]"),
        ("group_ids", torch.zeros(1), ValueError, r"group_ids must be one a response \[2\], got \[1\]"),
        ("prompt_ids", torch.zeros(3, 4), ValueError, r"prompt_ids must be \[2, P\], got \[3, 4\]"),
        ("prompt_ids", torch.zeros(2), ValueError, r"prompt_ids must be \[2, P\], got \[2\]"),
    ],
)  # fmt: skip
def test_shapes_and_dtypes_of_a_train_batch_are_checked(field, value, error, message):
    batch = stack([group(responses=((7, EOS), (8,)))])
    with pytest.raises(error, match=message):
        attrs.evolve(batch, **{field: value})


def test_stack_by_hand():
    batch = stack([group(3, ((7, EOS), ()), (1, 5), [1.0, 0.5]), group(1, ((9, 9, 9),), (4,), [-2.0])], pad_id=EOS)
    assert batch.prompt_ids.tolist() == [[1, 5], [1, 5], [4, EOS]] and batch.prompt_lengths.tolist() == [2, 2, 1]
    assert batch.response_ids.tolist() == [[7, EOS, EOS], [EOS, EOS, EOS], [9, 9, 9]]
    assert batch.mask.tolist() == [[True, True, False], [False] * 3, [True] * 3]  # the sampled EOS is trained
    assert batch.behaviour_logprobs.tolist() == [[-1, -2, 0], [0, 0, 0], [-1, -2, -3]]
    assert batch.policy_versions.tolist() == [[0, 1, 0], [0, 0, 0], [0, 1, 2]]
    assert batch.rewards.tolist() == [1.0, 0.5, -2.0] and batch.group_ids.tolist() == [3, 3, 1]
    assert batch.temperature == 1.0
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(batch).items()}
    floats, bools = {"behaviour_logprobs", "rewards"}, {"mask"}
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if name in floats else torch.bool if name in bools else torch.int64)


def test_masks_and_eos_pad_equal_to_eos_with_several_eos_and_a_length_stop():
    # EOS in mid-response, twice at the end, as the only token, and a length stop without one
    responses = ((7, EOS, 8, EOS), (7, 8, EOS, EOS), (EOS,), (7, 8))
    batch = stack([group(0, responses)], pad_id=EOS)
    assert batch.mask.sum(1).tolist() == [4, 4, 1, 2]
    for row, ids in enumerate(responses):
        assert tuple(batch.response_ids[row][batch.mask[row]].tolist()) == ids


def test_only_empty_responses_still_have_a_column():
    batch = stack([group(0, ((), ()))])
    assert batch.mask.shape == (2, 1) and not batch.mask.any()


@settings(max_examples=50, deadline=None)
@given(groups=group_lists(), pad_id=st.integers(0, 3))
def test_every_sampled_token_comes_through_once_and_padding_never_matters(groups, pad_id):
    batch, other = stack(groups, pad_id=pad_id), stack(groups, pad_id=77)
    rollouts = [r for g in groups for r in g.rollouts]
    assert len(batch.mask) == len(rollouts) and torch.equal(batch.mask, other.mask)
    assert int(batch.mask.sum()) == sum(len(r.response_ids) for r in rollouts)
    for row, r in enumerate(rollouts):
        live = batch.mask[row]
        assert tuple(batch.response_ids[row][live].tolist()) == r.response_ids
        assert tuple(batch.prompt_ids[row, : batch.prompt_lengths[row]].tolist()) == r.prompt_ids
        assert torch.equal(batch.behaviour_logprobs[row][live], r.behaviour_logprobs)
        assert torch.equal(batch.policy_versions[row][live], r.policy_versions)
    for name in ("rewards", "group_ids", "prompt_lengths", "behaviour_logprobs", "policy_versions"):
        assert torch.equal(getattr(batch, name), getattr(other, name))
    assert batch.response_ids[~batch.mask].eq(pad_id).all() and other.response_ids[~batch.mask].eq(77).all()


def test_behaviour_logprobs_keep_every_bit():
    exact = torch.tensor([-0.0, -1e-45, torch.nan, -torch.inf, -0.1])
    batch = stack([group(0, ((1, 2, 3, 4, 5), (1,) * 7))])
    kept = stack([group(0, ((1, 2, 3, 4, 5),), behaviour_logprobs=exact)]).behaviour_logprobs[0]
    assert torch.equal(kept.view(torch.int32), exact.view(torch.int32)) and batch.mask.shape == (2, 7)


@settings(max_examples=50, deadline=None)
@given(groups=group_lists(), size=st.integers(1, 5))
def test_rows_cut_into_microbatches_and_keep_padding(groups, size):
    batch = stack(groups)
    parts = [batch.rows(start, start + size) for start in range(0, len(batch.mask), size)]
    for name, whole in tensors_of(batch).items():
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), whole)
    assert all(part.temperature == batch.temperature and part.mask.shape[1] == batch.mask.shape[1] for part in parts)
    assert len(batch.rows(0, 10**6).mask) == len(batch.mask)
