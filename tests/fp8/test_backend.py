from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from fp8ctl.config.compose import compose
from fp8ctl.config.schema import RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8 import backend
from fp8ctl.fp8.backend import CASES, RECIPES, Backend, choose_backend, native_obstacle, what_runs

INFIR2 = RecipeConfig()
E5M2 = RecipeConfig(grad_format="e5m2")
ROW = RecipeConfig(granularity="row", scale="fp32")
TENSOR = RecipeConfig(granularity="tensor", scale="fp32")
DELAYED = RecipeConfig(granularity="tensor_delayed", scale="fp32")


@pytest.fixture
def machine(monkeypatch):
    """Pretends a GPU: machine(capability, cuda, has_triton=..., faults=...); gives the trials that were run.

    faults: (gemm, granularity) -> what the trial finds wrong, or an exception that it raises.
    """

    def pretend(
        capability: tuple[int, int], cuda: str | None = "13.0", *, has_triton: bool = True, faults=None
    ) -> list:
        trials = []

        def self_check(gemm: str, granularity: str) -> str | None:
            trials.append((gemm, granularity))
            fault = (faults or {}).get((gemm, granularity))
            if isinstance(fault, Exception):
                raise fault
            return fault

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_triton else None)
        # importing the real one needs triton
        monkeypatch.setitem(sys.modules, "fp8ctl.fp8.native", SimpleNamespace(self_check=self_check))
        return trials

    backend._trial.cache_clear()
    yield pretend
    backend._trial.cache_clear()


@pytest.fixture
def te(monkeypatch):
    """te(why): transformer-engine can't run a recipe for this reason, or can (None)."""

    def pretend(why: str | None) -> None:
        monkeypatch.setitem(sys.modules, "fp8ctl.fp8.te", SimpleNamespace(te_obstacle=lambda recipe, device_type: why))

    return pretend


def refused(asked: str, recipe: RecipeConfig = INFIR2, device_type: str = "cuda", **others: str) -> PrecisionError:
    with pytest.raises(PrecisionError) as e:
        choose_backend(asked, recipe=recipe, device_type=device_type, **others)
    return e.value


def test_auto_says_what_it_chose_and_why() -> None:
    assert choose_backend("auto", recipe=INFIR2, device_type="cpu") == Backend(
        "reference",
        "auto: no native FP8, the run is on the CPU; values are rounded to FP8, no GEMM gets faster",
    )
    assert choose_backend("reference", recipe=ROW, device_type="cpu") == Backend(
        "reference", "asked for: values are rounded to FP8, GEMMs run in the dtype outside FP8"
    )


def test_unknown_names_are_errors_and_no_downgrade() -> None:
    e = refused("magic", device_type="cpu")
    assert e.message == "unknown FP8 backend 'magic'"
    assert e.hint == "use precision.backend=auto, reference, native or te (see `fp8ctl doctor`)"
    e = refused("auto", device_type="cpu", gemm="cutlass")
    assert (e.message, e.hint) == ("unknown GEMM 'cutlass'", "use precision.gemm=auto, cublas or triton")


