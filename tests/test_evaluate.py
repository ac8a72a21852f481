import attrs
import pytest
import torch

from rz.batch import Prompt
from rz.evaluate import evaluate
from rz.models.hf import load_config, load_params
from rz.models.make import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config = make_tiny(folder, layers=1, hidden_size=32, heads=2, kv_heads=1, intermediate_size=48, vocab_size=15)
    return load_params(folder, load_config(folder)), config


@attrs.define
class Answers:
    """Question i is the prompt (1, 3 + i); question i is right if i is in `right`. Keeps the responses it saw."""

    right: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = (2,)
    seen: dict[int, tuple[int, ...]] = attrs.Factory(dict)

    def prompt(self, index):
        return Prompt(index=index, token_ids=(1, 3 + index))

    def score(self, prompt, response_ids):
        self.seen[prompt.index] = tuple(response_ids)
        return float(prompt.index in self.right)


class AsyncAnswers(Answers):
    async def score(self, prompt, response_ids):
        return super().score(prompt, response_ids)


def run(model, task, **changes):
    settings = {"questions": 4, "temperature": 1.0, "max_tokens": 6, "max_length": 16, "slots": 4, "seed": 0}
    return evaluate(*model, task, **settings | changes, dtype=torch.float32)


@pytest.mark.parametrize("kind", [Answers, AsyncAnswers])
def test_mean_and_interval_by_hand(model, kind):
    # n = 4, z = 1.96, z^2 = 3.8415. Mean 1/2: centre 1/2, half = 1.96 / 1.96037 * sqrt(1/16 + 3.8415/64) = 0.3500.
    # Mean 0: centre = half = z^2/2n / (1 + z^2/n), so [0, z^2 / (n + z^2)] = [0, 0.4899]; mean 1: the mirror image.
    for right, mean, low, high in (((0, 3), 0.5, 0.15, 0.85), ((), 0.0, 0.0, 0.4899), ((0, 1, 2, 3), 1.0, 0.5101, 1.0)):
        accuracy = run(model, kind(right=right))
        assert (accuracy.mean, accuracy.questions) == (mean, 4)
        assert (accuracy.low, accuracy.high) == pytest.approx((low, high), abs=1e-4)


def test_each_question_is_answered_once_within_its_limits(model):
    task = Answers()
    accuracy = run(model, task)
    assert sorted(task.seen) == [0, 1, 2, 3]
    for response in task.seen.values():
        assert 1 <= len(response) <= 6 and 2 not in response[:-1]
        assert len(response) == 6 or response[-1] == 2
    assert accuracy.tokens_mean == sum(len(response) for response in task.seen.values()) / 4


def test_responses_depend_on_the_seed_and_not_on_the_slots(model):
    seen = []
    for changes in ({}, {"slots": 1}, {"seed": 1}):
        task = Answers()
        run(model, task, **changes)
        seen.append(task.seen)
    assert seen[0] == seen[1] != seen[2]


def test_a_low_temperature_is_as_good_as_greedy(model):
    seen = []
    for seed in (0, 1, 2):
        task = Answers()
        run(model, task, temperature=0.001, seed=seed)
        seen.append(task.seen)
    assert seen[0] == seen[1] == seen[2]


def test_no_question_and_a_question_too_long_are_refused(model):
    with pytest.raises(ValueError, match="questions must be >= 1, got 0"):
        run(model, Answers(), questions=0)
    with pytest.raises(ValueError, match="max_tokens must be <= max_length 7, got 2 \\+ 6 = 8"):
        run(model, Answers(), max_length=7)


def test_a_task_with_fewer_questions_is_asked_each_once(model):
    class Three(Answers):
        def __len__(self):
            return 3

    assert run(model, Three(right=(0,)), questions=30).questions == 3
