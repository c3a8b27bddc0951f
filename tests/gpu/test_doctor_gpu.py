"""The doctor on a real GPU: what it runs there is right, and the table follows from it."""

from __future__ import annotations

import json

import pytest
import torch

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.doctor import gpu
from fp8ctl.fp8.backend import RECIPES, choose_backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


@pytest.fixture(scope="module")
def real(fp8ctl):
    """What the command says of this machine, as data."""
    return json.loads(fp8ctl("doctor", "--json").stdout)


@hopper
def test_everything_of_the_gpu_is_ok_on_hopper(real) -> None:
    by_name = {f["name"]: f for f in real["findings"]}
    names = [
        "GPU", "compute capability", "driver", "cuBLASLt by block", "cuBLASLt by row", "cuBLASLt by tensor", "Triton",
        "cuDNN attention", "flash varlen", "attention", "NCCL", "gloo", "C compiler",
    ]  # fmt: skip
    assert {
        name: (by_name[name]["state"], by_name[name]["detail"]) for name in names if by_name[name]["state"] != "ok"
    } == {}
    assert torch.cuda.get_device_name() in by_name["GPU"]["detail"]
    assert real["ok"] is True


@hopper
def test_the_table_says_yes_for_every_native_recipe_on_hopper(real) -> None:
    runs = {(r["recipe"], r["backend"], r["gemm"]): r for r in real["recipes"]}
    native = [name for name in RECIPES if not name.startswith("te_")]
    on_cublas = {name: runs[name, "native", "cublas"] for name in native}
    refused = {name: r["reason"] for name, r in on_cublas.items() if not r["runs"]}
    assert refused == {"infir2_e5m2_grad": "cuBLAS multiplies no E5M2 gradients with block scales"}
    by_block = [name for name in native if RECIPES[name].granularity == "block"]
    assert {name: r["reason"] for name in by_block if not (r := runs[name, "native", "triton"])["runs"]} == {}
    assert all("unproven" not in r["reason"] for r in runs.values())


@hopper
def test_auto_takes_native_on_hopper() -> None:
    for name, recipe in RECIPES.items():
        if name.startswith("te_"):
            continue
        chosen = choose_backend("auto", recipe=recipe, device_type="cuda")
        wanted = "triton" if name == "infir2_e5m2_grad" else "cublas"
        assert (chosen.name, chosen.gemm) == ("native", wanted), chosen
    forced = choose_backend("native", recipe=RecipeConfig(), device_type="cuda", gemm="triton")
    assert (forced.gemm, forced.gemm_reason) == ("triton", "asked for")


@hopper
@pytest.mark.parametrize("kind", ["block", "tile", "row", "tensor"])
def test_scaled_mm_is_as_exact_as_bf16_results_are(kind) -> None:
    assert 0.001 < gpu.scaled_mm_error(kind, "cuda") < 0.003


@pytest.mark.parametrize("check", [gpu.cudnn_attention, gpu.flash_varlen, gpu.attention_choice, gpu.triton, gpu.nccl])
def test_checks_answer_in_this_process_too(check) -> None:
    answer = check()
    assert answer.state == "ok", answer
