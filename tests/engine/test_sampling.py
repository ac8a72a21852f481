import pytest
import torch
from conftest import SETTINGS
from rollouts import all_bits, ask, audit, bits, finish, mixed, prompt

from rz.engine.plain import PlainEngine
from rz.engine.sampling import sample_tokens, uniforms


def test_every_token_has_a_logprob_and_a_version(engine):
    done = finish(engine, mixed())
    for request in mixed():
        rollout = done[request.id]
        assert len(rollout.response_ids) == len(rollout.behaviour_logprobs) == request.max_tokens
        assert rollout.stop_reason == "length"
        assert rollout.policy_versions.tolist() == [engine.version] * request.max_tokens
        assert rollout.prompt_ids == request.prompt_ids and rollout.seed == request.seed
        assert rollout.temperature == request.temperature and (rollout.behaviour_logprobs < 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_two_engines_give_identical_rollouts(model, request, dtype):
    real = request.getfixturevalue(f"vllm_{dtype}")
    real.publish(model[2], real.version + 1)
    plain = PlainEngine(*model[1:], dtype=getattr(torch, dtype), slots=3, max_length=512, step_tokens=50)
    assert all_bits(finish(real, mixed(18))) == all_bits(finish(plain, mixed(18)))


def test_responses_depend_on_neither_order_nor_company(engine):
    together = all_bits(finish(engine, mixed()))
    assert all_bits(finish(engine, mixed()[::-1])) == together
    alone = {}
    for request in mixed()[3:6]:
        alone |= all_bits(finish(engine, [request]))
    assert alone == {key: together[key] for key in alone}


def test_samples_of_a_group_differ_and_repeat(engine):
    group = [ask(3, prompt(9), sample=sample, seed=100 + sample) for sample in range(8)]
    done = finish(engine, group)
    assert len({rollout.response_ids for rollout in done.values()}) == 8
    shuffled = finish(engine, [group[i] for i in (5, 2, 7, 0, 3, 6, 1, 4)])
    assert all_bits(shuffled) == all_bits(done)


def test_two_threads_give_the_bits_of_one(engine):
    one = all_bits(finish(engine, mixed()))
    torch.set_num_threads(2)
    try:
        two = all_bits(finish(engine, mixed()))
    finally:
        torch.set_num_threads(1)
    assert two == one


def test_any_of_several_stop_ids_ends_a_response_and_stays_in_it(engine):
    (free,) = finish(engine, [ask(0, prompt(5), max_tokens=40)]).values()
    for stop_ids in ([free.response_ids[6]], [free.response_ids[20], free.response_ids[9]], free.response_ids[:1]):
        end = next(i for i, token in enumerate(free.response_ids) if token in stop_ids)
        (stopped,) = finish(engine, [ask(0, prompt(5), max_tokens=40, stop_ids=stop_ids)]).values()
        assert stopped.response_ids == free.response_ids[: end + 1] and stopped.stop_reason == "stop"
        assert torch.equal(stopped.behaviour_logprobs, free.behaviour_logprobs[: end + 1])


def test_a_stop_id_in_the_last_place_counts_as_a_stop(engine):
    (free,) = finish(engine, [ask(0, prompt(5))]).values()
    end = next(i for i, token in enumerate(free.response_ids) if i and token not in free.response_ids[:i])
    request = ask(0, prompt(5), max_tokens=end + 1, stop_ids=[free.response_ids[end]])
    assert [r.stop_reason for r in finish(engine, [request]).values()] == ["stop"]


def test_a_stop_id_in_the_prompt_or_the_end_of_sequence_of_the_config_stops_nothing(engine):
    # Padding may equal EOS: a prompt full of the stop id. The config's own 48 end-of-sequence ids are not stop ids.
    (free,) = finish(engine, [ask(0, [95] * 40, max_tokens=60)]).values()
    (same,) = finish(engine, [ask(0, [95] * 40, max_tokens=60, stop_ids=[95])]).values()
    assert min(free.response_ids) < 48 and free.stop_reason == "length"
    end = free.response_ids.index(95) + 1 if 95 in free.response_ids else 60
    assert same.response_ids == free.response_ids[:end]


def test_one_token_of_prompt_and_of_response(engine, model):
    done = finish(engine, [ask(0, [17], max_tokens=1), ask(1, [17], max_tokens=30), ask(2, prompt(300), max_tokens=1)])
    assert [len(rollout.response_ids) for _, rollout in sorted(done.items())] == [1, 30, 1]
    assert audit({engine.version: model[2]}, model[1], done.values()).differing == 0


def test_the_longest_sequence_fits_and_a_prompt_longer_than_a_step_is_sampled_with_its_seed(engine, model):
    done = finish(engine, [ask(0, prompt(300), max_tokens=212), ask(1, prompt(511), max_tokens=1)])
    assert [len(rollout.response_ids) for _, rollout in sorted(done.items())] == [212, 1]
    assert audit({engine.version: model[2]}, model[1], done.values()).differing == 0


def test_logprobs_are_of_the_tempered_distribution(engine, model):
    # At 0.6 the distribution is sharper, so a response under the same noise is another one, and likelier.
    done = finish(engine, [ask(0, prompt(9), max_tokens=200, temperature=t, sample=int(10 * t)) for t in (0.6, 1.0)])
    result = audit({engine.version: model[2]}, model[1], done.values())
    assert (result.tokens, result.differing) == (400, 0)
    assert done[0, 6].behaviour_logprobs.mean() > done[0, 10].behaviour_logprobs.mean()


def test_a_token_that_is_not_the_most_likely_has_its_own_logprob(engine, model):
    (rollout,) = finish(engine, [ask(0, [3], max_tokens=60)]).values()
    # The distribution of the first token, put together from many draws: it adds up to nearly 1, and never above.
    first = PlainEngine(*model[1:], dtype=torch.float32, **SETTINGS)
    seen = {}
    for seed in range(300):
        (sampled,) = finish(first, [ask(0, [3], max_tokens=1, seed=seed)]).values()
        seen[sampled.response_ids[0]] = float(sampled.behaviour_logprobs[0])
    assert len(seen) > 20 and 0.8 < sum(torch.tensor(list(seen.values())).exp()) <= 1.00001
    assert seen[rollout.response_ids[0]] == float(rollout.behaviour_logprobs[0])


# The draw


def test_a_draw_by_hand():
    # Cumulative 0.25, 0.75, 0.75, 1: the third token has probability 0 and is never drawn.
    logprobs = torch.tensor([[0.25, 0.5, 0.0, 0.25]]).log().expand(6, 4)
    uniform = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logprobs, uniform).tolist() == [0, 0, 1, 1, 3, 3]


