import json

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rz.audit
from rz.audit import AGREE, AuditResult, audit_run, first_difference, is_audited, online_audit, replay
from rz.batch import Request, Rollout
from rz.checkpoint import version_folder
from rz.engine.plain import PlainEngine
from rz.models.dense import random_params
from rz.models.hf import save_checkpoint
from rz.models.make import make_tiny
from rz.report import ROLLOUTS, rollout_line, write_config
from rz.snapshot import before


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, config, params of versions 0 and 1)."""
    folder = tmp_path_factory.mktemp("audit") / "model"
    config = make_tiny(folder.with_name("random"), vocab_size=64)
    versions = [random_params(config, seed=seed, deviation=0.15) for seed in (0, 1)]
    save_checkpoint(folder, versions[0], config)
    return folder, config, versions


@pytest.fixture(scope="module")
def rollouts(model):
    """Six responses, 70 tokens in all, at two temperatures; version 1 came after 6 tokens."""
    _, config, versions = model
    engine = PlainEngine(config, versions[0], dtype=torch.float32, slots=6, max_length=128)
    for i, tokens in enumerate((4, 20, 10, 12, 16, 8)):
        prompt, temperature = range(1, 3 + 7 * i), (1.0, 0.6)[i % 2]
        request = Request(
            prompt_index=i, sample=i % 2, prompt_ids=prompt, seed=i, max_tokens=tokens, temperature=temperature
        )
        engine.submit(request)
    done = [rollout for _ in range(6) for rollout in engine.step()]
    engine.publish(versions[1], 1)
    while engine.running():
        done += engine.step()
    engine.close()
    return sorted(done, key=lambda rollout: rollout.prompt_index)


def test_counts_of_each_version_by_hand(model, rollouts):
    # The first response had all its 4 tokens before version 1, the others 6 each: 4 + 5 * 6 = 34; 70 - 34 = 36.
    _, config, versions = model
    for version, tokens in ((0, 34), (1, 36), (2, 0)):
        params = versions[min(version, 1)]
        result = replay(params, config, rollouts, version=version, dtype=torch.float32)
        assert result == AuditResult(tokens=tokens, differing=0, max_abs=0.0, first=None)


def test_other_weights_differ_and_the_first_token_is_named(model, rollouts):
    _, config, versions = model
    result = replay(versions[0], config, rollouts[1:], version=1, dtype=torch.float32)
    assert result.tokens == 36 and result.differing == 36 and result.max_abs > 0.1
    assert result.first in {(1, 1, 6), (2, 0, 6)}  # responses go by temperature


@pytest.mark.parametrize("size", [1, 40, 4096])
def test_the_size_of_a_pack_changes_nothing(model, rollouts, monkeypatch, size):
    _, config, versions = model
    monkeypatch.setattr(rz.audit, "PACK_TOKENS", size)
    assert replay(versions[0], config, rollouts[::-1], version=0, dtype=torch.float32).differing == 0
    changed = replay(versions[0], config, rollouts, version=1, dtype=torch.float32)
    assert (changed.tokens, changed.differing) == (36, 36)


def _with(rollout, index, value):
    logprobs = rollout.behaviour_logprobs.clone()
    logprobs[index] = value
    return attrs.evolve(rollout, behaviour_logprobs=logprobs)


def test_one_unit_in_the_last_place_of_one_logprob_is_one_differing_token(model, rollouts):
    _, config, versions = model
    right = rollouts[2].behaviour_logprobs[3]
    moved = torch.nextafter(right, torch.tensor(0.0))
    changed = [*rollouts[:2], _with(rollouts[2], 3, moved), *rollouts[3:]]
    result = replay(versions[0], config, changed, version=0, dtype=torch.float32)
    assert result == AuditResult(tokens=34, differing=1, max_abs=float(moved - right), first=(2, 0, 3))


def test_a_logprob_that_is_not_a_number_differs_by_inf(model, rollouts):
    _, config, versions = model
    changed = [_with(rollouts[0], 1, torch.nan)]
    result = replay(versions[0], config, changed, version=0, dtype=torch.float32)
    assert result == AuditResult(tokens=4, differing=1, max_abs=torch.inf, first=(0, 0, 1))


def test_bits_are_compared_not_values(model, rollouts, monkeypatch):
    # -0.0 == 0.0 and NaN != NaN: by bits the first pair differs and the second does not.
    reported = _with(_with(_with(rollouts[0], 0, -0.0), 1, 0.0), 2, torch.nan)
    replayed = reported.behaviour_logprobs.clone()
    replayed[0] = 0.0
    monkeypatch.setattr(rz.audit, "packed_logprobs", lambda *_, **__: replayed)
    result = replay(model[2][0], model[1], [reported], version=0, dtype=torch.float32)
    assert result == AuditResult(tokens=4, differing=1, max_abs=0.0, first=(0, 0, 0))


def test_results_add_up_and_keep_the_first():
    first = AuditResult(tokens=3, differing=1, max_abs=0.5, first=(1, 0, 2))
    second = AuditResult(tokens=4, differing=2, max_abs=0.25, first=(0, 0, 0))
    assert first + second == AuditResult(tokens=7, differing=3, max_abs=0.5, first=(1, 0, 2))
    assert (AuditResult() + second).first == (0, 0, 0)


# The share that is audited


def _empty(prompt, sample, **changes):
    nothing = {"behaviour_logprobs": torch.zeros(0), "policy_versions": torch.zeros(0, dtype=torch.int64)}
    fields = dict(prompt_ids=[1], response_ids=[], stop_reason="length", seed=0, temperature=1.0) | changes
    return Rollout(prompt_index=prompt, sample=sample, **nothing, **fields)


@given(st.integers(0, 2**40), st.integers(0, 2**30), st.integers(0, 64), st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_the_choice_depends_on_seed_prompt_and_sample_alone_and_grows_with_the_share(seed, prompt, sample, share):
    chosen = is_audited(seed, _empty(prompt, sample), share)
    assert chosen == is_audited(seed, _empty(prompt, sample, seed=9, temperature=0.5, prompt_ids=[4, 4]), share)
    assert is_audited(seed, _empty(prompt, sample), 1.0) and not is_audited(seed, _empty(prompt, sample), 0.0)
    assert not chosen or is_audited(seed, _empty(prompt, sample), min(1.0, share + 0.1))


def test_the_share_is_kept_and_each_number_matters():
    # 4,000 choices at 0.25: a standard deviation of 27; five of them.
    responses = [_empty(prompt, sample) for prompt in range(500) for sample in range(8)]
    chosen = lambda seed: [is_audited(seed, rollout, 0.25) for rollout in responses]
    assert abs(sum(chosen(0)) - 1000) < 137 and chosen(0) != chosen(1)
    first = chosen(0)
    groups = {tuple(first[start : start + 8]) for start in range(0, 4000, 8)}
    assert len(groups) > 50 and any(0 < sum(group) < 8 for group in groups)


def test_the_online_audit_replays_the_new_tokens_of_chosen_responses(model, rollouts):
    _, config, versions = model
    audit = lambda share: online_audit(config, dtype=torch.float32, share=share, run_seed=3)
    old = [(before(rollout, 1), 0) for rollout in rollouts]
    new = [(rollout, len(part.response_ids)) for rollout, (part, _) in zip(rollouts, old, strict=True)]

    def counts(found, grown):
        reported = {(r.prompt_index, r.sample): r.behaviour_logprobs for r, _ in grown}
        equal = [torch.equal(values, reported[key][places]) for key, (places, values) in found.items()]
        return sum(len(places) for places, _ in found.values()), sum(equal), len(found)

    assert counts(audit(1.0)(versions[0], old), old) == (34, 6, 6)
    assert audit(0.0)(versions[0], old) == {}
    chosen = [(rollout, first) for rollout, first in old if is_audited(3, rollout, 0.5)]
    tokens = sum(len(rollout.response_ids) for rollout, _ in chosen)
    assert 0 < tokens < 34 and counts(audit(0.5)(versions[0], old), old) == (tokens, len(chosen), len(chosen))
    assert counts(audit(1.0)(versions[1], new), new) == (36, 5, 5)
    assert counts(audit(1.0)(versions[0], new), new) == (36, 0, 5)  # of other weights than it is given


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_out_of_range_is_refused(model, share):
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\], got"):
        online_audit(model[1], dtype=torch.float32, share=share, run_seed=0)


# Where a difference begins


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1, 2, 140])
def test_nothing_is_named_where_all_ops_agree(model, dtype, length):
    prefix = [5 + place % 50 for place in range(length)]
    assert first_difference(model[2][0], model[1], prefix, dtype=dtype) is None


@pytest.mark.parametrize("broken_layer", [0, 1])
def test_an_op_that_differs_in_decode_alone_is_named(model, monkeypatch, broken_layer):
    real, calls = rz.audit.paged_attention, []

    def attention(*arguments, **settings):
        calls.append(len(calls) % 2)  # layers take turns
        result = real(*arguments, **settings)
        return torch.nextafter(result, torch.tensor(torch.inf)) if calls[-1] == broken_layer else result

    monkeypatch.setattr(rz.audit, "paged_attention", attention)
    name = first_difference(model[2][0], model[1], range(1, 30), dtype=torch.float32)
    assert name == f"layers.{broken_layer}.attention"


# A run's folder


@pytest.fixture
def run_folder(tmp_path, model, rollouts):
    """A run that kept versions 0 and 1 and logged the six responses."""
    folder, config, versions = model
    write_config(tmp_path, {"dtype": "float32"})
    for version, params in enumerate(versions):
        save_checkpoint(version_folder(tmp_path, version), params, config, source=folder)
    (tmp_path / ROLLOUTS).write_text("".join(rollout_line(rollout, 0.5, 1) + "\n" for rollout in rollouts))
    return tmp_path


def test_a_run_is_replayed_whole(run_folder):
    assert audit_run(run_folder) == (AuditResult(tokens=70), None)


def test_tokens_whose_weights_were_not_kept_are_not_counted(run_folder):
    for file in (run_folder / "checkpoints" / "version-000000").iterdir():
        file.unlink()
    (run_folder / "checkpoints" / "version-000000").rmdir()
    assert audit_run(run_folder) == (AuditResult(tokens=36), None)


def test_an_audit_of_nothing_is_refused(run_folder):
    (run_folder / ROLLOUTS).write_text("")
    with pytest.raises(ValueError, match=r"run must hold tokens of a version whose weights it kept .*, got none"):
        audit_run(run_folder)


def test_a_logged_token_outside_the_vocabulary_is_refused(run_folder):
    lines = (run_folder / ROLLOUTS).read_text().splitlines()
    line = json.loads(lines[0])
    line["response_ids"][0] = 10**6
    (run_folder / ROLLOUTS).write_text("\n".join([json.dumps(line), *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"tokens in .*rollouts.jsonl must be in \[0, \d+\), got 1000000"):
        audit_run(run_folder)


def test_a_head_that_differs_in_decode_alone_is_named(model, monkeypatch):
    real = rz.audit.linear
    monkeypatch.setattr(rz.audit, "linear", lambda x, w: real(x, w) if len(x) > 1 else real(x, w) + 1)
    assert first_difference(model[2][0], model[1], range(1, 30), dtype=torch.float32) == "lm_head"


def test_a_changed_log_is_found_and_the_kernels_are_not_blamed(run_folder):
    lines = (run_folder / ROLLOUTS).read_text().splitlines()
    line = json.loads(lines[4])
    line["behaviour_logprobs"][9] -= 1.0
    lines[4] = json.dumps(line)
    (run_folder / ROLLOUTS).write_text("\n".join(lines) + "\n")
    result, where = audit_run(run_folder)
    assert (result.tokens, result.differing, result.first) == (70, 1, (4, 0, 9)) and where == AGREE
    assert result.max_abs == pytest.approx(1.0, abs=1e-6)


def test_a_run_whose_decode_differed_names_the_op(run_folder, model, monkeypatch):
    real = rz.audit.paged_attention
    monkeypatch.setattr(rz.audit, "paged_attention", lambda *a, **k: real(*a, **k) * (1 + 2**-20))
    assert audit_run(run_folder) == (AuditResult(tokens=70), None)  # a replay does not decode
    folder, config, versions = model
    save_checkpoint(run_folder / "checkpoints" / "version-000001", versions[0], config)
    result, where = audit_run(run_folder)
    assert (result.tokens, result.differing) == (70, 36) and where == "layers.0.attention"


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="run must be the folder of a run, with run.json"):
        audit_run(tmp_path)
    write_config(tmp_path, {"dtype": "float32"})
    with pytest.raises(ValueError, match="run must be the folder of a run, with rollouts.jsonl"):
        audit_run(tmp_path)
