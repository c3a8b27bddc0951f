"""What keeps transformer-engine from running, in words. What it computes is tested on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.fp8.te import _is_first_use, can_quantize, import_te, size_obstacle, te_obstacle, te_recipe


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


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a package of that name, and of no use, where Python finds it first."""

    def forget() -> None:
        for name in [n for n in sys.modules if n.split(".")[0] == "transformer_engine"]:
            del sys.modules[name]

    def put(version: str, body: str = "") -> None:
        package = tmp_path / "transformer_engine"
        (package / "pytorch").mkdir(parents=True)
        (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (package / "pytorch" / "__init__.py").write_text(body + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        forget()

    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformer_engine"}
    yield put
    forget()
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise RuntimeError('Found empty meta package')", "broken: RuntimeError: Found empty meta package"),
        ("raise OSError('libcudnn.so: undefined symbol')", "broken: OSError: libcudnn.so: undefined symbol"),
        ("import a_module_that_is_not_there", "broken: ModuleNotFoundError: No module named"),
        ("raise ImportError('DLL load failed\\nmore lines')", "broken: ImportError: DLL load failed"),
    ],
)
def test_broken(body: str, words: str, install: Callable[..., None]) -> None:
    install("2.20.2", body)
    found = te_obstacle(RecipeConfig(), "cuda")
    assert found is not None and words in found and "\n" not in found
    assert te_obstacle(RecipeConfig(), "cpu") == "the run is on the CPU, transformer-engine needs a GPU"


@pytest.mark.parametrize("version", ["1.13.0+abc", "2.3.0", "2.8.0.dev0+abc"])
def test_too_old(version: str, install: Callable[..., None]) -> None:
    install(version)
    wanted = f"transformer-engine {version} is too old, 2.9 is the oldest that will do"
    assert te_obstacle(RecipeConfig(), "cuda") == wanted


def test_no_gpu(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install("2.20.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert te_obstacle(RecipeConfig(), "cuda") == "torch sees no GPU"


def test_one_that_is_loaded_is_taken_as_it_is(install: Callable[..., None]) -> None:
    install("2.20.2")
    first = import_te()
    assert import_te() is first is sys.modules["transformer_engine.pytorch"]


def test_sizes_that_it_leaves_to_bf16() -> None:
    assert can_quantize(Fp8Linear(576, 192))
    assert size_obstacle(Fp8Linear(36, 192)) == "transformer-engine takes multiples of 16, in_features is 36"
    assert size_obstacle(Fp8Linear(192, 20)) == "transformer-engine takes multiples of 16, out_features is 20"
    mxfp8 = Fp8Linear(64, 48, recipe=RecipeConfig(granularity="mxfp8"))
    assert size_obstacle(mxfp8) == "transformer-engine takes multiples of 32, out_features is 48"
    layer = Fp8Linear(36, 20, backend="te", dtype=torch.bfloat16)
    layer(torch.zeros(4, 36, dtype=torch.bfloat16))
    assert layer.counter.flops["fprop"] == {"fp8": 0, "bf16": 2 * 4 * 36 * 20}


def test_delayed_scaling_is_refused_outside_training() -> None:
    recipe = RecipeConfig(granularity="tensor_delayed", scale="fp32", grad_format="e5m2")
    layer = Fp8Linear(64, 64, recipe=recipe, backend="te", dtype=torch.bfloat16)
    layer.weight_is_frozen = True
    with torch.no_grad(), pytest.raises(PrecisionError, match="delayed scaling has no scales outside training") as e:
        layer(torch.zeros(4, 64, dtype=torch.bfloat16))
    assert e.value.hint == "evaluate with precision=tensor, infir2 or bf16"
    assert layer.counter.flops["fprop"] == {"fp8": 0, "bf16": 0}


def test_when_a_kept_weight_is_quantised_anew() -> None:
    layer = Fp8Linear(64, 64, backend="te", dtype=torch.bfloat16)
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert [_is_first_use(layer), _is_first_use(layer)] == [None, None]
    layer.weight_is_kept = True
    assert [_is_first_use(layer), _is_first_use(layer)] == [True, False]
    with torch.no_grad():
        assert _is_first_use(layer) is None  # a validation pass leaves what training keeps alone
    assert _is_first_use(layer) is False
    layer.weight_changed()
    layer.precision = "bf16"
    layer(x)  # keeps the weight as it is
    layer.precision = "fp8"
    assert [_is_first_use(layer), _is_first_use(layer)] == [True, False]
    layer.weight_is_kept, layer.weight_is_frozen = False, True
    layer.weight_changed()
    with torch.no_grad():
        assert [_is_first_use(layer), _is_first_use(layer)] == [True, False]
