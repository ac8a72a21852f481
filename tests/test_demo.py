"""The demo's settings and its supervised batches; the demo itself is a command."""

import pytest

from rz.demo import DemoConfig, examples
from rz.tasks import Arithmetic


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("warm_up", 1.0, r"warm_up must be in \[0, 1\), got 1.0"),
        ("max_lag", -1, "max_lag must be >= 0, got -1"),
        ("updates", 0, "updates must be >= 1, got 0"),
        ("audit_share", 7.0, r"audit_share must be in \[0, 1\], got 7.0"),
        ("target", 2.0, r"stop_accuracy must be in \[0, 1\], got 2.0"),
    ],
)
def test_a_bad_setting_is_refused_before_the_warm_up(field, value, rule):
    with pytest.raises(ValueError, match=rule):
        DemoConfig(**{field: value})


def test_examples_are_the_questions_with_their_right_answers():
    task = Arithmetic(digits=2, seed=3)
    batch = examples(task, 5, 2)
    for row, index in enumerate((5, 6)):
        length = int(batch.mask[row].sum())
        assert tuple(batch.response_ids[row, :length].tolist()) == task.solution(index)
        assert task.score(task.prompt(index), batch.response_ids[row, :length].tolist()) == 1.0
