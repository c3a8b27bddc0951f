import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from fp8ctl.errors import DataError
from fp8ctl.paths import RunPaths
from fp8ctl.track.metrics import METRICS
from fp8ctl.track.record import RunRecord, StepStats, append_jsonl, log_event, read_jsonl, write_json, write_status


def stats(step: int, **values: Any) -> StepStats:
    return StepStats(
        **{
            "step": step,
            "loss": 2.5,
            "grad_norm": 1.25,
            "lr": 1e-4,
            "trainable_tokens": 8,
            "tokens": 9,
            "tokens_seen": 9 * step,
        }
        | values
    )


def test_line_has_every_number_with_a_definition_and_nothing_else() -> None:
    line = stats(3, validation_loss=2.75, validation_losses={"a": 2.5, "b": 3.0}).to_line()
    assert set(line) - {"step", "time"} == set(METRICS)
    assert (line["step"], line["loss"], line["validation_loss"], line["tokens_seen"]) == (3, 2.5, 2.75, 27)
    assert "validation_loss" not in stats(3).to_line()


def test_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append_jsonl(file, {"step": 1})
    append_jsonl(file, {"step": 2})
    whole = file.read_bytes()
    for length in range(len(whole) - len('{"step": 2}\n') + 1, len(whole)):
        file.write_bytes(whole[:length])
        assert read_jsonl(file)[:1] == [{"step": 1}]
        assert len(read_jsonl(file)) == (2 if length == len(whole) - 1 else 1)
    assert read_jsonl(tmp_path / "absent.jsonl") == []


def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl line 2 is not JSON") as caught:
        read_jsonl(file)
    assert caught.value.hint == "the file was changed by hand or by a broken disk"


def test_last_line_of_each_step_wins(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step, loss in [(1, 3.0), (2, 2.9), (3, 2.8), (2, 2.7), (3, 2.6), (4, 2.5)]:  # a resume from step 1
        append_jsonl(paths.metrics, stats(step, loss=loss).to_line())
    steps = RunRecord(tmp_path).steps()
    assert [(s["step"], s["loss"]) for s in steps] == [(1, 3.0), (2, 2.7), (3, 2.6), (4, 2.5)]


def test_non_finite_values_come_back_and_the_file_is_strict_json(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    append_jsonl(paths.metrics, stats(1, loss=math.nan, grad_norm=math.inf).to_line())
    write_json(paths.status, {"a": [-math.inf, 1.5, {"b": math.nan}], "path": tmp_path})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for text in (paths.metrics.read_text(), paths.status.read_text()):
        json.loads(text, parse_constant=refuse)
    record = RunRecord(tmp_path)
    (step,) = record.steps()
    assert math.isnan(step["loss"]) and step["grad_norm"] == math.inf
    status = record.json(paths.status)
    assert status["a"][:2] == [-math.inf, 1.5] and math.isnan(status["a"][2]["b"]) and status["path"] == str(tmp_path)


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "status.json"
    write_json(file, {"state": "running"})
    before = file.read_bytes()
    with pytest.raises(TypeError):
        write_json(file, {"state": "finished", "bad": object()})
    assert file.read_bytes() == before
    inode = os.stat(file).st_ino
    write_json(file, {"state": "finished"})
    assert os.stat(file).st_ino != inode  # a new file renamed over the old one, which open readers still see whole
    assert json.loads(file.read_text()) == {"state": "finished"}


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run folder") as caught:
        RunRecord(tmp_path / "absent")
    assert caught.value.hint == "give the folder that `fp8ctl train` printed"
    with pytest.raises(DataError, match="not a run folder") as caught:
        RunRecord(tmp_path)
    assert caught.value.hint == "a run folder holds config.yaml and metrics.jsonl"


def test_what_a_run_leaves_behind_is_read_back(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run-1")
    paths.root.mkdir()
    paths.config.write_text("stage: sft\nloop:\n  num_steps: 3\n")
    record = RunRecord(paths.root)
    assert (record.name, record.steps(), record.events(), record.json(paths.status), record.eval_results()) == (
        "run-1",
        [],
        [],
        {},
        [],
    )
    assert record.config() == {"stage": "sft", "loop": {"num_steps": 3}}
    write_status(paths, "failed", step=2, cause="rank 1: no memory", hint="smaller batch", exit_code=1)
    status = record.json(paths.status)
    assert (status["state"], status["step"], status["cause"], status["hint"], status["exit_code"]) == (
        "failed", 2, "rank 1: no memory", "smaller batch", 1,
    )  # fmt: skip
    log_event(paths, "checkpoint", 2, path="checkpoints/step-00000002")
    (event,) = record.events()
    assert (event["kind"], event["step"], event["path"]) == ("checkpoint", 2, "checkpoints/step-00000002")
    write_json(paths.eval / "b" / "result.json", {"name": "b"})
    write_json(paths.eval / "a" / "result.json", {"name": "a"})
    assert [r["name"] for r in record.eval_results()] == ["a", "b"]
