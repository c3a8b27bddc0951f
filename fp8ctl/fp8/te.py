"""The `te` backend: the FP8 GEMMs of a linear through transformer-engine's own Linear.

`Fp8Linear` stays what a model holds: it owns the parameters, counts, reports and switches. Behind it stands a
transformer_engine.pytorch.Linear on the very same parameter objects, which is no submodule: checkpoints never hold its extra
state, and any other backend loads them. What that state would carry, the amax history of delayed scaling, starts anew after a
resume.

Autocast. `open_autocast` puts one around the whole model's forward, because delayed scaling updates its scales whenever the
outermost one is left. A linear that runs outside of it, as in a recomputed block, enters one by itself. Inside it must not: on the
way out of an inner one transformer-engine forgets that it has seen the model's first module, takes each linear for that, and moves
all scales of delayed scaling on in the backward pass of each.

ZeRO-3 is refused (`config/checks.py`): transformer-engine holds an FP8 copy of every weight, turned both ways, from forward to backward.
That is two bytes a parameter on each rank, all that stage 3 saves.

Infinities. transformer-engine rounds one to the largest value of its format where this project's own kernels make it NaN; NaN stays
NaN in both.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.calls import report
from fp8ctl.fp8.formats import E4M3, FORMATS

if TYPE_CHECKING:
    from fp8ctl.fp8.linear import Fp8Linear

_OLDEST = (2, 9)
"""First release that has `autocast` and says whether it can run a recipe. (Block scaling for Hopper is in since 2.3.)"""
_KEPT = "te"
"""Stands in `Fp8Linear.kept_weights` for what transformer-engine keeps itself."""
_PAD_TOKENS_TO = 32
"""transformer-engine refuses token counts that are no multiple of 8 (16 for wgrad by block, 32 for MXFP8)."""
_open: list[tuple[RecipeConfig, Any]] = []
"""(Recipe, autocast) of the model whose forward is running, if any."""


def import_te() -> Any:
    """transformer_engine.pytorch, on the cuDNN that torch itself uses.

    Left to itself it opens the copies that lie in the system, of another version; two versions in one process fail in many ways
    (symbols that are missing, no fused attention, torch refusing to start). So torch's are opened first: the loader takes a library
    that is open already. Raises whatever a broken installation raises.
    """
    loaded = sys.modules.get("transformer_engine.pytorch")
    if loaded is not None:
        return loaded  # each linear asks, in each forward pass
    spec = importlib.util.find_spec("nvidia.cudnn") if importlib.util.find_spec("nvidia") else None
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        os.environ.setdefault("CUDNN_HOME", folder)
        for library in sorted(Path(folder).glob("lib/libcudnn*.so*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("transformer_engine.pytorch")


def te_obstacle(recipe: RecipeConfig, device_type: str) -> str | None:
    """Why this recipe can't run on transformer-engine here, in words; None if it can."""
    if recipe.granularity == "row" or recipe.wgrad != "fp8":
        lacking = "granularity row" if recipe.granularity == "row" else f"wgrad {recipe.wgrad}"
        return f"transformer-engine has no {lacking}"
    if importlib.util.find_spec("transformer_engine") is None:
        return "transformer-engine is not installed"
    if device_type != "cuda":
        return "the run is on the CPU, transformer-engine needs a GPU"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        # Whatever is wrong with it shows here, as any of a dozen types
        te = import_te()
        version = importlib.import_module("transformer_engine").__version__
        if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < _OLDEST:
            return f"transformer-engine {version} is too old, {'.'.join(map(str, _OLDEST))} is the oldest that will do"
        te_recipe(recipe)
        check = {"block": "is_fp8_block_scaling_available", "mxfp8": "is_mxfp8_available"}.get(
            recipe.granularity, "is_fp8_available"
        )
        runs, why = getattr(te, check)(return_reason=True)
    except Exception as e:
        return f"transformer-engine is broken: {type(e).__name__}: {e}".splitlines()[0][:200]
    return None if runs else f"transformer-engine: {why}".splitlines()[0][:200]


def te_recipe(recipe: RecipeConfig) -> Any:
    """The recipe in transformer-engine's terms.

    Raises:
        PrecisionError: it has none like this.
    """
    if recipe.granularity == "row" or recipe.wgrad != "fp8":
        raise PrecisionError("transformer-engine has no such recipe", "set precision.backend=native or reference")
    import_te()  # its recipes too open cuDNN
    recipes = importlib.import_module("transformer_engine.common.recipe")
    fmt = recipes.Format.E4M3 if recipe.grad_format == "e4m3" else recipes.Format.HYBRID
    kinds = {
        "block": recipes.Float8BlockScaling,
        "tensor": recipes.Float8CurrentScaling,
        "tensor_delayed": recipes.DelayedScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
    }
    made = kinds[recipe.granularity](fp8_format=fmt)
    # An environment variable can move backward out of FP8, where it would still be counted as FP8
    made.backward_override = None
    if recipe.granularity in ("block", "tensor"):
        params = recipes.QParams(power_2_scale=recipe.scale == "pow2", amax_epsilon=0.0)
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            setattr(made, name, params)
    return made


def size_obstacle(layer: Fp8Linear) -> str | None:
    """Why transformer-engine can't quantise a layer of this size, in words. Such a layer runs, and is counted, in BF16."""
    multiple = 32 if layer.recipe.granularity == "mxfp8" else 16
    for name, size in (("in_features", layer.in_features), ("out_features", layer.out_features)):
        if size % multiple:
            return f"transformer-engine takes multiples of {multiple}, {name} is {size}"
    return None