def test_uniforms_are_functions_of_seed_and_index():
    seeds, indices = [5, 5, 6, 2**63 - 1], [0, 1, 0, 4000]
    together = uniforms(seeds, indices)
    assert together.dtype == torch.float64 and ((0 <= together) & (together < 1)).all()
    assert len(set(together.tolist())) == 4
    for seed, index, value in zip(seeds, indices, together, strict=True):
        assert uniforms([seed], [index]) == value


def test_draws_follow_the_distribution():
    # 20,000 draws: a share's standard deviation is at most 0.0036; five of them.
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    uniform = uniforms([9] * 20_000, list(range(20_000)))
    drawn = sample_tokens(probabilities.log().expand(20_000, 4), uniform)
    assert ((drawn.bincount(minlength=4) / 20_000 - probabilities).abs() < 0.018).all()


def test_a_logprob_that_is_not_a_number_is_refused_by_response_and_place(engine, model):
    (rollout,) = finish(engine, [ask(4, prompt(9), sample=2)]).values()
    broken = {**model[2], "norm.weight": torch.full_like(model[2]["norm.weight"], torch.nan)}
    engine.submit(ask(4, prompt(9), sample=2))
    for _ in range(3):
        engine.step()
    engine.publish(broken, engine.version + 1)
    with pytest.raises(ValueError, match="logprob must be a number, got nan .*token 3 of sample 2 of prompt 4"):
        finish(engine)
    assert bits(engine.running()[0])[0] == rollout.response_ids[:3]
