"""The rest of a response that another engine began: the same tokens, bits and versions."""

import attrs
import pytest
import torch
from conftest import SETTINGS
from rollouts import all_bits, ask, bits, finish, mixed, prompt

from rz.engine.plain import PlainEngine


@pytest.mark.parametrize("steps", [0, 1, 7, 25])
def test_a_continuation_is_the_rest_of_the_response(engine, model, other, steps):
    first = PlainEngine(*model[1:], dtype=torch.float32, version=engine.version, **SETTINGS)
    requests = {request.id: request for request in mixed()}
    done = {}
    for request in requests.values():
        first.submit(request)
    for _ in range(steps):
        done |= {(r.prompt_index, r.sample): r for r in first.step()}
    first.publish(other, engine.version + 1)
    engine.publish(other, engine.version + 1)
    rest = first.running()
    assert len(rest) + len(done) == 12 and (steps < 7 or any(r.response_ids for r in rest))
    for rollout in rest:
        engine.submit(requests[rollout.prompt_index, rollout.sample], rollout)
    assert all_bits({(r.prompt_index, r.sample): r for r in engine.running()}) == all_bits(
        {(r.prompt_index, r.sample): r for r in rest}
    )
    expected, got = finish(first), finish(engine)
    assert all_bits(got) == all_bits(expected)
    assert all(torch.equal(got[key].policy_versions, expected[key].policy_versions) for key in got)
    assert all(rollout.prompt_ids == requests[key].prompt_ids for key, rollout in got.items())


def test_steps_finish_the_same_responses_as_in_the_engine_that_was_never_left(vllm_bfloat16, model, other):
    """Under a cache so small that requests are preempted, step by step."""
    from rz.engine.vllm import VllmEngine

    requests = {request.id: request for request in mixed(16)}
    for request in requests.values():
        vllm_bfloat16.submit(request)
    for _ in range(12):
        vllm_bfloat16.step()
    vllm_bfloat16.publish(other, vllm_bfloat16.version + 1)
    rest = vllm_bfloat16.running()
    settings = dict(slots=8, max_length=512, step_tokens=37, cache_tokens=1024)
    second = VllmEngine(*model[:2], other, dtype=torch.bfloat16, version=vllm_bfloat16.version, **settings)
    for rollout in rest:
        second.submit(requests[rollout.prompt_index, rollout.sample], rollout)
    while vllm_bfloat16.running():
        ids = [[(r.prompt_index, r.sample, bits(r)) for r in engine.step()] for engine in (vllm_bfloat16, second)]
        assert ids[0] == ids[1]
    assert not second.running()
    second.close()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"prompt_ids": (1, 2)}, r"prompt_ids of the sampled part must be the request's"),
        ({"seed": 1}, "seed of the sampled part must be the request's, got 1 for 7"),
        ({"temperature": 0.5}, "temperature of the sampled part must be the request's, got 0.5 for 1.0"),
        ({"response_ids": (4, 200)}, r"response_ids must be in \[0, 96\), got 200"),
        ({"response_ids": (4, 9)}, "sampled part must be unfinished, got 2 tokens"),
        (
            {
                "response_ids": (4,) * 12,
                "behaviour_logprobs": torch.zeros(12),
                "policy_versions": torch.zeros(12, dtype=torch.int64),
            },
            "sampled part must be unfinished, got 12 tokens",
        ),
    ],
)
def test_a_part_of_another_request_or_a_whole_one_is_refused(engine, change, rule):
    request = ask(0, prompt(5), stop_ids=[9])
    engine.submit(request)
    engine.step()
    (rollout,) = engine.running()
    engine.abort([request.id])
    part = attrs.evolve(
        rollout,
        response_ids=(4, 5),
        behaviour_logprobs=torch.zeros(2),
        policy_versions=torch.zeros(2, dtype=torch.int64),
    )
    with pytest.raises(ValueError, match=rule):
        engine.submit(request, attrs.evolve(part, **change))
    assert not engine.running()
    engine.submit(request, part)
    engine.abort([request.id])
