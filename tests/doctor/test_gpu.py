"""The checks of a GPU, on machines that have none: judgements by pretended values, numerics on the CPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from fp8ctl.doctor import gpu, software
from fp8ctl.doctor.finding import Answer
from fp8ctl.doctor.machine import Driver
from fp8ctl.errors import ModelError
from fp8ctl.fp8.reference import Quantized, quantize_tile
from fp8ctl.model.attention_choice import AttentionChoice

GIB = 1 << 30
CHECKS_OF_A_GPU = (
    gpu.capability, gpu.cublas_block, gpu.cublas_row, gpu.cublas_tensor,
    gpu.cudnn_attention, gpu.flash_varlen, gpu.attention_choice, gpu.nccl,
)  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """machine(capability, cuda, count, driver=...): a GPU of this kind, or none."""

    def pretend(
        capability: tuple[int, int] | None, cuda: str | None = "13.0", count: int = 1, *, driver: Driver | None = None
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA H200")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=140 * GIB))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(gpu, "ask_driver", lambda: driver)

    return pretend


def test_devices(machine) -> None:
    machine((9, 0), count=2)
    assert gpu.devices() == Answer("ok", "2 x NVIDIA H200, 140 GiB")
    machine(None, None)
    assert gpu.devices() == Answer("note", "none: everything runs on the CPU, FP8 is emulated")
    machine(None, None, driver=Driver("580.159.04", (13, 0), 8))
    assert gpu.devices() == Answer(
        "broken",
        "the driver has 8, torch sees none: it is a CPU build",
        "install a CUDA build of torch (https://pytorch.org)",
    )
    machine(None, "13.0", driver=Driver("535.54.03", (12, 2), 1))
    assert gpu.devices() == Answer(
        "broken", "the driver has 1, torch sees none", "see the line on the driver, and CUDA_VISIBLE_DEVICES"
    )


def test_capability(machine) -> None:
    machine((9, 0))
    assert gpu.capability() == Answer("ok", "compute capability 9.0")
    machine((8, 9))
    assert gpu.capability() == Answer(
        "ok", "compute capability 8.9; the native backend is unproven there (proven: 9.0)"
    )
    machine((8, 0))
    answer = gpu.capability()
    assert (answer.state, answer.detail) == ("absent", "compute capability 8.0: no FP8 tensor cores")
    assert answer.fix == "use a GPU of compute capability 8.9 or newer; FP8 is emulated here, precision=bf16 runs"


@pytest.mark.parametrize("check", CHECKS_OF_A_GPU)
def test_without_a_gpu_nothing_is_tried(machine, check) -> None:
    machine(None)
    assert check() == Answer("skipped", "no GPU")


@pytest.mark.parametrize("check", [gpu.cublas_block, gpu.cublas_row, gpu.cublas_tensor])
def test_without_fp8_units_no_fp8_gemm_is_tried(machine, check) -> None:
    machine((8, 0))
    assert check() == Answer("skipped", "the GPU has no FP8 tensor cores")


@pytest.mark.parametrize(
    ("driver", "cuda", "answer"),
    [
        (None, None, Answer("skipped", "no NVIDIA driver, and torch is a CPU build")),
        (None, "13.0", Answer("note", "no NVIDIA driver answers; torch was built for CUDA 13.0")),
        (Driver("580.159.04", (13, 0), 1), None, Answer("ok", "driver 580.159.04")),
        (Driver("580.159.04", None, 1), "13.0", Answer("ok", "driver 580.159.04")),
        (
            Driver("580.159.04", (13, 0), 1),
            "13.0",
            Answer("ok", "driver 580.159.04 runs CUDA 13.0, torch was built for 13.0"),
        ),
        (
            Driver("580.159.04", (13, 0), 1),
            "12.8",
            Answer("ok", "driver 580.159.04 runs CUDA 13.0, torch was built for 12.8"),
        ),
        (
            Driver("550.54.15", (12, 4), 1),
            "12.9",
            Answer(
                "note",
                "driver 550.54.15 runs CUDA 12.4, torch was built for 12.9: works within one major version",
                "update the driver if kernels fail to load",
            ),
        ),
        (
            Driver("550.54.15", (12, 4), 1),
            "13.0",
            Answer(
                "broken",
                "driver 550.54.15 runs CUDA 12.4, torch was built for 13.0",
                "install driver 580 or newer, or a torch built for CUDA 12",
            ),
        ),
        (
            Driver("580.159.04", (13, 0), 1),
            "14.1",
            Answer(
                "broken",
                "driver 580.159.04 runs CUDA 13.0, torch was built for 14.1",
                "install a newer driver, or a torch built for CUDA 13",
            ),
        ),
    ],
)
def test_driver_against_torch(machine, driver, cuda, answer) -> None:
    machine(None, cuda, driver=driver)
    assert gpu.driver() == answer


def test_cublas_by_block_where_it_is_not(machine) -> None:
    machine((9, 0), "12.8")
    assert gpu.cublas_block() == Answer(
        "absent",
        "cuBLAS scales by block since CUDA 12.9, torch was built for 12.8",
        "install a torch built for CUDA 12.9 or newer, or set precision.gemm=triton",
    )
    machine((12, 0))
    assert gpu.cublas_block() == Answer(
        "note",
        "cuBLAS scales by block on compute capability 9.0 only, the GPU has 12.0;"
        " precision.gemm=auto takes the Triton GEMM instead",
    )


def test_gemms_are_judged_by_their_error(machine, monkeypatch) -> None:
    machine((9, 0))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "13.1.0.3")
    monkeypatch.setattr(gpu, "scaled_mm_error", lambda kind, device: {"block": 0.0017}.get(kind, 0.0018))
    assert gpu.cublas_block() == Answer(
        "ok", "tile x block and tile x tile ran right (nvidia-cublas 13.1.0.3), largest error 0.0018"
    )
    assert gpu.cublas_row().detail == "row x row ran right (nvidia-cublas 13.1.0.3), largest error 0.0018"
    monkeypatch.setattr(gpu, "scaled_mm_error", lambda kind, device: 0.7 if kind == "tile" else float("nan"))
    assert gpu.cublas_block() == Answer(
        "broken",
        "ran, but tile x block is off by nan and tile x tile is off by 0.7",
        "reinstall torch with the cuBLAS wheel that it asks for",
    )
    assert gpu.cublas_tensor().detail == "ran, but tensor x tensor is off by nan"


def refuses_other_layouts(a, b, scale_a, type_a, scale_b, type_b, output_dtype):
    """`scaled_mm` in plain PyTorch, for the layouts that cuBLAS reads on Hopper and no others."""
    (m, k), n = a.shape, b.shape[1]
    assert a.stride() == (k, 1) and b.stride() == (1, k) and a.dtype == b.dtype == torch.float8_e4m3fn
    kinds = type_a.name, type_b.name
    if kinds[0] == "BlockWise1x128":
        assert scale_a.shape == (m, k // 128) and scale_a.stride() == (1, m)
        values_a = a.float() * scale_a.repeat_interleave(128, 1)
        if kinds[1] == "BlockWise1x128":
            assert scale_b.shape == (n, k // 128) and scale_b.stride() == (1, n)
            values_b = b.t().float() * scale_b.repeat_interleave(128, 1)
        else:
            assert kinds[1] == "BlockWise128x128"
            assert scale_b.shape == (k // 128, n // 128) and scale_b.stride() == (1, k // 128) and k // 128 % 4 == 0
            values_b = b.t().float() * scale_b.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    else:
        assert kinds in (("RowWise", "RowWise"), ("TensorWise", "TensorWise"))
        shapes = ((m, 1), (1, n)) if kinds[0] == "RowWise" else ((1, 1), (1, 1))
        assert (scale_a.shape, scale_b.shape) == shapes and scale_a.is_contiguous() and scale_b.is_contiguous()
        values_a, values_b = a.float() * scale_a, b.t().float() * scale_b.t()
    return (values_a @ values_b.t()).to(output_dtype)


@pytest.mark.parametrize("kind", ["block", "tile", "row", "tensor"])
def test_operands_lie_as_cublas_reads_them(monkeypatch, kind) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", refuses_other_layouts)
    assert 0.001 < gpu.scaled_mm_error(kind, "cpu") < 0.003


def attend(q_TNH, k_TKH, v_TKH, lengths=(256,)):
    outs = []
    for q, k, v in zip(*(x.split(list(lengths)) for x in (q_TNH, k_TKH, v_TKH)), strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)


def test_attention_is_compared_forward_and_backward() -> None:
    right = gpu.attention_errors(attend, (256,), "cpu")
    assert list(right) == ["the output", "the gradient of q", "the gradient of k", "the gradient of v"]
    assert 0.001 < max(right.values()) < 0.01
    assert max(gpu.attention_errors(lambda *x: attend(*x, (100, 156)), (100, 156), "cpu").values()) < 0.01
    # what sees into the document before it is wrong, and is noticed
    assert min(gpu.attention_errors(attend, (100, 156), "cpu").values()) > 0.1


def test_the_choice_of_attention_is_told(machine, monkeypatch) -> None:
    machine((9, 0))

    def choose(asked: str, **heads: object) -> AttentionChoice:
        return AttentionChoice("cudnn+flash", f"{asked} on {heads['device']}")

    monkeypatch.setattr("fp8ctl.model.attention_choice.choose_attention", choose)
    assert gpu.attention_choice() == Answer("ok", "engine.attention=auto takes cudnn+flash: auto on cuda")

    def refuse(asked: str, **heads: object) -> AttentionChoice:
        raise ModelError("no fast attention", "engine.attention=any takes PyTorch's slower kernels")

    monkeypatch.setattr("fp8ctl.model.attention_choice.choose_attention", refuse)
    assert gpu.attention_choice() == Answer(
        "broken", "no fast attention", "engine.attention=any takes PyTorch's slower kernels"
    )


def test_attention_is_judged_by_its_errors(machine, monkeypatch) -> None:
    machine((9, 0))
    errors = {"the output": 0.0021, "the gradient of q": 0.004}
    monkeypatch.setattr(gpu, "attention_errors", lambda run, lengths, device: errors)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    good = "forward and backward with grouped heads ran right, largest error 0.004"
    assert gpu.cudnn_attention() == Answer("ok", f"cuDNN 9.19.0: {good}")
    monkeypatch.setattr(torch, "tensor", lambda x, dtype, device: x)  # the real one would ask for a GPU
    assert gpu.flash_varlen() == Answer("ok", f"documents of 100 and 156 tokens: {good}")
    errors["the gradient of q"] = float("nan")
    assert gpu.cudnn_attention() == Answer(
        "broken",
        "cuDNN 9.19.0: ran, but the gradient of q is off by nan",
        "set engine.attention to the other kind; update torch",
    )


def test_triton_runs_the_quantiser(machine, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.6.0")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    kernels = SimpleNamespace(quantize_tile=quantize_tile)
    monkeypatch.setitem(sys.modules, "fp8ctl.fp8.kernels", kernels)
    monkeypatch.setattr("fp8ctl.fp8.kernels", kernels, raising=False)
    machine((9, 0))
    assert gpu.triton() == Answer(
        "ok", "3.6.0: compiled and ran the tile quantiser, equal to the reference bit for bit"
    )

    def off_by_a_bit(x, fmt, kind):
        codes, scale_inv = quantize_tile(x, fmt, kind)
        return Quantized((codes.view(torch.uint8) + 1).view(codes.dtype), scale_inv)

    kernels.quantize_tile = off_by_a_bit
    answer = gpu.triton()
    assert (answer.state, answer.detail) == (
        "broken",
        "3.6.0: the tile quantiser ran, but differs from the reference",
    )
    machine((8, 0))
    assert gpu.triton() == Answer("skipped", "the GPU has no FP8 tensor cores")


def test_triton_that_is_not_installed(machine, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    machine(None)
    assert gpu.triton() == Answer("skipped", "not installed, and no GPU")
    machine((9, 0))
    assert gpu.triton() == Answer("absent", "not installed: no native FP8, no torch.compile", "pip install triton")


def test_nccl(machine, monkeypatch) -> None:
    machine((9, 0))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert gpu.nccl().state == "absent"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(software, "one_rank_sum", lambda backend, device: 4.0)
    assert gpu.nccl() == Answer("ok", "2.28.9: one rank reduced a tensor on the GPU")
    monkeypatch.setattr(software, "one_rank_sum", lambda backend, device: 0.0)
    assert gpu.nccl() == Answer("broken", "2.28.9: a sum over one rank gave 0 for 4", "reinstall torch's NCCL wheel")
