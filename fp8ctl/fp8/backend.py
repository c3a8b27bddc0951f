"""What executes FP8 GEMMs: chosen once, with the reason in words for the run's record."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.gemms import BackendName

_HOPPER = (9, 0)
_OLDEST_CUDA = (12, 9)
_EMULATES = "values are rounded to FP8, no GEMM gets faster"


@dataclass(frozen=True)
class Backend:
    """The chosen backend and why."""

    name: BackendName
    reason: str


def choose_backend(asked: str, *, recipe: RecipeConfig, device_type: str) -> Backend:
    """The backend for `precision.backend=asked`, for a recipe on `cpu` or `cuda`.

    auto takes `native` where it runs, which it tries out, and `reference` elsewhere.

    Raises PrecisionError for one that does not exist, and for `native` where it can't run: nothing downgrades silently.
    """
    if asked not in ("auto", "reference", "native"):
        raise PrecisionError(
            f"unknown FP8 backend {asked!r}", "use precision.backend=auto, reference or native (see `fp8ctl doctor`)"
        )
    if asked == "reference":
        return Backend("reference", "asked for: values are rounded to FP8, GEMMs run in the dtype outside FP8")
    obstacle = native_obstacle(recipe, device_type)
    if obstacle is None:
        why = "asked for" if asked == "native" else "auto"
        gpu = torch.cuda.get_device_name()
        return Backend("native", f"{why}: block-scaled FP8 GEMMs ran right on this {gpu} (CUDA {torch.version.cuda})")
    if asked == "native":
        raise PrecisionError(
            f"the native FP8 backend can't run: {obstacle}",
            "use precision.backend=reference (emulation) or a GPU of compute capability 9.0; see `fp8ctl doctor`",
        )
    return Backend("reference", f"auto: no native FP8, {obstacle}; {_EMULATES}")


def native_obstacle(recipe: RecipeConfig, device_type: str) -> str | None:
    """Why the native backend can't run this recipe on this device, in words; None if it can."""
    if device_type != "cuda":
        return "the run is on the CPU"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if recipe.grad_format != "e4m3":
        return f"cuBLAS multiplies no {recipe.grad_format.upper()} gradients with block scales"
    return _machine_obstacle(torch.cuda.current_device())


@functools.cache
def _machine_obstacle(device: int) -> str | None:
    """What the GPU or its software lacks; found by running the three GEMMs once."""
    capability = torch.cuda.get_device_capability(device)
    if capability != _HOPPER:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, block-scaled GEMMs need 9.0"
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    if cuda < _OLDEST_CUDA:
        return f"torch was built for CUDA {torch.version.cuda}, block-scaled GEMMs need 12.9"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:
        from fp8ctl.fp8.native import self_check

        fault = self_check()
    except Exception as e:  # a broken Triton, compiler or cuBLAS shows as any of a dozen types
        return f"trying it out failed: {type(e).__name__}: {e}".splitlines()[0][:200]
    return None if fault is None else f"trying it out failed: {fault}"
