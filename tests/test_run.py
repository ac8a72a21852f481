"""A run that is stopped loses no finished response from its log, and counts what it must."""

import json

import attrs
import pytest
import torch

import rz.run
from rz.config import TrainConfig
from rz.models.make import make_tiny
from rz.report import read_metrics, read_rollouts
from rz.tasks import Arithmetic

SIZES = {"vocab_size": 15, "hidden_size": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "max_positions": 64}


@pytest.fixture
def config(tmp_path):
    make_tiny(tmp_path / "model", **SIZES)
    return TrainConfig(
        model=tmp_path / "model", task="arithmetic", out=tmp_path / "run", engine="plain", updates=6, group_size=2,
        groups_per_update=2, max_lag=2, slots=12, max_tokens=6, max_length=16, audit_share=0.0, eval_prompts=0,
    )  # fmt: skip


def test_responses_finished_but_not_consumed_are_logged(config):
    # max_lag 2 and one group an update: three groups are in flight, and end together after their one token. Two of
    # them are consumed by the updates before the evaluation that stops the run; the third is not.
    stopped = attrs.evolve(
        config, updates=50, groups_per_update=1, max_tokens=1, eval_every=2, eval_prompts=1, stop_accuracy=1.0
    )

    class Always(Arithmetic):
        def score(self, prompt, response_ids):
            return 1.0

    rz.run.run(stopped, Arithmetic(), Always(split="held_out"))
    assert len(read_metrics(config.out)) == 2
    lines = [json.loads(line) for line in (config.out / "rollouts.jsonl").read_text().splitlines()]
    unused = [line for line in lines if line["consumed_at"] is None]
    assert (len(lines), len(unused)) == (6, 2) and all(line["reward"] is None for line in unused)
    assert (
        len({(line["prompt"], line["sample"]) for line in lines}) == len(lines) == len(list(read_rollouts(config.out)))
    )


def test_a_learner_whose_bits_are_not_the_engines_is_counted_at_lag_0(config, monkeypatch):
    real = rz.run.response_logprobs
    moved = lambda *arguments, **more: real(*arguments, **more) * (1 + torch.finfo(torch.float32).eps)
    assert rz.run.run(config, Arithmetic(), None)["tokens differing"] == 0
    monkeypatch.setattr(rz.run, "response_logprobs", moved)
    assert (
        rz.run.run(attrs.evolve(config, out=config.out.with_name("moved")), Arithmetic(), None)["tokens differing"] > 0
    )


def test_a_run_by_turns_gives_its_optimizer_up_and_has_the_same_bits(config, monkeypatch):
    real, given = rz.run.update, []

    def noted(state, batch, *, donate, **settings):
        after, metrics = real(state, batch, donate=donate, **settings)
        names = list(state.optimizer.first)
        given.append(all(after.optimizer.first[name] is state.optimizer.first[name] for name in names))
        return after, metrics

    def keeping(state, batch, *, donate, **settings):
        return real(state, batch, donate=False, **settings)

    runs = {}
    for name, step in (("gives", noted), ("keeps", keeping)):
        monkeypatch.setattr(rz.run, "update", step)
        out = config.out.with_name(name)
        rz.run.run(attrs.evolve(config, out=out), Arithmetic(), None)
        timed = ("seconds", "memory", "per_second")
        runs[name] = [{k: v for k, v in line.items() if not any(t in k for t in timed)} for line in read_metrics(out)]
    assert given == [True] * 6 and runs["gives"] == runs["keeps"]
    for mode in ({"overlap_steps": 2}, {"publish_every": 2}, {"exact_lag": 1}):
        given.clear()
        monkeypatch.setattr(rz.run, "update", noted)
        rz.run.run(attrs.evolve(config, out=config.out.with_name(next(iter(mode))), **mode), Arithmetic(), None)
        assert given == [False] * 6