def test_native_where_it_cannot_run_is_an_error_with_the_reason() -> None:
    e = refused("native", device_type="cpu")
    assert e.message == "the native FP8 backend can't run: the run is on the CPU"
    assert e.hint == (
        "run on a GPU of compute capability 8.9 or newer; precision.backend=reference emulates anywhere;"
        " `fp8ctl doctor` shows what runs here"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_torch_without_a_gpu_is_named() -> None:
    assert "torch sees no GPU" in choose_backend("auto", recipe=INFIR2, device_type="cuda").reason


@pytest.mark.parametrize("recipe", [INFIR2, RecipeConfig(scale="fp32"), RecipeConfig(wgrad="x_block"), ROW, TENSOR])
def test_hopper_runs_every_recipe_on_cublas(machine, recipe) -> None:
    trials = machine((9, 0))
    scales = "tile and block" if recipe.granularity == "block" else recipe.granularity
    assert choose_backend("auto", recipe=recipe, device_type="cuda") == Backend(
        "native",
        "auto: FP8 GEMMs ran right in a trial on this NVIDIA Test (CUDA 13.0)",
        "cublas",
        f"auto: cuBLAS scales by {scales} here",
    )
    asked = choose_backend("native", recipe=recipe, device_type="cuda", gemm="cublas")
    assert asked.reason.startswith("asked for: FP8 GEMMs ran right") and asked.gemm_reason == "asked for"
    assert trials == [("cublas", recipe.granularity)], "the trial runs once"


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_other_fp8_gpus_multiply_blocks_with_triton_and_say_unproven(machine, capability) -> None:
    trials = machine(capability)
    dotted = f"{capability[0]}.{capability[1]}"
    chosen = choose_backend("auto", recipe=INFIR2, device_type="cuda")
    assert (chosen.name, chosen.gemm) == ("native", "triton")
    assert chosen.gemm_reason == (
        f"auto: cuBLAS scales by block on compute capability 9.0 only, the GPU has {dotted}; the Triton GEMM does"
    )
    assert chosen.reason == (
        "auto: FP8 GEMMs ran right in a trial on this NVIDIA Test (CUDA 13.0);"
        f" unproven on compute capability {dotted}, nobody has trained on it"
    )
    assert trials == [("triton", "block")]
    chosen = choose_backend("auto", recipe=ROW, device_type="cuda")
    assert (chosen.gemm, f"unproven on compute capability {dotted}" in chosen.reason) == ("cublas", True)
    e = refused("auto", gemm="cublas")
    assert e.message == (
        f"precision.gemm=cublas can't run: cuBLAS scales by block on compute capability 9.0 only, the GPU has {dotted}"
    )
    assert e.hint is not None and e.hint.startswith("set precision.gemm=triton; ")


def test_an_old_cuda_takes_triton_for_blocks_and_cublas_for_rows(machine) -> None:
    machine((9, 0), "12.8")
    chosen = choose_backend("auto", recipe=INFIR2, device_type="cuda")
    assert chosen.gemm == "triton"
    assert chosen.gemm_reason == (
        "auto: cuBLAS scales by block since CUDA 12.9, torch was built for 12.8; the Triton GEMM does"
    )
    assert "unproven" not in chosen.reason
    assert choose_backend("auto", recipe=TENSOR, device_type="cuda").gemm == "cublas"
    e = refused("native", gemm="cublas")
    assert e.message == (
        "precision.gemm=cublas can't run: cuBLAS scales by block since CUDA 12.9, torch was built for 12.8"
    )
    assert e.hint is not None and e.hint.startswith("install a torch built for CUDA 12.9 or newer, or set")
    machine((9, 0), "12.9")
    assert choose_backend("auto", recipe=INFIR2, device_type="cuda").gemm == "cublas"


def test_e5m2_gradients_by_block_take_triton(machine) -> None:
    machine((9, 0))
    chosen = choose_backend("auto", recipe=E5M2, device_type="cuda")
    assert chosen.gemm == "triton"
    assert chosen.gemm_reason == "auto: cuBLAS multiplies no E5M2 gradients with block scales; the Triton GEMM does"
    e = refused("native", E5M2, gemm="cublas")
    assert e.message == "precision.gemm=cublas can't run: cuBLAS multiplies no E5M2 gradients with block scales"
    assert e.hint is not None and "precision.recipe.grad_format=e4m3" in e.hint
    for granularity in ("row", "tensor"):
        recipe = RecipeConfig(granularity=granularity, scale="fp32", grad_format="e5m2")
        assert choose_backend("auto", recipe=recipe, device_type="cuda").gemm == "cublas"


def test_triton_on_request_and_for_blocks_only(machine) -> None:
    machine((9, 0))
    chosen = choose_backend("auto", recipe=INFIR2, device_type="cuda", gemm="triton")
    assert (chosen.name, chosen.gemm, chosen.gemm_reason) == ("native", "triton", "asked for")
    e = refused("native", ROW, gemm="triton")
    assert e.message == (
        "precision.gemm=triton can't run: the Triton GEMM scales by block only, the recipe scales by row"
    )
    assert e.hint is not None and e.hint.startswith("set precision.gemm=cublas; ")


def test_a_gemm_that_was_asked_for_is_never_dropped(machine) -> None:
    e = refused("auto", device_type="cpu", gemm="triton")
    assert e.message == "precision.gemm=triton can't run: the run is on the CPU"
    e = refused("reference", device_type="cpu", gemm="cublas")
    assert e.message == "precision.gemm=cublas is a setting of the native backend, this is reference"
    assert e.hint == "drop precision.gemm, or set precision.backend=native"


def test_a_gpu_without_fp8_emulates_and_says_so(machine) -> None:
    trials = machine((8, 0))
    why = "the GPU has no FP8 tensor cores (compute capability 8.0, they begin at 8.9)"
    assert choose_backend("auto", recipe=INFIR2, device_type="cuda") == Backend(
        "reference", f"auto: no native FP8, {why}; values are rounded to FP8, no GEMM gets faster"
    )
    e = refused("native")
    assert e.message == f"the native FP8 backend can't run: {why}"
    assert e.hint is not None and "or precision=bf16" in e.hint
    assert trials == []


def test_a_torch_of_another_make_is_named(machine) -> None:
    machine((9, 4), None)  # what ROCm says of an MI300
    assert native_obstacle(INFIR2, "cuda") == "torch was not built for CUDA"


def test_a_missing_triton_is_named(machine) -> None:
    machine((9, 0), has_triton=False)
    assert native_obstacle(INFIR2, "cuda") == "triton is not installed"
    assert refused("native").hint == (
        "pip install triton; precision.backend=reference emulates anywhere; `fp8ctl doctor` shows what runs here"
    )


def test_a_trial_that_fails_is_a_reason_and_no_crash(machine) -> None:
    machine(
        (9, 0), faults={("cublas", "row"): "wgrad is off by 0.5", ("cublas", "block"): OSError("libcublasLt.so.13\nx")}
    )
    assert native_obstacle(ROW, "cuda") == "trying out cuBLAS by row failed: wgrad is off by 0.5"
    assert refused("native", ROW).hint is not None
    chosen = choose_backend("auto", recipe=INFIR2, device_type="cuda")
    assert chosen.gemm == "triton"
    assert chosen.gemm_reason == (
        "auto: trying out cuBLAS by block failed: OSError: libcublasLt.so.13; the Triton GEMM does"
    )


def test_when_both_gemms_fail_both_reasons_are_told(machine) -> None:
    machine((8, 9), faults={("triton", "block"): RuntimeError("Failed to find C compiler")})
    chosen = choose_backend("auto", recipe=INFIR2, device_type="cuda")
    assert chosen.name == "reference"
    assert "cuBLAS scales by block on compute capability 9.0 only" in chosen.reason
    assert "trying out the Triton GEMM by block failed: RuntimeError: Failed to find C compiler" in chosen.reason


def test_te_only_when_asked(machine, te) -> None:
    machine((9, 0))
    te(None)
    assert choose_backend("auto", recipe=INFIR2, device_type="cuda").name == "native"
    assert choose_backend("te", recipe=DELAYED, device_type="cuda") == Backend(
        "te", "asked for: transformer-engine's own modules and recipe"
    )
    e = refused("te", gemm="cublas")
    assert e.message == "precision.gemm=cublas is a setting of the native backend, this is te"
    for asked in ("auto", "native", "reference"):
        e = refused(asked, DELAYED)
        assert e.message == (
            f"the tensor_delayed recipe exists on transformer-engine only, precision.backend is {asked}"
        )
        assert e.hint == "set precision.backend=te, or precision.recipe.granularity=tensor or block"


def test_te_that_cannot_run_is_an_error_with_the_reason(monkeypatch, te) -> None:
    te("transformer-engine is not installed")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    e = refused("te", device_type="cpu")
    assert e.message == "the te FP8 backend can't run: transformer-engine is not installed"
    assert e.hint == ("pip install 'fp8ctl[te]' on a machine with CUDA; `fp8ctl doctor` shows what runs here")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    te("it has no granularity row")
    assert refused("te", ROW).hint == "set precision.backend=native; `fp8ctl doctor` shows what runs here"
    te("MXFP8 needs compute capability 10.0")
    assert "Blackwell" in (refused("te", RecipeConfig(granularity="mxfp8")).hint or "")


def test_the_table_on_hopper(machine, te) -> None:
    trials = machine((9, 0))
    te(None)
    rows = {(r.recipe, r.backend, r.gemm): r for r in what_runs("cuda")}
    assert list(rows) == list(CASES)
    no = [case for case, r in rows.items() if not r.runs]
    assert no == [
        ("infir2_e5m2_grad", "native", "cublas"),
        ("row", "native", "triton"),
        ("tensor", "native", "triton"),
        *((r, *place) for r in ("te_delayed", "te_mxfp8") for place in backend.PLACES[:3]),
    ]
    assert all(bool(r.fix) != r.runs for r in rows.values())
    assert all(r.reason for r in rows.values())
    assert sorted(trials) == [("cublas", "block"), ("cublas", "row"), ("cublas", "tensor"), ("triton", "block")]


def test_the_table_without_a_gpu(te) -> None:
    te("the run is on the CPU")
    rows = what_runs("cpu")
    assert [r.recipe for r in rows if r.runs and r.backend == "reference"] == list(RECIPES)[:6]
    assert {r.reason for r in rows if r.backend == "native" and r.recipe == "infir2"} == {"the run is on the CPU"}
    assert [r.recipe for r in rows if r.backend == "torch"] == ["bf16"]


def test_recipes_of_the_table_are_those_of_conf() -> None:
    for name, recipe in RECIPES.items():
        assert compose("train_cpt", [f"precision={name}"]).precision.recipe == recipe
