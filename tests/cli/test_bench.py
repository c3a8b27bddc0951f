"""fp8ctl bench: what is printed, what is stored, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TINY = ["model=tiny", "model.shape.vocab_size=500", "device=cpu", "rounds=1"]


def bench(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fp8ctl", "bench", *words], capture_output=True, text=True, cwd=cwd)


def test_step(tmp_path: Path) -> None:
    done = bench(
        "step", *TINY, "seq_len_tokens=64", "arms=[bf16,infir2,te-block]", "--benchmark", "step-cpu", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "tiny 1x64: medians" in done.stdout and "infir2" in done.stdout and "absent" in done.stdout
    assert "say nothing about the speed of FP8 on a GPU" in done.stderr
    assert "te-block: absent: transformer-engine is not here" in done.stderr
    assert "bench step:" in done.stderr and "benchmark written: docs/benchmarks/step-cpu.json" in done.stderr
    record = json.loads((tmp_path / "docs/benchmarks/step-cpu.json").read_text())
    assert record["schema"] == 1 and record["bars"] == []
    assert record["command"].startswith("fp8ctl bench step model=tiny")
    assert [(r["arm"], r["status"].partition(":")[0]) for r in record["rows"]] == [
        ("bf16", "ok"),
        ("infir2", "ok"),
        ("te-block", "absent"),
    ]
    assert "## arms" in (tmp_path / "docs/benchmarks/step-cpu.md").read_text()


def test_step_as_json_with_an_arm_of_ones_own(tmp_path: Path) -> None:
    arms = 'arms=["emulated: precision=infir2 precision.backend=reference precision.recipe.wgrad=bf16"]'
    done = bench("step", *TINY, "seq_len_tokens=64", arms, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["arm"], row["backend"], row["num_steps"]) == ("emulated", "reference", 1)
    assert list(tmp_path.iterdir()) == []


def test_gemm(tmp_path: Path) -> None:
    done = bench("gemm", *TINY, "num_tokens=32", "precisions=[infir2]", "--benchmark", "gemm-cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all linears of a block, forward and backward" in done.stdout and "gate_proj + up_proj" in done.stdout
    record = json.loads((tmp_path / "docs/benchmarks/gemm-cpu.json").read_text())
    assert {r["case"] for r in record["rows"]} == {"tiny 32"}
    assert {r["table"] for r in record["rows"]} == {"linears", "one block, all linears", "quantisers, both directions"}


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["step", "arms=[infer2]"], "error: arms: no arm named 'infer2'", "hint: did you mean infir2?"),
        (["step", "arm=[bf16]"], "error: arm: unknown setting", "hint: did you mean arms?"),
        (["step", "device=cpu", "profile=true"], "error: profile: the breakdown is one of GPU kernels", "hint: drop"),
        (["gemm", "precisions=[bf16]"], "error: precisions: bf16 is BF16", "hint: drop bf16"),
        (["gemm", "--benchmark", "../x"], "error: not a name of a benchmark: ../x", "hint: use lower-case letters"),
    ],
)
def test_mistakes(tmp_path: Path, words: list[str], error: str, hint: str) -> None:
    done = bench(*words, cwd=tmp_path)
    assert error in done.stderr and hint in done.stderr
    assert (done.returncode, done.stdout) == (2, "")
    assert list(tmp_path.iterdir()) == []


def test_help_shows_how_to_name_arms(tmp_path: Path) -> None:
    shown = bench("step", "--help", cwd=tmp_path).stdout
    assert (
        "arms=[bf16,infir2,te-block]" in " ".join(shown.split()).replace("arms= ", "arms=")
        and "torchao-rowwise" in shown
    )
