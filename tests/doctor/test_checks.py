"""The examination as a whole, for real on this machine, and its command."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from fp8ctl.cli.app import app
from fp8ctl.doctor import checks
from fp8ctl.doctor.apart import Failed, Job
from fp8ctl.doctor.checks import CHECKS, Check, Examination, examine, to_finding
from fp8ctl.doctor.finding import Answer, Finding
from fp8ctl.doctor.recipes import RecipeRow


@pytest.fixture(scope="module")
def real(fp8ctl):
    """What the command says of this machine, as data, and how long it took."""
    start = time.perf_counter()
    done = fp8ctl("doctor", "--json")
    return json.loads(done.stdout), time.perf_counter() - start


def test_everything_needed_works_here(real) -> None:
    found, seconds = real
    by_name = {f["name"]: f for f in found["findings"]}
    assert list(by_name) == [check.name for check in CHECKS]
    assert [f for f in by_name.values() if f["needed"] and f["state"] not in ("ok", "note")] == []
    assert found["ok"] is True
    assert "conf/ composes" in by_name["hydra"]["detail"]
    assert by_name["gloo"]["detail"] == "one rank reduced a tensor on the CPU"
    assert seconds < 60  # about 6 s on an idle machine without a GPU; the bound only catches a check that hangs


def test_the_data_has_one_schema(real) -> None:
    found, _ = real
    assert sorted(found) == ["environment", "findings", "ok", "recipes", "schema"] and found["schema"] == 1
    assert sorted(found["environment"]) == ["cpu", "fp8ctl", "packages", "platform", "python", "time"]
    for f in found["findings"]:
        assert sorted(f) == ["detail", "fix", "name", "needed", "state"]
        assert f["state"] in ("ok", "note", "skipped", "absent", "broken") and f["detail"]
        assert "\n" not in f["detail"] + f["fix"]
        assert f["fix"] or f["state"] in ("ok", "note", "skipped")
    for r in found["recipes"]:
        assert sorted(r) == ["backend", "fix", "gemm", "reason", "recipe", "runs"]
        assert r["reason"] and bool(r["fix"]) != r["runs"]
    assert {r["recipe"] for r in found["recipes"] if r["runs"]} >= {"bf16", "infir2", "row", "tensor"}


def test_every_check_exists_and_has_a_name_of_its_own() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    seen: set[str] = set()
    for check in CHECKS:
        module, _, name = check.target.partition(":")
        assert callable(getattr(importlib.import_module(f"fp8ctl.doctor.{module}"), name))
        assert check.fix
        assert not check.rests_on or check.rests_on in seen
        seen.add(check.name)
    assert {check.name for check in CHECKS if check.needed} == {
        "python", "disk", "torch", "FP8 reference", "gloo", "deepspeed", "hydra", "tokenizers",
    }  # fmt: skip


def test_a_check_that_can_not_answer_is_a_finding() -> None:
    check = Check("cuDNN attention", "gpu:cudnn_attention", "gpu", "update torch")
    assert to_finding(check, Failed("no answer within 120 s")) == Finding(
        "cuDNN attention", "broken", "no answer within 120 s", "update torch", needed=False
    )
    assert to_finding(check, ["ok", "cuDNN 9.19.0", ""]) == Finding("cuDNN attention", "ok", "cuDNN 9.19.0")


def test_nothing_that_is_broken_stops_the_examination(monkeypatch) -> None:
    broken = Failed("ImportError: libtorch_cuda.so: undefined symbol: ncclCommWindowRegister")
    asked: list[Job] = []

    def apart(*groups: list[Job]) -> list[list[object]]:
        asked.extend(job for jobs in groups for job in jobs)
        return [[["ok", "3.12.1", ""] if job.target.endswith(":python") else broken for job in jobs] for jobs in groups]

    monkeypatch.setattr(checks, "run_apart", apart)
    monkeypatch.setattr("fp8ctl.doctor.recipes.run_apart", apart)
    examination = examine()
    by_name = {f.name: f for f in examination.findings}
    assert by_name["python"] == Finding("python", "ok", "3.12.1", needed=True)
    assert by_name["torch"] == Finding("torch", "broken", broken.how, "reinstall with `make setup`", needed=True)
    assert [f.name for f in examination.faults] == ["disk", "torch", "hydra", "tokenizers"]
    assert by_name["gloo"] == Finding("gloo", "skipped", "torch does not work", needed=True)
    assert by_name["DeepSpeed ops"].detail == "deepspeed does not work"
    assert examination.recipes[0].reason == broken.how
    assert Job("fp8ctl.doctor.gpu:nccl") in asked


def test_a_torch_that_crashes_is_one_finding_and_exit_1(environment, tmp_path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import os; os.abort()")
    path = os.pathsep.join(p for p in (str(tmp_path), environment.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, "-m", "fp8ctl", "doctor"],
        capture_output=True,
        text=True,
        env={**environment, "PYTHONPATH": path},
    )
    assert done.returncode == 1, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "torch broken its process was killed by SIGABRT" in lines
    assert "no: all: all: its process was killed by SIGABRT" in lines
    assert any(line.startswith("not tried, torch does not work: FP8 reference, GPU") for line in lines)
    assert any(line.startswith("hydra ok") for line in lines)


def examination(*findings: Finding) -> Examination:
    rows = [
        RecipeRow("bf16", "torch", "", True, "plain PyTorch", ""),
        RecipeRow("infir2", "native", "cublas", True, "ran right", ""),
        RecipeRow("infir2", "te", "", False, "transformer-engine is not installed", "pip install 'fp8ctl[te]'"),
    ]
    return Examination(list(findings), rows)


def run(monkeypatch, examined: Examination, *words: str):
    monkeypatch.setattr(checks, "examine", lambda: examined)
    return CliRunner().invoke(app, ["doctor", *words])


def test_optional_faults_exit_0_and_show_their_fix(monkeypatch) -> None:
    absent = Answer("absent", "not installed", "pip install 'fp8ctl[te]' on a machine with CUDA")
    done = run(
        monkeypatch,
        examination(
            Finding("torch", "ok", "2.11.0+cu130, CUDA 13.0", needed=True),
            Finding("transformer-engine", *absent),
            Finding("NCCL", "skipped", "no GPU"),
            Finding("flash varlen", "skipped", "no GPU"),
        ),
    )
    assert done.exit_code == 0
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "torch ok 2.11.0+cu130, CUDA 13.0" in lines
    assert "not tried, no GPU: NCCL, flash varlen" in lines
    assert "recipe auto takes torch native cublas te" in lines
    assert "bf16 torch yes - -" in lines
    assert "infir2 native cublas - yes no" in lines
    assert "yes: native cublas: every FP8 recipe: ran right" in lines
    assert "no: te: every FP8 recipe: transformer-engine is not installed" in lines
    assert "fix: pip install 'fp8ctl[te]'" in lines
    assert "fix: transformer-engine: pip install 'fp8ctl[te]' on a machine with CUDA" in lines


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_what_training_needs_exits_1(monkeypatch, words) -> None:
    done = run(
        monkeypatch,
        examination(
            Finding("deepspeed", "broken", "0.19.8 does not import: ImportError: x", "pip install", needed=True)
        ),
        *words,
    )
    assert done.exit_code == 1
    assert "0.19.8 does not import" in done.stdout
    if words:
        assert json.loads(done.stdout)["ok"] is False
