"""What keeps transformer-engine from running, in words. What it computes is tested on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.fp8.te import can_quantize, te_obstacle, te_recipe


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="transformer-engine is here")
def test_absent() -> None:
    assert te_obstacle(RecipeConfig(), "cuda") == "transformer-engine is not installed"


@pytest.mark.parametrize(
    ("recipe", "lacks"),
    [
        (RecipeConfig(granularity="row"), "granularity row"),
        (RecipeConfig(wgrad="x_block"), "wgrad x_block"),
        (RecipeConfig(wgrad="bf16"), "wgrad bf16"),
    ],
)
def test_recipes_that_it_has_not(recipe: RecipeConfig, lacks: str) -> None:
    assert te_obstacle(recipe, "cuda") == f"transformer-engine has no {lacks}"
    with pytest.raises(PrecisionError, match="transformer-engine has no such recipe"):
        te_recipe(recipe)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise RuntimeError('Found empty meta package')", "broken: RuntimeError: Found empty meta package"),
        ("raise OSError('libcudnn.so: undefined symbol')", "broken: OSError: libcudnn.so: undefined symbol"),
        ("import a_module_that_is_not_there", "broken: ModuleNotFoundError: No module named"),
    ],
)
def test_broken(body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '2.20.2'\n")
    (package / "pytorch" / "__init__.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    assert words in (te_obstacle(RecipeConfig(), "cuda") or "")
    assert te_obstacle(RecipeConfig(), "cpu") == "the run is on the CPU, transformer-engine needs a GPU"
    for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def test_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '1.13.0+abc'\n")
    (package / "pytorch" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "1.13.0+abc is too old, 2.3 is the oldest" in (te_obstacle(RecipeConfig(), "cuda") or "")
    for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def test_sizes_that_it_leaves_to_bf16() -> None:
    assert (
        can_quantize(Fp8Linear(576, 192))
        and not can_quantize(Fp8Linear(36, 192))
        and not can_quantize(Fp8Linear(192, 20))
    )
    layer = Fp8Linear(36, 20, backend="te", dtype=torch.bfloat16)
    layer(torch.zeros(4, 36, dtype=torch.bfloat16))
    assert layer.counter.flops["fprop"] == {"fp8": 0, "bf16": 2 * 4 * 36 * 20}
