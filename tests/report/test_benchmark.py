"""Reports stored as benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8ctl.errors import ConfigError
from fp8ctl.report.benchmark import write_report_benchmark
from fp8ctl.report.build import make_report


def test_a_report_as_benchmark(make_run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/fp8ctl", "report", "a", "b"])
    folders = [
        make_run("cpt-a"),
        make_run("cpt-b", precision="infir2", step_time_s=3.4, gap=0.0004),
        make_run("sft-a", stage="sft", answers={"bf16": 0.6}),
        make_run("sft-b", stage="sft", precision="infir2", step_time_s=6.0, gap=0.01, answers={"bf16": 0.5}),
    ]
    report = make_report(folders)
    record = json.loads(write_report_benchmark("demo-cpu", report, tmp_path).read_text())
    assert record["commit"] == "0123456789abcdef0123456789abcdef01234567", (
        "the code that measured, not the code that reports"
    )
    assert record["command"] == "fp8ctl report a b"
    assert record["hardware"]["cpu"]["model"] == "Some CPU @ 2.0GHz"
    bars = {bar["name"]: bar for bar in record["bars"]}
    assert list(bars) == [
        "cpt: step time, emulated FP8 / BF16",
        "cpt: training loss gap, last 10 %",
        "sft: step time, emulated FP8 / BF16",
        "sft: training loss gap, last 10 %",
    ]
    assert [bar["holds"] for bar in record["bars"]] == [True, True, False, False]
    assert bars["cpt: step time, emulated FP8 / BF16"]["target"] == 2.5
    assert (
        bars["cpt: step time, emulated FP8 / BF16"]["value"]
        == report["stages"][0]["comparisons"][0]["ratios"]["step"]["value"]
    )
    assert bars["sft: step time, emulated FP8 / BF16"]["reason"] == "a median step takes 3.00x of the baseline's"
    assert bars["sft: training loss gap, last 10 %"]["reason"].endswith("verdict: worse")
    cpt, sft = record["rows"]
    assert (cpt["stage"], cpt["verdict"], cpt["is_emulated"], cpt["accuracy_difference"]) == (
        "cpt",
        "parity",
        True,
        None,
    )
    assert (sft["accuracy_baseline"], sft["accuracy_candidate"], sft["accuracy_questions"]) == (0.6, 0.5, 40)


def test_real_fp8_must_be_no_slower(make_run, gpu, tmp_path: Path) -> None:
    report = make_report([make_run("a", env=gpu), make_run("b", precision="infir2", env=gpu, step_time_s=1.5)])
    bar = json.loads(write_report_benchmark("step-h200", report, tmp_path).read_text())["bars"][0]
    assert (bar["name"], bar["target"], bar["holds"]) == ("cpt: step time, FP8 / BF16", 1.0, True)


def test_single_runs_are_refused(make_run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a report of one run has nothing to store as a benchmark") as caught:
        write_report_benchmark("demo-cpu", make_report([make_run("a")]), tmp_path)
    assert caught.value.hint == "give the baseline and the run to compare with it"
