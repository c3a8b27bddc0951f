from __future__ import annotations

import pytest

from fp8ctl.doctor import recipes
from fp8ctl.doctor.apart import Failed, Job
from fp8ctl.doctor.recipes import Reason, RecipeRow, auto_takes, reasons, to_rows

RAN = "FP8 GEMMs ran right in a trial on this NVIDIA H200 (CUDA 13.0)"
ROWS = [
    RecipeRow("bf16", "torch", "", True, "plain PyTorch", ""),
    RecipeRow("infir2", "reference", "", True, "emulated", ""),
    RecipeRow("infir2", "native", "cublas", True, RAN, ""),
    RecipeRow("infir2", "native", "triton", True, RAN, ""),
    RecipeRow("infir2", "te", "", False, "not installed", "pip install 'fp8ctl[te]'"),
    RecipeRow("row", "reference", "", True, "emulated", ""),
    RecipeRow("row", "native", "cublas", True, RAN, ""),
    RecipeRow("row", "native", "triton", False, "by block only", "set precision.gemm=cublas"),
    RecipeRow("row", "te", "", False, "not installed", "pip install 'fp8ctl[te]'"),
    RecipeRow("te_mxfp8", "reference", "", False, "on transformer-engine only", "set precision.backend=te"),
]


def test_auto_follows_the_order_of_the_choice() -> None:
    assert [auto_takes(ROWS, r) for r in ("bf16", "infir2", "row", "te_mxfp8")] == [
        "torch",
        "native cublas",
        "native cublas",
        "",
    ]
    without_cublas = [r._replace(runs=False) if r.gemm == "cublas" else r for r in ROWS]
    assert auto_takes(without_cublas, "infir2") == "native triton"
    assert auto_takes(without_cublas, "row") == "reference"


def test_rows_are_gathered_by_reason() -> None:
    assert reasons(ROWS) == [
        Reason(True, ("torch",), ("bf16",), "plain PyTorch", ""),
        Reason(True, ("reference",), ("infir2", "row"), "emulated", ""),
        Reason(True, ("native cublas",), ("infir2", "row"), RAN, ""),
        Reason(True, ("native triton",), ("infir2",), RAN, ""),
        Reason(False, ("te",), ("infir2", "row"), "not installed", "pip install 'fp8ctl[te]'"),
        Reason(False, ("native triton",), ("row",), "by block only", "set precision.gemm=cublas"),
        Reason(False, ("reference",), ("te_mxfp8",), "on transformer-engine only", "set precision.backend=te"),
    ]


def test_answers_of_the_other_process_are_rows() -> None:
    assert to_rows([list(r) for r in ROWS]) == ROWS


def test_a_trial_that_kills_its_process_takes_no_other_row_with_it(monkeypatch) -> None:
    died = Failed("its process was killed by SIGABRT: cublasLtGroupedMatrixLayoutInit_internal")

    def apart(jobs: list[Job]) -> list[list[object]]:
        if jobs == [recipes._CASES]:
            return [[[list(r[:3]) for r in ROWS]]]
        return [[died if job.arguments[1:] == ("te", "") else list(ROWS[i]) for i, job in enumerate(jobs)]]

    monkeypatch.setattr(recipes, "run_apart", apart)
    rows = to_rows(died)
    assert [r for r in rows if r.backend != "te"] == [r for r in ROWS if r.backend != "te"]
    te = next(r for r in rows if r.backend == "te")
    assert te == RecipeRow("infir2", "te", "", False, f"trying it out failed: {died.how}", "see what is broken above")


def test_without_torch_there_is_one_row(monkeypatch) -> None:
    broken = Failed("ImportError: libtorch_cuda.so: undefined symbol: ncclCommWindowRegister")
    monkeypatch.setattr(recipes, "run_apart", lambda jobs: [[broken]])
    assert to_rows(broken) == [RecipeRow("all", "all", "", False, broken.how, "mend what is broken above")]


def test_a_gpu_left_unusable_makes_its_answers_worthless(monkeypatch) -> None:
    import torch

    from fp8ctl.fp8 import backend

    def spoilt() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(backend, "what_runs", lambda device_type: ROWS[:1])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert recipes.all_rows() == [list(ROWS[0])]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", spoilt)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        recipes.all_rows()


def test_cases_and_rows_can_be_asked_one_by_one() -> None:
    assert recipes.cases()[0] == ["bf16", "torch", ""]
    assert recipes.row("infir2", "reference", "") == [
        "infir2", "reference", "", True, "emulated in plain PyTorch: for numerics and tests, no speed claim", "",
    ]  # fmt: skip
