"""Stored measurements: their format, their tables, and what stays of other cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8ctl.errors import ConfigError
from fp8ctl.track.benchmark import Bar, make_benchmark, store_benchmark


def test_the_format(tmp_path: Path) -> None:
    bars = [
        Bar("tokens per second", 90.0, 100.0, "tokens/s", "higher", "one core only"),
        Bar("gap", 0.1, 0.25, "%", "lower", "unused"),
        Bar("exactly", 2.5, 2.5, "x", "lower"),
    ]
    rows = [{"name": "a", "time_s": 1.23456789}, {"name": "b", "time_s": None, "extra": 3}]
    path = store_benchmark("data-cpu", make_benchmark(rows, bars, "fp8ctl bench data"), tmp_path)
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


ENVIRONMENT: dict[str, Any] = {"git": {"commit": "abc"}, "cpu": {"model": "c"}, "gpus": [], "packages": {"torch": "2"}}


def measured(case: str, value: float, environment: dict[str, Any] = ENVIRONMENT) -> dict[str, Any]:
    bars = [Bar(f"{case}: speed", value, 1.0, "x", "higher", "slow")]
    return make_benchmark([{"case": case, "value": value}], bars, f"fp8ctl bench step {case}", environment)


def test_other_cases_of_the_same_code_stay(tmp_path: Path) -> None:
    for case, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        path = store_benchmark("step", measured(case, value), tmp_path, case=case)
    record = json.loads(path.read_text())
    assert record["rows"] == [{"case": "b", "value": 2.0}, {"case": "a", "value": 3.0}]
    assert [bar["name"] for bar in record["bars"]] == ["b: speed", "a: speed"]
    assert record["command"] == "fp8ctl bench step b; fp8ctl bench step a"


@pytest.mark.parametrize(
    "other",
    [
        {**ENVIRONMENT, "git": {"commit": "def"}},
        {**ENVIRONMENT, "gpus": [{"name": "H200"}]},
        {**ENVIRONMENT, "packages": {"torch": "3"}},
        {**ENVIRONMENT, "git": {"commit": None}},
    ],
)
def test_other_cases_of_other_code_or_machines_go(tmp_path: Path, other: dict[str, Any]) -> None:
    store_benchmark("step", measured("a", 1.0), tmp_path, case="a")
    path = store_benchmark("step", measured("b", 2.0, other), tmp_path, case="b")
    record = json.loads(path.read_text())
    assert record["rows"] == [{"case": "b", "value": 2.0}]
    assert record["command"] == "fp8ctl bench step b"


def test_a_table_for_each_kind_of_row(tmp_path: Path) -> None:
    rows = [
        {"table": "arms", "arm": "bf16", "ms": 1.0, "x": 2},
        *({"table": "kernels", "name": n, "ms": 3.0} for n in "abc"),
    ]
    text = store_benchmark("step", make_benchmark(rows, [], "c", ENVIRONMENT), tmp_path).with_suffix(".md").read_text()
    assert "## arms\n\n|  | 1 |\n| --- | --- |\n| arm | bf16 |\n" in text, "few and wide: turned"
    assert "## kernels\n\n| name | ms |\n| --- | --- |\n| a | 3 |\n" in text


def test_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a name of a benchmark: ../x") as caught:
        store_benchmark("../x", make_benchmark([], [], "c", ENVIRONMENT), tmp_path)
    assert caught.value.hint == "use lower-case letters, digits and hyphens, e.g. demo-cpu"