def can_quantize(layer: Fp8Linear) -> bool:
    """Whether transformer-engine takes a layer of this size."""
    return size_obstacle(layer) is None


@torch.compiler.disable
def te_forward(layer: Fp8Linear, x_MK: Tensor) -> Tensor:
    """Y [M, N] of an FP8 linear, with gradients; counted.

    Rows of zeros are added up to what transformer-engine takes, and cut off again: they change no scale and no gradient.

    Raises:
        PrecisionError: delayed scaling, and weights that are frozen.
    """
    m = x_MK.shape[0]
    missing = -m % _PAD_TOKENS_TO if m else _PAD_TOKENS_TO
    executor, recipe = _executor(layer)
    report(layer, "input", x_MK, "rows", E4M3)
    report(layer, "weight", layer.weight, "block", E4M3)
    # Before it runs: recomputation under a checkpoint ends inside the last linear, as soon as all is there that backward needs
    n, k = layer.weight.shape
    layer.counter.add("fprop", "fp8", m=m, n=n, k=k)
    layer.counter.padding_flops += 2 * missing * n * k
    padded = torch.nn.functional.pad(x_MK, (0, 0, 0, missing)) if missing else x_MK
    is_inside = bool(_open) and _open[-1][0] == layer.recipe
    with contextlib.nullcontext() if is_inside else _autocast(recipe):
        y_MN: Tensor = executor(padded, is_first_microbatch=_is_first_use(layer))
    y_MN = y_MN[:m] if missing else y_MN
    if torch.is_grad_enabled() and y_MN.requires_grad:
        return _CountBackward.apply(y_MN, layer, x_MK.requires_grad, missing)
    return y_MN


def _is_first_use(layer: Fp8Linear) -> bool | None:
    """Whether the weight is quantised anew and then kept (True), was kept (False), or is quantised for this call alone (None)."""
    # Without gradients transformer-engine quantises one way only, and a validation pass would leave that to the next step
    if not (layer.weight_is_frozen or (layer.weight_is_kept and torch.is_grad_enabled())):
        return None
    # A pass in BF16 may have kept the weight as it is since the last change
    is_first = layer.kept_weights is None or layer.kept_weights[0] != _KEPT
    layer.kept_weights = (_KEPT, [])
    return is_first


def open_autocast(model: nn.Module, recipe: RecipeConfig) -> None:
    """Puts one autocast around the model's forward; a second call changes its recipe. See the module's text."""
    is_there = hasattr(model, "te_autocast")
    model.te_autocast = (recipe, te_recipe(recipe))  # type: ignore[assignment]
    if is_there:
        return

    def enter(module: Any, _: object) -> None:
        ours, theirs = module.te_autocast
        context = _autocast(theirs)
        context.__enter__()
        _open.append((ours, context))

    def leave(*_: object) -> None:
        _open.pop()[1].__exit__(None, None, None)

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave, always_call=True)


class _CountBackward(torch.autograd.Function):
    """Passes the gradient on to transformer-engine; counts the two GEMMs that it makes of it."""

    @staticmethod
    def forward(ctx: Any, y_MN: Tensor, layer: Fp8Linear, needs_dx: bool, missing: int) -> Tensor:
        ctx.layer, ctx.needs_dx, ctx.missing = layer, needs_dx, missing
        return y_MN.view_as(y_MN)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor, None, None, None]:
        layer: Fp8Linear = ctx.layer
        (m, n), k = dy_MN.shape, layer.in_features
        report(layer, "grad_output", dy_MN, "rows", FORMATS[layer.recipe.grad_format])
        if ctx.needs_dx:
            layer.counter.add("dgrad", "fp8", m=m, n=k, k=n)
        if layer.weight.requires_grad:
            layer.counter.add("wgrad", "fp8", m=n, n=k, k=m)
        layer.counter.padding_flops += 2 * ctx.missing * n * k * (ctx.needs_dx + layer.weight.requires_grad)
        return dy_MN, None, None, None


def _executor(layer: Fp8Linear) -> tuple[Any, Any]:
    """transformer-engine's Linear on the layer's parameters, and its recipe; made at the first use, and for another recipe.

    Raises:
        PrecisionError: delayed scaling, and weights that are frozen.
    """
    if layer.weight_is_frozen and layer.recipe.granularity == "tensor_delayed":
        raise PrecisionError(
            "delayed scaling has no scales outside training: they come from the steps before, and no checkpoint holds them",
            "evaluate with precision=tensor, infir2 or bf16",
        )
    if layer.te_executor is not None:
        made_for, executor, recipe = layer.te_executor
        if made_for == layer.recipe and executor.weight is layer.weight:
            return executor, recipe
    # On the meta device: it draws no random numbers, which a resumed run would have to draw as well, and takes no memory
    executor = import_te().Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=layer.weight.dtype,
        device="meta",
    )
    executor.weight = layer.weight
    if layer.bias is not None:
        executor.bias = layer.bias
    # In a tuple, where PyTorch does not take it for a submodule
    layer.te_executor = (layer.recipe, executor, te_recipe(layer.recipe))
    layer.weight_changed()  # a new executor has kept nothing
    return layer.te_executor[1:]


def _autocast(recipe: Any) -> Any:
    return import_te().autocast(enabled=True, recipe=recipe)
