import attrs
import pytest
import torch

from rz.config import TrainConfig

GIVEN = {"model": "model", "task": "arithmetic", "out": "out"}


def test_defaults_are_accepted_and_fields_never_change():
    config = TrainConfig(**GIVEN)
    assert config.max_lag == 8 and config.torch_dtype == torch.float32
    assert TrainConfig(**GIVEN, dtype="bfloat16").torch_dtype == torch.bfloat16
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.updates = 3


@pytest.mark.parametrize(
    ("field", "edge", "beyond", "rule"),
    [
        ("updates", 1, 0, ">= 1"),
        ("group_size", 2, 1, ">= 2"),
        ("groups_per_update", 1, 0, ">= 1"),
        ("max_lag", 0, -1, ">= 0"),
        ("slots", 1, 0, ">= 1"),
        ("max_tokens", 1, 0, ">= 1"),
        ("max_tokens", 1023, 1024, "< max_length 1024"),
        ("step_tokens", 1, 0, ">= 1"),
        ("microbatch_size", 0, -1, ">= 0"),
        ("save_every", 0, -1, ">= 0"),
        ("keep", 0, -1, ">= 0"),
        ("seed", 0, -1, ">= 0"),
        ("eval_every", 0, -1, ">= 0"),
        ("eval_prompts", 0, -1, ">= 0"),
        ("exact_lag", 8, 9, "in [0, max_lag 8]"),
        ("exact_lag", 0, -1, "in [0, max_lag 8]"),
        ("temperature", 0.01, 0.0, "> 0 and finite"),
        ("temperature", 0.01, 0.0099, ">= 0.01, which vLLM raises lower ones to"),
        ("temperature", 2.0, float("inf"), "> 0 and finite"),
        ("temperature", 2.0, float("nan"), "> 0 and finite"),
        ("learning_rate", 1e-9, -1e-9, ">"),
        ("learning_rate", 1.0, float("nan"), ">"),
        ("eval_temperature", 0.001, 0.0, "> 0 and finite"),
        ("reward_timeout_s", 0.1, 0.0, "> 0 and finite"),
        ("weight_decay", 0.0, -0.1, ">= 0 and finite"),
        ("max_grad_norm", 0.0, -0.1, ">= 0 and finite"),
        ("max_grad_norm", 0.0, float("nan"), ">= 0 and finite"),
        ("audit_share", 1.0, 1.1, "in [0, 1]"),
        ("audit_share", 0.0, -0.1, "in [0, 1]"),
        ("stop_accuracy", 0.0, 0.5, "0 without evaluations"),
        ("top_p", 1.0, 0.9, "1.0"),
        ("top_k", 0, 40, "0"),
        ("min_p", 0.0, 0.1, "0.0"),
        ("repetition_penalty", 1.0, 1.1, "1.0"),
    ],
)
def test_each_field_has_its_limit(field, edge, beyond, rule):
    assert getattr(TrainConfig(**GIVEN, **{field: edge}), field) == edge
    with pytest.raises(ValueError) as error:
        TrainConfig(**GIVEN, **{field: beyond})
    message = str(error.value)
    assert message.startswith(f"{field} must be ") and rule in message and f"got {beyond}" in message


def test_what_the_learner_cannot_reproduce_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="the learner cannot reproduce the distribution"):
        TrainConfig(**GIVEN, top_p=0.9)


def test_stopping_at_an_accuracy_needs_evaluations():
    assert TrainConfig(**GIVEN, stop_accuracy=0.9, eval_every=5).stop_accuracy == 0.9
    with pytest.raises(ValueError, match="stop_accuracy must be 0 without evaluations, got 0.9"):
        TrainConfig(**GIVEN, stop_accuracy=0.9, eval_every=5, eval_prompts=0)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("updates", "12", "updates must be an integer, got '12'"),
        ("updates", 2.0, "updates must be an integer, got 2.0"),
        ("slots", True, "slots must be an integer, got True"),
        ("exact_lag", "1", "exact_lag must be an integer, got '1'"),
        ("learning_rate", None, "learning_rate must be a number, got None"),
        ("engine_process", "no", "engine_process must be true or false, got 'no'"),
        ("task", 3, "task must be text, got 3"),
        ("model", 5, "model must be a path, got 5"),
        ("dtype", "float64", "dtype must be one of float32, bfloat16, got 'float64'"),
        ("engine", "foo", "engine must be one of vllm, plain, got 'foo'"),
        ("device", [], "device must be one of cpu, cuda, got []"),
        ("nonfinite", "x", "nonfinite must be one of raise, drop, count, got 'x'"),
    ],
)
def test_a_value_of_another_kind_in_run_json_is_named(field, value, rule):
    values = attrs.asdict(TrainConfig(**GIVEN)) | {field: value}
    with pytest.raises(ValueError) as error:
        TrainConfig.from_values(values)
    assert str(error.value) == rule


@pytest.mark.parametrize("field", ["reward_timeout_s", "engine_timeout_s", "stall_timeout_s"])
def test_limits_beyond_the_clocks_of_the_system_are_refused(field):
    TrainConfig(**GIVEN, **{field: 1e6})
    with pytest.raises(ValueError, match=f"{field} must be <= 1000000, got 1000000000000.0"):
        TrainConfig(**GIVEN, **{field: 1e12})
