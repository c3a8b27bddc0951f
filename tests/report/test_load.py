"""Reading run folders, whole ones and broken ones."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fp8ctl.errors import DataError
from fp8ctl.report.load import load_run


def test_a_whole_run(make_run) -> None:
    run = load_run(make_run("fp8", precision="infir2", answers={"bf16": 0.5}), "B")
    assert (run.title, run.stage, run.state, run.device, run.backend) == (
        "B FP8 infir2",
        "cpt",
        "finished",
        "cpu",
        "reference",
    )
    assert run.is_fp8 and run.is_emulated and run.is_finished
    assert run.steps.tolist() == list(range(1, 61))
    assert np.isfinite(run.values("validation_loss")).sum() == 3
    assert math.isnan(run.values("no_such_metric")[0])
    assert run.problems == []
    assert run.evaluations[0].precision == "bf16"
    assert len(run.evaluations[0].scores) == 40


def test_bf16_on_a_gpu_is_not_emulated(make_run) -> None:
    run = load_run(make_run("bf16", env={"gpus": [{"name": "NVIDIA H200"}]}), "A")
    assert (run.device, run.is_emulated, run.precision) == ("cuda", False, "BF16")


def test_a_rule_can_make_a_run_fp8(make_run) -> None:
    rule = {"match": "*.down_proj", "precision": "fp8", "reason": "try"}
    assert load_run(make_run("mixed", config={"precision.rules": [rule]}), "A").is_fp8


def test_a_resumed_run_counts_the_last_line_of_each_step(make_run, add_step) -> None:
    folder = make_run("resumed")
    for step in range(51, 61):
        add_step(folder, step, 1.25)
    run = load_run(folder, "A")
    assert run.num_repeated == 10
    assert len(run.steps) == 60
    assert run.values("loss")[50:].tolist() == [1.25] * 10


def test_missing_files_are_told(make_run) -> None:
    folder = make_run("poor", precision="infir2")
    for name in ("env.json", "status.json", "coverage.json"):
        (folder / name).unlink()
    run = load_run(folder, "A")
    assert run.problems == [
        "env.json missing: hardware and versions unknown",
        "status.json missing: unknown how the run ended",
        "coverage.json missing: no count of executed FP8 GEMMs",
        "eval/ missing: no accuracy",
    ]
    assert run.is_finished, "without a status the last step tells"
    assert run.device == "unknown"


def test_a_run_without_metrics(make_run) -> None:
    folder = make_run("unborn", state="failed", cause="out of memory")
    (folder / "metrics.jsonl").unlink()
    run = load_run(folder, "A")
    assert len(run.steps) == 0
    assert "metrics.jsonl missing: no step was logged: no loss, no speed" in run.problems
    assert not run.is_finished


def test_damaged_files_are_told_and_the_rest_is_read(make_run) -> None:
    folder = make_run("damaged", answers={"bf16": 0.5, "fp8-infir2": 0.5})
    (folder / "coverage.json").write_text('{"num_lin')
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:3], "{half a line", *lines[3:]]) + "\n")
    (folder / "eval" / "smoke-bf16" / "result.json").unlink()
    (folder / "config.yaml").write_text("a: [")
    run = load_run(folder, "A")
    assert [p.split(" (")[0] for p in run.problems] == [
        "config.yaml unreadable",
        "coverage.json unreadable",
        "metrics.jsonl unreadable",
        "eval/smoke-bf16 unfinished: no result.json",
    ]
    assert "line 4 is not JSON" in run.problems[2]
    assert [e.precision for e in run.evaluations] == ["fp8-infir2"]
    assert run.stage == "unknown"


def test_losses_that_are_not_finite_stay_so(make_run, add_step) -> None:
    folder = make_run("nan")
    add_step(folder, 61, math.nan)
    run = load_run(folder, "A")
    assert math.isnan(run.values("loss")[-1])
    assert np.isfinite(run.values("loss")[:-1]).all()


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run folder: .*nowhere") as caught:
        load_run(tmp_path / "nowhere", "A")
    assert caught.value.hint == "give the folder that `fp8ctl train` printed"
