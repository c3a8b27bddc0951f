"""What executes FP8 GEMMs: chosen once, with the reason in words for the run's record.

    reference  anywhere: values are rounded to FP8, plain PyTorch multiplies
    native     GPUs with FP8 tensor cores: Triton quantisers, and a GEMM of one of two kinds:
               cublas  row and tensor scales on any of them; tile and block scales on Hopper with CUDA 12.9, E4M3 only
               triton  tile and block scales on any of them, E5M2 gradients as well
    te         transformer-engine's modules, only when asked for: auto never takes it

What is impossible raises PrecisionError with a hint; nothing downgrades silently.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.gemms import BackendName, GemmKernel

FIRST_FP8_CAPABILITY = (8, 9)
PROVEN_CAPABILITIES = ((9, 0),)
"""Where the native backend has been run, tests and training. Elsewhere its trial still decides, and the reason says unproven."""
TE_ONLY = ("tensor_delayed", "mxfp8")
"""Granularities that no other backend has."""

_HOPPER = (9, 0)
_OLDEST_CUDA = (12, 9)
_TE_WORKS = "transformer-engine's own modules and recipe"
_EMULATES = "values are rounded to FP8, no GEMM gets faster"


@dataclass(frozen=True)
class Backend:
    """The chosen backend and why."""

    name: BackendName
    reason: str
    gemm: GemmKernel | None = None
    """What multiplies on `native`; None elsewhere."""
    gemm_reason: str = ""


class Obstacle(NamedTuple):
    """Why something can't run, and one line that mends it."""

    why: str
    fix: str


def choose_backend(asked: str, *, recipe: RecipeConfig, device_type: str, gemm: str = "auto") -> Backend:
    """The backend for `precision.backend=asked` and `precision.gemm=gemm`, for a recipe on `cpu` or `cuda`.

    auto takes `native` where it runs, which it tries out, and `reference` elsewhere; never `te`.

    Raises PrecisionError for a name that does not exist, and for whatever can't run as it was asked for.
    """
    if asked not in ("auto", "reference", "native", "te"):
        raise PrecisionError(
            f"unknown FP8 backend {asked!r}",
            "use precision.backend=auto, reference, native or te (see `fp8ctl doctor`)",
        )
    if gemm not in ("auto", "cublas", "triton"):
        raise PrecisionError(f"unknown GEMM {gemm!r}", "use precision.gemm=auto, cublas or triton")
    if asked in ("reference", "te") and gemm != "auto":
        raise PrecisionError(
            f"precision.gemm={gemm} is a setting of the native backend, this is {asked}",
            "drop precision.gemm, or set precision.backend=native",
        )
    if asked == "te":
        return _te(recipe, device_type)
    if recipe.granularity in TE_ONLY:
        raise PrecisionError(
            f"the {recipe.granularity} recipe exists on transformer-engine only, precision.backend is {asked}",
            "set precision.backend=te, or precision.recipe.granularity=tensor or block",
        )
    if asked == "reference":
        return Backend("reference", "asked for: values are rounded to FP8, GEMMs run in the dtype outside FP8")
    found = _native(recipe, device_type, gemm)
    if not isinstance(found, Obstacle):
        why = "asked for" if asked == "native" else "auto"
        return Backend("native", f"{why}: {_ran_right()}", *found)
    if asked == "native" or gemm != "auto":
        what = "the native FP8 backend" if gemm == "auto" else f"precision.gemm={gemm}"
        raise PrecisionError(
            f"{what} can't run: {found.why}",
            f"{found.fix}; precision.backend=reference emulates anywhere; `fp8ctl doctor` shows what runs here",
        )
    return Backend("reference", f"auto: no native FP8, {found.why}; {_EMULATES}")


def native_obstacle(recipe: RecipeConfig, device_type: str, gemm: str = "auto") -> str | None:
    """Why the native backend can't run this recipe on this device, in words; None if it can."""
    found = _native(recipe, device_type, gemm)
    return found.why if isinstance(found, Obstacle) else None


def lacks_fp8_units(device_type: str) -> str | None:
    """Why a GPU can only emulate FP8, in words; None on a CPU, where nothing else is expected, and where it has the units."""
    if device_type != "cuda" or torch.version.cuda is None or _capability() >= FIRST_FP8_CAPABILITY:
        return None
    return _no_fp8_units(_capability())


# ---------------------------------------------------------------- native


