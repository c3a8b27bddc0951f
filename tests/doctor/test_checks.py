from __future__ import annotations

import importlib
import importlib.metadata

import pytest

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.doctor import checks
from fp8ctl.fp8.backend import native_obstacle


@pytest.fixture(scope="module")
def findings():
    return {f.name: f for f in checks.examine()}


def test_everything_needed_works_here(findings) -> None:
    assert checks.faults(list(findings.values())) == []
    assert findings["FP8 reference"].state == "ok"
    assert "conf/ composes" in findings["hydra"].detail


def test_a_package_that_does_not_import_is_a_finding(monkeypatch) -> None:
    # TransformerEngine without CUDA raises RuntimeError at import
    def broken(name: str):
        raise RuntimeError("Found empty `transformer-engine` meta package")

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2")
    finding = checks._transformer_engine()
    assert (finding.state, finding.needed) == ("broken", False)
    assert "2.20.2 does not import: RuntimeError: Found empty" in finding.detail
    assert "fp8ctl[te]" in finding.fix


def test_an_absent_optional_package_is_no_fault(monkeypatch) -> None:
    def absent(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert checks.faults([checks._transformer_engine(), checks._mlflow()]) == []
    assert [f.name for f in checks.faults([checks._tokenizers()])] == ["tokenizers"]


def test_a_check_that_crashes_is_a_finding(monkeypatch) -> None:
    def crash():
        raise OSError("libcudnn.so: cannot open shared object file\nmore")

    crash.__name__ = "_deepspeed"
    monkeypatch.setattr(checks, "_deepspeed", crash)
    found = {f.name: f for f in checks.examine()}
    assert found["deepspeed"].state == "broken"
    assert found["deepspeed"].detail == "OSError: libcudnn.so: cannot open shared object file"


def test_antlr_of_another_version_is_named(monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.13.2")
    finding = checks._hydra()
    assert finding.state == "broken"
    assert finding.fix == "pip install antlr4-python3-runtime==4.9.3"


def test_recipes_follow_the_findings(findings) -> None:
    assert [r["runs"] for r in checks.recipes(list(findings.values()))] == [
        "yes",
        "yes",
        "yes" if native_obstacle(RecipeConfig(), "cuda") is None else "no",
    ]
    broken = checks.Finding("torch", "broken", "no")
    assert [r["runs"] for r in checks.recipes([broken])] == ["no", "no", "no"]
    assert checks.to_json([broken])["ok"] is False
