import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rz import report
from rz.batch import Group, Prompt, Rollout


def rollout(logprobs=(-0.5, -1.25), versions=(3, 4)):
    return Rollout(
        prompt_index=7,
        sample=1,
        prompt_ids=(1, 2),
        response_ids=range(3, 3 + len(logprobs)),
        behaviour_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        policy_versions=torch.tensor(versions, dtype=torch.int64),
        stop_reason="length",
        seed=2**62 + 1,
        temperature=0.6,
    )


def line(version, **more):
    names = ("reward_mean", "ess", "ratio_max", "k1", "k3", "lag_mean", "lag_max", "audited_tokens", "differing_tokens")
    return {"policy_version": version} | dict.fromkeys(names, 1.0) | more


@given(st.lists(st.floats(max_value=0, width=32, allow_nan=False), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_logprobs_read_back_to_the_same_bits(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("run")
    written = rollout(values, range(len(values)))
    (folder / report.ROLLOUTS).write_text(report.rollout_line(written, 1.0, 9) + "\n")
    (read,) = report.read_rollouts(folder)
    bits = lambda logprobs: logprobs.view(torch.int32)  # -0.0 and 0.0 have other bits
    assert torch.equal(bits(read.behaviour_logprobs), bits(written.behaviour_logprobs))


def test_a_response_reads_back_whole(tmp_path):
    written = rollout()
    text = report.rollout_line(written, 0.5, 9)
    (tmp_path / report.ROLLOUTS).write_text(text + "\n")
    (read,) = report.read_rollouts(tmp_path)
    for name in ("prompt_index", "sample", "prompt_ids", "response_ids", "stop_reason", "seed", "temperature"):
        assert getattr(read, name) == getattr(written, name)
    assert torch.equal(read.policy_versions, written.policy_versions)
    assert (json.loads(text)["reward"], json.loads(text)["consumed_at"]) == (0.5, 9)


@pytest.mark.parametrize("damage", ['{"prompt": 1', '{"prompt": 1}', "[]", "{}"])
def test_a_damaged_line_is_named(tmp_path, damage):
    (tmp_path / report.ROLLOUTS).write_text(report.rollout_line(rollout(), 0.0, 9) + "\n" + damage + "\n")
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:2 must be a response as rz writes it"):
        list(report.read_rollouts(tmp_path))


def test_a_folder_that_is_no_run_is_named(tmp_path):
    for read in (report.read_config, lambda folder: list(report.read_rollouts(folder))):
        with pytest.raises(ValueError, match="run must be the folder of a run") as error:
            read(tmp_path)
        assert str(tmp_path) in str(error.value)


def test_a_new_run_folder_is_new_or_empty_and_can_be_written(tmp_path):
    assert report.new_run_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert not list(report.new_run_folder(tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="out must be a new or empty folder, got .* with"):
        report.new_run_folder(tmp_path)
    for place in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(ValueError, match="out must be a folder that can be written, got"):
            report.new_run_folder(place)


def test_the_log_holds_one_line_an_update_from_the_moment_it_is_made(tmp_path):
    group = Group(prompt=Prompt(index=7, token_ids=(1, 2)), rollouts=(rollout(), rollout()), rewards=(0.0, 1.0))
    log = report.Log(tmp_path)
    for version in (5, 6):
        log.update(line(version), (group,))
        assert [metrics["policy_version"] for metrics in report.read_metrics(tmp_path)] == list(range(5, version + 1))
    lines = [json.loads(text) for text in (tmp_path / report.ROLLOUTS).read_text().splitlines()]
    assert [(one["consumed_at"], one["reward"]) for one in lines] == [(4, 0.0), (4, 1.0), (5, 0.0), (5, 1.0)]
    log.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == list(line(5))
    assert [(one.step, one.value) for one in events.Scalars("policy_version")] == [(5, 5.0), (6, 6.0)]


def test_a_log_that_goes_on_stands_at_its_places_and_one_that_cannot_changes_nothing(tmp_path):
    log = report.Log(tmp_path)
    log.update(line(1), ())
    places = log.places()
    log.update(line(2), ())
    log.close()
    with pytest.raises(ValueError, match=r"rollouts.jsonl must hold at least the 7 bytes it had, got 0"):
        report.Log(tmp_path, places=places | {report.ROLLOUTS: 7}, version=1)
    assert [metrics["policy_version"] for metrics in report.read_metrics(tmp_path)] == [1, 2]
    log = report.Log(tmp_path, places=places, version=1)
    assert log.places() == places
    log.update(line(2, tokens=3), ())
    log.close()
    assert report.read_metrics(tmp_path) == [line(1), line(2, tokens=3)]


def test_settings_read_back(tmp_path):
    report.write_config(tmp_path, {"dtype": "float32", "out": tmp_path})
    assert report.read_config(tmp_path) == {"dtype": "float32", "out": str(tmp_path)}


def test_the_plot_is_a_picture(tmp_path):
    lines = [line(1), line(2, accuracy=0.5), line(3)]
    (tmp_path / report.METRICS).write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert report.plot(tmp_path).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_progress_outside_a_terminal_is_a_plain_line_with_the_counts_so_far(capsys):
    progress = report.Progress(updates=3, done=1, audited=5, differing=1)
    for version in (2, 3):
        progress.update(line(version, tokens=10, seconds=2.0, accuracy=0.25, audited_tokens=5, differing_tokens=1))
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("update 2/3") and "audited 10, differing 2" in lines[0] and "5 tok/s" in lines[0]
    assert lines[1].startswith("update 3/3") and "audited 15, differing 3" in lines[1] and "held-out 0.250" in lines[1]


def test_a_table_shows_every_row(capsys):
    report.table("title", {"tokens": 12, "rate": 1.23456, "folder": "runs/x"})
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("title", "tokens", "12", "1.235", "runs/x"))
