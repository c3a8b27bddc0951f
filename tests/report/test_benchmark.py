"""Stored benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8ctl.errors import ConfigError
from fp8ctl.report.benchmark import Bar, write_benchmark, write_report_benchmark
from fp8ctl.report.build import make_report


def test_the_format(tmp_path: Path) -> None:
    bars = [
        Bar("tokens per second", 90.0, 100.0, "tokens/s", "higher", "one core only"),
        Bar("gap", 0.1, 0.25, "%", "lower", "unused"),
        Bar("exactly", 2.5, 2.5, "x", "lower"),
    ]
    rows = [{"name": "a", "time_s": 1.23456789}, {"name": "b", "time_s": None, "extra": 3}]
    path = write_benchmark("data-cpu", rows, bars, "fp8ctl bench data", tmp_path)
    assert path == tmp_path / "data-cpu.json"
    record = json.loads(path.read_text())
    assert list(record) == ["schema", "command", "commit", "date", "hardware", "versions", "bars", "rows"]
    assert (record["schema"], record["command"]) == (1, "fp8ctl bench data")
    assert record["rows"] == rows
    assert record["bars"] == [
        {
            "name": "tokens per second",
            "value": 90.0,
            "target": 100.0,
            "unit": "tokens/s",
            "better": "higher",
            "reason": "one core only",
            "holds": False,
        },
        {"name": "gap", "value": 0.1, "target": 0.25, "unit": "%", "better": "lower", "holds": True},
        {"name": "exactly", "value": 2.5, "target": 2.5, "unit": "x", "better": "lower", "holds": True},
    ]
    assert record["hardware"]["cpu"]["cores"] >= 1
    assert record["versions"]["python"].startswith("3.")

    text = (tmp_path / "data-cpu.md").read_text()
    assert "| tokens per second | 90 | >= 100 | tokens/s | no: one core only |".replace(">", r"\>") in text
    assert "| gap | 0.1 | \\<= 0.25 | % | yes |" in text
    assert "| time\\_s | 1.2346 | - |" in text


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


def test_names_and_single_runs_are_refused(make_run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a name of a benchmark: ../x") as caught:
        write_benchmark("../x", [], [], "c", tmp_path)
    assert caught.value.hint == "use lower-case letters, digits and hyphens, e.g. demo-cpu"
    with pytest.raises(ConfigError, match="a report of one run has nothing to store as a benchmark") as caught:
        write_report_benchmark("demo-cpu", make_report([make_run("a")]), tmp_path)
    assert caught.value.hint == "give the baseline and the run to compare with it"
