"""The record of a report."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

from fp8ctl.errors import DataError
from fp8ctl.paths import RunPaths
from fp8ctl.report.build import exit_code, make_report
from fp8ctl.track.record import log_event


def test_the_record_is_plain_json_without_nan(make_run) -> None:
    losses = np.full(60, 2.0)
    losses[50:] = math.nan
    report = make_report([make_run("a", answers={"bf16": 0.6}), make_run("b", precision="infir2", losses=losses)])
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["schema"], report["tool"]["name"]) == (1, "fp8ctl")
    assert [run["label"] for run in report["runs"]] == ["A", "B"]
    assert report["runs"][1]["loss"]["final"] is None
    assert len(report["runs"][1]["curve"]["step"]) == 50


def test_one_run_has_figures_and_no_comparison(make_run) -> None:
    report = make_report([make_run("a", answers={"bf16": 0.6})])
    assert report["verdict"] == {
        "verdict": "undecided",
        "rule": "nothing to compare",
        "reasons": ["one run of a stage has figures, but no comparison"],
        "of": "",
    }
    assert exit_code(report) == 4
    assert report["stages"][0]["comparisons"] == []
    assert report["runs"][0]["loss"]["final"] == pytest.approx(2.0, abs=0.1)
    assert report["notes"] == []


def test_stages_are_compared_apart_and_the_gravest_verdict_counts(make_run) -> None:
    folders = [
        make_run("sft-bf16", stage="sft"),
        make_run("cpt-bf16"),
        make_run("cpt-fp8", precision="infir2"),
        make_run("sft-fp8", stage="sft", precision="infir2", gap=0.02),
    ]
    report = make_report(folders)
    assert [(s["stage"], s["baseline"], s["runs"]) for s in report["stages"]] == [
        ("cpt", "B", ["B", "C"]),
        ("sft", "A", ["A", "D"]),
    ]
    assert [s["comparisons"][0]["verdict"]["verdict"] for s in report["stages"]] == ["parity", "worse"]
    assert (report["verdict"]["verdict"], report["verdict"]["of"]) == ("worse", "D against A")


def test_many_runs_each_meet_the_first(make_run) -> None:
    report = make_report(
        [make_run("a")] + [make_run(f"f{i}", precision="infir2", gap=g) for i, g in enumerate((0, 0.01, 0))]
    )
    assert [(c["baseline"], c["candidate"]) for c in report["stages"][0]["comparisons"]] == [
        ("A", "B"),
        ("A", "C"),
        ("A", "D"),
    ]
    assert (report["verdict"]["verdict"], report["verdict"]["of"]) == ("worse", "C against A")


def test_a_baseline_in_fp8_is_pointed_out(make_run) -> None:
    report = make_report([make_run("a", precision="infir2"), make_run("b")])
    assert report["notes"][1] == "The baseline A FP8 infir2 runs in FP8 and B BF16 does not: give the BF16 run first."


def test_notes_on_emulation_and_seeds(make_run, gpu) -> None:
    on_cpu = make_report([make_run("a"), make_run("b", precision="infir2")])["notes"]
    assert on_cpu == [
        "FP8 is emulated here: its speed is not a speed claim, and speed did not enter the verdict.",
        "One seed per arm: the bands hold the noise within a run, not the spread between seeds.",
    ]
    on_gpu = make_report([make_run("c", env=gpu), make_run("d", precision="infir2", env=gpu)])["notes"]
    assert on_gpu == on_cpu[1:]


def test_events_are_counted_and_the_last_of_them_listed(make_run) -> None:
    folder = make_run("a")
    for step in range(1, 31):
        log_event(RunPaths(folder), "monitor", step, rule="D1", reason="loss far above its recent course")
    events = make_report([folder])["runs"][0]["events"]
    assert events["counts"] == {"checkpoint": 2, "monitor": 30}
    assert ([e["step"] for e in events["shown"]], events["num_left_out"]) == (list(range(11, 31)), 10)


def test_a_crashed_run_still_has_a_report(make_run) -> None:
    folder = make_run("b", precision="infir2", logged=7, state="failed", cause="out of memory")
    for name in ("coverage.json", "env.json"):
        (folder / name).unlink()
    report = make_report([make_run("a"), folder])
    gap = report["stages"][0]["comparisons"][0]["gap"]
    assert (gap["num_common"], gap["steps"]) == (7, [1, 7])
    assert report["runs"][1]["cause"] == "out of memory"
    assert "env.json missing: hardware and versions unknown" in report["runs"][1]["problems"]


def test_a_run_that_logged_nothing_still_has_a_report(make_run) -> None:
    folder = make_run("b", precision="infir2", state="failed", cause="no such file")
    (folder / "metrics.jsonl").unlink()
    comparison = make_report([make_run("a"), folder])["stages"][0]["comparisons"][0]
    assert (comparison["gap"], comparison["ratios"]) == (None, None)
    assert comparison["verdict"]["reasons"] == [
        "B FP8 infir2 has not finished: failed before its first step (no such file)"
    ]


def test_no_folder_and_the_same_folder_twice(make_run) -> None:
    with pytest.raises(DataError, match="no run to report") as caught:
        make_report([])
    assert caught.value.hint == "give one run folder, or the baseline and then the runs to compare with it"
    folder = make_run("a")
    with pytest.raises(DataError, match="is given twice") as caught:
        make_report([folder, folder / ".." / "a"])
    assert caught.value.hint == "give each run once, the baseline first"


def test_twenty_thousand_steps_are_quick_and_small(make_run) -> None:
    folders = [make_run("a", num_steps=10_000), make_run("b", precision="infir2", num_steps=10_000)]
    start = time.perf_counter()
    report = make_report(folders)
    assert time.perf_counter() - start < 5
    assert len(json.dumps(report)) < 500_000
    gap = report["stages"][0]["comparisons"][0]["gap"]
    assert (gap["num_steps"], gap["steps"]) == (1000, [9001, 10_000])
