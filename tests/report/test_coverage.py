"""FP8's share, and where it was counted."""

from __future__ import annotations

import pytest

from fp8ctl.report import coverage
from fp8ctl.report.load import load_run


def test_coverage_of_the_run_folder(make_run) -> None:
    found = coverage.summarize(load_run(make_run("fp8", precision="infir2", fp8_share=0.79), "B"))
    assert found is not None
    assert (found.fp8_linears, found.mixed_linears, found.num_linears) == (210, 0, 211)
    assert (found.total, found.shares, found.source) == (
        0.79,
        {"fprop": 0.79, "dgrad": 0.79, "wgrad": 0.79},
        "coverage.json",
    )


def test_a_crashed_run_has_its_share_from_the_steps(make_run) -> None:
    folder = make_run("crashed", precision="infir2", fp8_share=0.6)
    (folder / "coverage.json").unlink()
    found = coverage.summarize(load_run(folder, "B"))
    assert found is not None
    assert (found.num_linears, found.shares["fprop"], found.source) == (None, None, "metrics.jsonl")
    assert found.total == pytest.approx(0.6)


def test_nothing_counted(make_run) -> None:
    folder = make_run("crashed", precision="infir2")
    for name in ("coverage.json", "metrics.jsonl"):
        (folder / name).unlink()
    assert coverage.summarize(load_run(folder, "B")) is None