def _native(recipe: RecipeConfig, device_type: str, gemm: str) -> tuple[GemmKernel, str] | Obstacle:
    """The GEMM to use and why, or what is in the way."""
    obstacle = _gpu_obstacle(recipe, device_type)
    if obstacle is not None:
        return obstacle
    if gemm == "triton":
        return _triton_obstacle(recipe) or ("triton", "asked for")
    cublas = _cublas_obstacle(recipe)
    if cublas is None:
        return "cublas", "asked for" if gemm == "cublas" else f"auto: cuBLAS scales by {_scales(recipe)} here"
    if gemm == "cublas" or recipe.granularity != "block":
        return cublas
    triton = _triton_obstacle(recipe)
    if triton is None:
        return "triton", f"auto: {cublas.why}; the Triton GEMM does"
    return Obstacle(f"{cublas.why}, and the Triton GEMM is no way out: {triton.why}", cublas.fix)


def _gpu_obstacle(recipe: RecipeConfig, device_type: str) -> Obstacle | None:
    """What keeps every native GEMM from running."""
    if recipe.granularity in TE_ONLY:
        return Obstacle(f"{recipe.granularity} exists on transformer-engine only", "set precision.backend=te")
    if device_type != "cuda":
        return Obstacle("the run is on the CPU", "run on a GPU of compute capability 8.9 or newer")
    if not torch.cuda.is_available():
        return Obstacle("torch sees no GPU", "run on a GPU of compute capability 8.9 or newer")
    if torch.version.cuda is None:
        return Obstacle("torch was not built for CUDA", "install a CUDA build of torch")
    capability = _capability()
    if capability < FIRST_FP8_CAPABILITY:
        return Obstacle(_no_fp8_units(capability), "use a GPU of compute capability 8.9 or newer, or precision=bf16")
    if importlib.util.find_spec("triton") is None:
        return Obstacle("triton is not installed", "pip install triton")
    return None


def _no_fp8_units(capability: tuple[int, int]) -> str:
    first = _dotted(FIRST_FP8_CAPABILITY)
    return f"the GPU has no FP8 tensor cores (compute capability {_dotted(capability)}, they begin at {first})"


def _cublas_obstacle(recipe: RecipeConfig) -> Obstacle | None:
    return cublas_lacks(recipe) or _trial(torch.cuda.current_device(), "cublas", recipe.granularity)


def cublas_lacks(recipe: RecipeConfig) -> Obstacle | None:
    """What cuBLAS has not got for this recipe on the current GPU, by versions alone."""
    if recipe.granularity != "block":
        return None
    capability = _capability()
    if capability != _HOPPER:
        return Obstacle(
            f"cuBLAS scales by block on compute capability 9.0 only, the GPU has {_dotted(capability)}",
            "set precision.gemm=triton",
        )
    if _cuda_of_torch() < _OLDEST_CUDA:
        return Obstacle(
            f"cuBLAS scales by block since CUDA 12.9, torch was built for {torch.version.cuda}",
            "install a torch built for CUDA 12.9 or newer, or set precision.gemm=triton",
        )
    if recipe.grad_format != "e4m3":
        return Obstacle(
            f"cuBLAS multiplies no {recipe.grad_format.upper()} gradients with block scales",
            "set precision.gemm=triton, or precision.recipe.grad_format=e4m3",
        )
    return None


def _triton_obstacle(recipe: RecipeConfig) -> Obstacle | None:
    if recipe.granularity != "block":
        return Obstacle(
            f"the Triton GEMM scales by block only, the recipe scales by {recipe.granularity}",
            "set precision.gemm=cublas",
        )
    return _trial(torch.cuda.current_device(), "triton", recipe.granularity)


@functools.cache
def _trial(device: int, gemm: GemmKernel, granularity: str) -> Obstacle | None:
    """What went wrong when the three GEMMs of a linear layer were run once on the GPU."""
    try:
        from fp8ctl.fp8.native import self_check

        fault = self_check(gemm, granularity)
    except Exception as e:  # a broken Triton, compiler or cuBLAS shows as any of a dozen types
        fault = f"{type(e).__name__}: {e}".splitlines()[0][:200]
    if fault is None:
        return None
    name = "cuBLAS" if gemm == "cublas" else "the Triton GEMM"
    return Obstacle(f"trying out {name} by {granularity} failed: {fault}", "see what `fp8ctl doctor` finds broken")


