from __future__ import annotations

import importlib.util

import pytest
import torch

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8 import backend
from fp8ctl.fp8.backend import Backend, choose_backend

INFIR2 = RecipeConfig()


@pytest.fixture
def machine(monkeypatch):
    """Pretends a GPU: machine(capability, cuda, has_triton)."""

    def pretend(capability: tuple[int, int], cuda: str = "13.0", *, has_triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_triton else None)

    backend._machine_obstacle.cache_clear()
    yield pretend
    backend._machine_obstacle.cache_clear()


def test_auto_says_what_it_chose_and_why() -> None:
    assert choose_backend("auto", recipe=INFIR2, device_type="cpu") == Backend(
        "reference",
        "auto: no native FP8, the run is on the CPU; values are rounded to FP8, no GEMM gets faster",
    )
    assert choose_backend("reference", recipe=INFIR2, device_type="cpu").reason.startswith("asked for")


def test_an_unknown_backend_is_an_error_and_no_downgrade() -> None:
    with pytest.raises(PrecisionError, match="unknown FP8 backend 'te'") as e:
        choose_backend("te", recipe=INFIR2, device_type="cpu")
    assert e.value.hint == "use precision.backend=auto, reference or native (see `fp8ctl doctor`)"


def test_native_where_it_cannot_run_is_an_error_with_the_reason() -> None:
    with pytest.raises(PrecisionError, match="the native FP8 backend can't run: the run is on the CPU") as e:
        choose_backend("native", recipe=INFIR2, device_type="cpu")
    assert "precision.backend=reference" in e.value.hint and "fp8ctl doctor" in e.value.hint


@pytest.mark.parametrize(
    ("capability", "cuda", "has_triton", "reason"),
    [
        ((8, 9), "13.0", True, "the GPU has compute capability 8.9, block-scaled GEMMs need 9.0"),
        ((10, 0), "13.0", True, "the GPU has compute capability 10.0, block-scaled GEMMs need 9.0"),
        ((9, 0), "12.8", True, "torch was built for CUDA 12.8, block-scaled GEMMs need 12.9"),
        ((9, 0), "12.9", False, "triton is not installed"),
    ],
)
def test_what_a_machine_lacks_is_named(machine, capability, cuda, has_triton, reason) -> None:
    machine(capability, cuda, has_triton=has_triton)
    chosen = choose_backend("auto", recipe=INFIR2, device_type="cuda")
    assert (chosen.name, reason in chosen.reason) == ("reference", True)
    with pytest.raises(PrecisionError, match=reason):
        choose_backend("native", recipe=INFIR2, device_type="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines where the trial fails")
def test_a_trial_that_fails_is_a_reason_and_no_crash(machine) -> None:
    machine((9, 0))
    assert "trying it out failed: " in choose_backend("auto", recipe=INFIR2, device_type="cuda").reason


def test_e5m2_gradients_have_no_native_gemm(machine) -> None:
    machine((9, 0))
    with pytest.raises(PrecisionError, match="cuBLAS multiplies no E5M2 gradients with block scales"):
        choose_backend("native", recipe=RecipeConfig(grad_format="e5m2"), device_type="cuda")
