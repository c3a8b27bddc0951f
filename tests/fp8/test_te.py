"""What keeps transformer-engine from running, in words. What it computes is tested on a GPU."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.fp8.te import (
    _is_first_use,
    can_quantize,
    import_te,
    open_autocast,
    size_obstacle,
    te_forward,
    te_obstacle,
    te_recipe,
)  # fmt: skip

# A stand-in with autocast and a Linear in plain BF16: what is asked of it, not what it computes
PLAIN_TE = """
import torch

entered, inside = [], []

class autocast:
    def __init__(self, enabled, recipe):
        assert enabled
        self.recipe = recipe

    def __enter__(self):
        scale = "pow2" if self.recipe.fp8_quant_fwd_inp["power_2_scale"] else "fp32"
        entered.append(f"block {scale}")
        inside.append(self.recipe)

    def __exit__(self, *_):
        inside.pop()

class Linear(torch.nn.Linear):
    def __init__(self, k, n, bias, params_dtype, device):
        super().__init__(k, n, bias, device, params_dtype)

    def forward(self, x, is_first_microbatch):
        assert inside and x.shape[0] % 32 == 0
        return super().forward(x)
"""
RECIPES = """
from types import SimpleNamespace as Format

class Recipe:
    def __init__(self, fp8_format):
        self.fp8_format = fp8_format

class Float8BlockScaling(Recipe): ...
class Float8CurrentScaling(Recipe): ...
class DelayedScaling(Recipe): ...
class MXFP8BlockScaling(Recipe): ...

def QParams(**params):
    return params

Format = Format(E4M3="e4m3", HYBRID="hybrid")
"""


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
        (package / "common").mkdir()
        (package / "common" / "__init__.py").touch()
        (package / "common" / "recipe.py").write_text(RECIPES)
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


@pytest.mark.parametrize(
    ("recipe", "kind", "fmt", "params"),
    [
        (RecipeConfig(), "Float8BlockScaling", "e4m3", {"power_2_scale": True, "amax_epsilon": 0.0}),
        (RecipeConfig(scale="fp32"), "Float8BlockScaling", "e4m3", {"power_2_scale": False, "amax_epsilon": 0.0}),
        (RecipeConfig(granularity="tensor", scale="fp32", grad_format="e5m2"), "Float8CurrentScaling", "hybrid",
         {"power_2_scale": False, "amax_epsilon": 0.0}),
        (RecipeConfig(granularity="tensor_delayed", grad_format="e5m2"), "DelayedScaling", "hybrid", None),
        (RecipeConfig(granularity="mxfp8"), "MXFP8BlockScaling", "e4m3", None),
    ],
)  # fmt: skip
def test_recipes_in_its_terms(
    recipe: RecipeConfig, kind: str, fmt: str, params: dict[str, object] | None, install: Callable[..., None]
) -> None:
    install("2.20.2", PLAIN_TE)
    made = te_recipe(recipe)
    assert (type(made).__name__, made.fp8_format, made.backward_override) == (kind, fmt, None)
    for role in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        assert getattr(made, role, None) == params


def test_padding_counting_and_gradients(install: Callable[..., None]) -> None:
    install("2.20.2", PLAIN_TE)
    layer = Fp8Linear(48, 16, backend="te", dtype=torch.bfloat16)
    plain = nn.Linear(48, 16, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(17, 48, dtype=torch.bfloat16)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, wanted = layer(ours), plain(theirs)
    torch.testing.assert_close(y, wanted)
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy)
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(layer.weight.grad, plain.weight.grad)
    torch.testing.assert_close(layer.bias.grad, plain.bias.grad)
    flops = 2 * 17 * 48 * 16
    assert layer.counter.flops == {d: {"fp8": flops, "bf16": 0} for d in ("fprop", "dgrad", "wgrad")}
    assert layer.counter.padding_flops == 3 * 2 * 15 * 48 * 16
    assert list(layer.state_dict()) == [n for n, _ in layer.named_parameters()] == ["weight", "bias"]
    layer(x).sum().backward()  # an input without gradient: no dgrad
    assert [layer.counter.flops[d]["fp8"] // flops for d in ("fprop", "dgrad", "wgrad")] == [2, 1, 2]
    nothing = te_forward(layer, x[:0].clone().requires_grad_())
    nothing.sum().backward()
    assert nothing.shape == (0, 16)


def test_one_autocast_around_the_model_and_one_for_each_linear_outside(install: Callable[..., None]) -> None:
    install("2.20.2", PLAIN_TE)
    te, first, second = import_te(), RecipeConfig(), RecipeConfig(scale="fp32")

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (Fp8Linear(32, 32, backend="te", dtype=torch.bfloat16) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda t: self.b(self.a(t)), x, use_reentrant=False)

    model, x = Two(), torch.zeros(32, 32, dtype=torch.bfloat16, requires_grad=True)
    open_autocast(model, first)
    y = model(x)
    assert te.entered == ["block pow2"] and te.inside == []
    y.sum().backward()
    assert te.entered == 3 * ["block pow2"] and te.inside == []  # both recomputed

    copied = copy.deepcopy(model)
    copied(x)
    assert len(te.entered) == 4  # as before, one

    open_autocast(model, second)  # once more, with another recipe: no second autocast
    te.entered.clear()
    model.a.recipe = second
    with torch.no_grad():
        model(x)
    assert te.entered == ["block fp32", "block pow2"]  # b has its own
    with pytest.raises(RuntimeError, match="dtype"):
        model(x.float())
    assert te.inside == []
    model.a(x)
    assert te.entered[-1] == "block fp32" and te.inside == []
