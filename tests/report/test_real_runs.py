"""Two arms trained through the command line, and the report that a user gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
LENGTH = ["loop.num_steps=30", "batch.global_batch_rows=4", "batch.micro_batch_rows=2", "loop.validate_every_steps=10"]


@pytest.fixture(scope="module")
def arms(fp8ctl, train_words, tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("arms")
    for precision in ("bf16", "infir2"):
        fp8ctl(*train_words(root / precision, f"precision={precision}", *LENGTH))
    return [root / "bf16", root / "infir2"]


def test_the_arms_match_and_are_compared(fp8ctl, arms, tmp_path) -> None:
    files = [tmp_path / "r.md", tmp_path / "r.html"]
    done = fp8ctl("report", *arms, "--json", "--markdown", files[0], "--html", files[1])
    report = json.loads(done.stdout)
    assert [(r["precision"], r["state"], r["device"], r["num_steps"]) for r in report["runs"]] == [
        ("BF16", "finished", "cpu", 30),
        ("FP8 infir2", "finished", "cpu", 30),
    ]
    comparison = report["stages"][0]["comparisons"][0]
    assert comparison["differences"] == []
    assert comparison["speed_is_emulated"]
    assert comparison["gap"]["num_common"] == 30
    assert abs(comparison["gap"]["gap"]["value"]) < 0.05
    assert comparison["gap"]["validation_step"] == 30
    checks = {check["rule"]: check["outcome"] for check in comparison["verdict"]["checks"]}
    assert checks["same experiment"] == checks["FP8 ran"] == checks["enough steps"] == "ok"
    coverage = report["runs"][1]["coverage"]
    assert (coverage["fp8_linears"], coverage["num_linears"], coverage["source"]) == (14, 15, "coverage.json")
    assert report["runs"][0]["problems"] == ["eval/ missing: no accuracy"]
    for file in files:
        assert "Loss gap" in file.read_text()


def test_the_terminal_view_and_the_exit_code(fp8ctl, arms) -> None:
    done = fp8ctl("report", *arms, "--check", code=None)
    assert done.returncode in (0, 3, 4), "thirty steps may come out either way; emulated FP8 never fails to pay"
    word = {0: "PARITY", 3: "WORSE", 4: "UNDECIDED"}[done.returncode]
    assert done.stdout.strip().split("\n")[1].startswith(f"{word} B FP8 infir2 against A BF16")
    assert "FP8 is emulated here: its speed is not a speed claim" in done.stdout


def test_one_arm(fp8ctl, arms) -> None:
    done = fp8ctl("report", arms[1])
    assert "FIGURES ONLY one run, nothing to compare with" in done.stdout
