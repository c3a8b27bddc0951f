from __future__ import annotations

import importlib
import importlib.metadata
import sys
from types import SimpleNamespace

import pytest

from fp8ctl.doctor import transformer_engine
from fp8ctl.doctor.finding import Answer

FIX = "pip install 'fp8ctl[te]' on a machine with CUDA (optional; backend native needs it not)"


@pytest.fixture
def te(monkeypatch):
    """te(obstacles): a TransformerEngine that imports; granularity -> why it can't run here."""

    def pretend(obstacles: dict[str, str]) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.20.2")
        monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace())
        bridge = SimpleNamespace(
            import_te=lambda: importlib.import_module("transformer_engine.pytorch"),
            te_obstacle=lambda recipe, device_type: obstacles.get(recipe.granularity),
        )
        monkeypatch.setitem(sys.modules, "fp8ctl.fp8.te", bridge)

    return pretend


def test_its_version_and_recipes(te) -> None:
    te({"mxfp8": "MXFP8 needs compute capability 10.0, the GPU has 9.0"})
    assert transformer_engine.answer() == Answer(
        "ok",
        "2.20.2: block, tensor, tensor_delayed; no mxfp8: MXFP8 needs compute capability 10.0, the GPU has 9.0",
    )
    te({})
    assert transformer_engine.answer() == Answer("ok", "2.20.2: block, tensor, tensor_delayed, mxfp8")


def test_one_that_imports_and_runs_nothing_is_broken(te) -> None:
    te(dict.fromkeys(("block", "tensor", "tensor_delayed", "mxfp8"), "it is too old"))
    assert transformer_engine.answer() == Answer("broken", "2.20.2 imports, but runs no recipe: it is too old", FIX)


def test_one_that_does_not_import_is_one_finding(te, monkeypatch) -> None:
    te({})

    class Empty:
        """TransformerEngine's metapackage alone refuses with a RuntimeError."""

        def __getattr__(self, name: str):
            raise RuntimeError("Found empty `transformer-engine` meta package\ninstalled")

    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine", Empty())
    answer = transformer_engine.answer()
    assert (answer.state, answer.fix) == ("broken", FIX)
    assert answer.detail == "2.20.2 does not import: RuntimeError: Found empty `transformer-engine` meta package"


def test_absent_is_no_fault(monkeypatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert transformer_engine.answer() == Answer("absent", "not installed", FIX)