def _ran_right() -> str:
    capability = _capability()
    text = f"FP8 GEMMs ran right in a trial on this {torch.cuda.get_device_name()} (CUDA {torch.version.cuda})"
    if capability in PROVEN_CAPABILITIES:
        return text
    return f"{text}; unproven on compute capability {_dotted(capability)}, nobody has trained on it"


def _scales(recipe: RecipeConfig) -> str:
    return "tile and block" if recipe.granularity == "block" else recipe.granularity


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability(torch.cuda.current_device())


def _cuda_of_torch() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


# ---------------------------------------------------------------- transformer-engine


def _te(recipe: RecipeConfig, device_type: str) -> Backend:
    obstacle = _te_obstacle(recipe, device_type)
    if obstacle is not None:
        raise PrecisionError(
            f"the te FP8 backend can't run: {obstacle.why}", f"{obstacle.fix}; `fp8ctl doctor` shows what runs here"
        )
    return Backend("te", f"asked for: {_TE_WORKS}")


def _te_obstacle(recipe: RecipeConfig, device_type: str) -> Obstacle | None:
    from fp8ctl.fp8.te import te_obstacle

    why = te_obstacle(recipe, device_type)
    if why is None:
        return None
    if recipe.granularity == "row" or recipe.wgrad == "x_block":
        return Obstacle(why, "set precision.backend=native")
    if importlib.util.find_spec("transformer_engine") is None:
        return Obstacle(why, "pip install 'fp8ctl[te]' on a machine with CUDA")
    if recipe.granularity == "mxfp8":
        return Obstacle(why, "use a GPU of compute capability 10.0 (Blackwell)")
    return Obstacle(why, "set precision.backend=auto, or mend what is named")


# ---------------------------------------------------------------- the table


class Row(NamedTuple):
    """Whether a recipe runs on a backend here. `recipe` is a name for `precision=`; `gemm` is empty where there is no choice."""

    recipe: str
    backend: str
    gemm: str
    runs: bool
    reason: str
    fix: str


RECIPES = {
    "infir2": RecipeConfig(),
    "infir2_fp32_scale": RecipeConfig(name="infir2_fp32_scale", scale="fp32"),
    "infir2_e5m2_grad": RecipeConfig(name="infir2_e5m2_grad", grad_format="e5m2"),
    "infir2_x_block_wgrad": RecipeConfig(name="infir2_x_block_wgrad", wgrad="x_block"),
    "row": RecipeConfig(name="row", granularity="row", scale="fp32"),
    "tensor": RecipeConfig(name="tensor", granularity="tensor", scale="fp32"),
    "te_delayed": RecipeConfig(name="te_delayed", granularity="tensor_delayed", scale="fp32", grad_format="e5m2"),
    "te_mxfp8": RecipeConfig(name="te_mxfp8", granularity="mxfp8"),
}
"""The FP8 recipes of conf/precision that ask different things of a backend."""
PLACES = (("reference", ""), ("native", "cublas"), ("native", "triton"), ("te", ""))
"""Backends, with the GEMM where there is a choice."""
CASES = (("bf16", "torch", ""), *((recipe, *place) for recipe in RECIPES for place in PLACES))
"""Recipe, backend and GEMM of each row of the table; BF16 needs no FP8 backend."""


def what_runs(device_type: str) -> list[Row]:
    """Every recipe on every backend, tried out where that takes a trial."""
    return [runs_here(*case, device_type) for case in CASES]


def runs_here(recipe: str, backend: str, gemm: str, device_type: str) -> Row:
    """One row of `what_runs`."""
    if recipe == "bf16":
        return Row(recipe, backend, gemm, True, "plain PyTorch", "")
    obstacle, works = _place_obstacle(RECIPES[recipe], backend, gemm, device_type)
    if obstacle is None:
        return Row(recipe, backend, gemm, True, works, "")
    return Row(recipe, backend, gemm, False, obstacle.why, obstacle.fix)


def _place_obstacle(recipe: RecipeConfig, backend: str, gemm: str, device_type: str) -> tuple[Obstacle | None, str]:
    """What is in the way, and the words for when nothing is."""
    if backend == "native":
        found = _native(recipe, device_type, gemm)
        return (found, "") if isinstance(found, Obstacle) else (None, _ran_right())
    if backend == "te":
        return _te_obstacle(recipe, device_type), _TE_WORKS
    if recipe.granularity in TE_ONLY:
        return Obstacle(f"{recipe.granularity} exists on transformer-engine only", "set precision.backend=te"), ""
    return None, "emulated in plain PyTorch: for numerics and tests, no speed claim"
