"""Carries a plan out: swaps the linears once, before the engine wraps the model; later only their `precision`
changes.
"""

from __future__ import annotations

from torch import nn

from fp8ctl.config.schema import PrecisionConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.backend import Backend
from fp8ctl.fp8.counter import PRECISIONS, GemmCounter, Precision
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.fp8.mlp import Fp8Mlp
from fp8ctl.model.head import Head
from fp8ctl.model.transformer import MLP
from fp8ctl.precision.head import Fp8Head
from fp8ctl.precision.plan import PrecisionPlan, is_tied_head, nearest

EMULATION = Backend("reference", "values are rounded to FP8")


def apply_plan(
    model: nn.Module,
    plan: PrecisionPlan,
    config: PrecisionConfig,
    *,
    backend: Backend = EMULATION,
    weights_are_frozen: bool = False,
) -> None:
    """Makes every linear an Fp8Linear with the plan's precision, in place; BF16 ones too, so that they count and can
    change.

    Parameters stay the same objects under the same names. A tied head gets a counter for its GEMMs. A second call
    only sets precisions and recipe. The recipe is the plan's; `config` must be the one it was made from.

    Args:
        backend: what executes the FP8 GEMMs, from `choose_backend`.
        weights_are_frozen: for inference: quantised weights are kept after their first use.

    Raises:
        PrecisionError: the plan was made for other linears or with another recipe.
    """
    _check_fits(model, plan, config)
    planned = {linear.fqn: linear for linear in plan.linears}
    replaced: dict[nn.Linear, Fp8Linear] = {}
    # With duplicates: a module that hangs in two places must be swapped in both, or one of them would run uncounted
    for fqn, module in list(model.named_modules(remove_duplicate=False)):
        if is_tied_head(module):
            _count_tied_head(module)
        elif isinstance(module, Fp8Linear):
            if fqn in planned:
                module.precision, module.recipe = planned[fqn].precision, plan.recipe
                module.backend, module.kernel = backend.name, backend.gemm or "cublas"
                module.weight_is_frozen = weights_are_frozen
        elif isinstance(module, nn.Linear):
            if module not in replaced:
                kind = Fp8Head if isinstance(module, Head) else Fp8Linear
                replaced[module] = kind.from_linear(
                    module,
                    precision=planned[fqn].precision,
                    recipe=plan.recipe,
                    backend=backend.name,
                    kernel=backend.gemm or "cublas",
                )
                replaced[module].weight_is_frozen = weights_are_frozen
            parent, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(parent), name, replaced[module])
    _join_feed_forwards(model)
    if backend.name == "te":
        from fp8ctl.fp8.te import open_autocast

        open_autocast(model, plan.recipe)


def _join_feed_forwards(model: nn.Module) -> None:
    """Swaps each feed-forward whose linears have been swapped, so that a GPU can run it as one call."""
    for fqn, module in list(model.named_modules()):
        if isinstance(module, MLP):
            gate, up, down = module.gate_proj, module.up_proj, module.down_proj
            if isinstance(gate, Fp8Linear) and isinstance(up, Fp8Linear) and isinstance(down, Fp8Linear):
                parent, _, name = fqn.rpartition(".")
                setattr(model.get_submodule(parent), name, Fp8Mlp(gate, up, down, module))


def fp8_linears(model: nn.Module) -> dict[str, Fp8Linear]:
    """FQN -> layer of every Fp8Linear, in the model's order."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, Fp8Linear)}


def set_precision(model: nn.Module, fqn: str, precision: Precision) -> None:
    """Changes one linear from the next forward pass on; call it between steps.

    Raises:
        PrecisionError: no such linear, or no such precision.
    """
    layers = fp8_linears(model)
    if fqn not in layers:
        raise PrecisionError(f"no linear {fqn!r}{nearest(fqn, layers)}", "use a name from plan.json")
    if precision not in PRECISIONS:
        raise PrecisionError(f"no precision {precision!r}", f"use {' or '.join(PRECISIONS)}")
    layers[fqn].precision = precision


def left_to_bf16(model: nn.Module) -> dict[str, str]:
    """FQN -> why, of linears that are planned in FP8 and that transformer-engine can't quantise."""
    from fp8ctl.fp8.te import size_obstacle

    planned = {
        f: layer for f, layer in fp8_linears(model).items() if layer.backend == "te" and layer.precision == "fp8"
    }
    return {fqn: why for fqn, layer in planned.items() if (why := size_obstacle(layer)) is not None}


def keep_quantized_weights(model: nn.Module) -> None:
    """Lets every linear reuse its quantised weight until `weights_changed`, which the caller promises to call after each
    change. For weights that lie whole on the device and serve several micro-steps.
    """
    for layer in fp8_linears(model).values():
        layer.weight_is_kept = True


def weights_changed(model: nn.Module) -> None:
    """Makes every linear quantise its weight anew."""
    for layer in fp8_linears(model).values():
        layer.weight_changed()


def _check_fits(model: nn.Module, plan: PrecisionPlan, config: PrecisionConfig) -> None:
    if plan.recipe != config.recipe:
        raise PrecisionError(
            f"the plan's recipe {plan.recipe.name!r} is not that of the settings, {config.recipe.name!r}",
            "make the plan anew from these settings",
        )
    found = {fqn: (m.out_features, m.in_features) for fqn, m in model.named_modules() if isinstance(m, nn.Linear)}
    tied = {fqn for fqn, m in model.named_modules() if is_tied_head(m)}
    wanted = {p.fqn: (p.out_features, p.in_features) for p in plan.linears if p.fqn not in tied}
    differing = [fqn for fqn in {**found, **wanted} if found.get(fqn) != wanted.get(fqn)]
    if differing:
        raise PrecisionError(
            f"the plan does not fit the model: {len(differing)} linears differ, the first is {differing[0]!r}",
            "make the plan anew from this model",
        )


def _count_tied_head(head: nn.Module) -> None:
    """Gives a tied head a counter: it multiplies by the embedding's weight and has no linear to swap."""
    if getattr(head, "counter", None) is None:
        head.counter = GemmCounter()  # type: ignore[assignment]
