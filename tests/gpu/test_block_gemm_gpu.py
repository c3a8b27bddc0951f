"""The Triton block-scaled GEMM on tensor cores: within twice a BF16 GEMM's error of FP64."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fp8ctl.fp8.formats import E4M3, E5M2, Fp8Format
from fp8ctl.fp8.reference import Quantized, dequantize, quantize_block, quantize_tile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs an NVIDIA GPU with FP8 tensor cores",
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
# full and ragged in each dimension, rows that are not 16-byte aligned, one token, a long contraction
SIZES = [
    (4096, 1536, 1536),
    (1000, 576, 192),
    (130, 20, 36),
    (17, 1536, 577),
    (1, 576, 8960),
    (2000, 1536, 18944),
    (64, 1, 256),
]
BY = pytest.mark.parametrize("b_by", ["block", "tile"])


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def operands(
    size: tuple[int, int, int], b_by: str, fmt_a: Fp8Format = E4M3, kind: str = "pow2"
) -> tuple[Quantized, Quantized]:
    m, n, k = size
    quantize_b = quantize_block if b_by == "block" else quantize_tile
    return quantize_tile(normal(m, k, seed=1), fmt_a, kind), quantize_b(normal(n, k, seed=2), E4M3, kind)  # type: ignore[arg-type]


def assert_gemm(got: torch.Tensor, a: Quantized, b: Quantized, bias: torch.Tensor | None = None) -> None:
    """At most twice the error of a plain BF16 GEMM that rounds its result, both against FP64 of the same operands."""
    a_MK, b_NK = dequantize(*a).double(), dequantize(*b).double()
    shift = 0 if bias is None else bias.double()
    exact = a_MK @ b_NK.t() + shift
    plain = (a_MK.bfloat16() @ b_NK.bfloat16().t()).double() + shift
    assert got.shape == exact.shape
    assert (got.double() - exact).norm() <= 2 * (plain.bfloat16().double() - exact).norm()


@BY
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_error_is_that_of_a_bf16_gemm(size: tuple[int, int, int], b_by: str, has_bias: bool) -> None:
    from fp8ctl.fp8.block_gemm import block_gemm

    a, b = operands(size, b_by)
    bias = normal(size[1], seed=3) if has_bias else None
    assert_gemm(block_gemm(a, b, torch.bfloat16, bias), a, b, bias)


@BY
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_formats_and_results(b_by: str, out_dtype: torch.dtype, fmt: Fp8Format) -> None:
    from fp8ctl.fp8.block_gemm import block_gemm

    a, b = operands((1000, 576, 1536), b_by, fmt, "fp32")
    got = block_gemm(a, b, out_dtype)
    assert got.dtype == out_dtype
    assert_gemm(got, a, b)


@BY
def test_sums_are_fp32(b_by: str) -> None:
    """A long contraction whose terms don't cancel: tensor cores' own sums would lose bits here."""
    from fp8ctl.fp8.block_gemm import block_gemm

    quantize_b = quantize_block if b_by == "block" else quantize_tile
    a, b = quantize_tile(normal(256, 65536, seed=1).abs()), quantize_b(normal(256, 65536, seed=2).abs())
    exact = dequantize(*a).double() @ dequantize(*b).double().t()
    assert ((block_gemm(a, b, torch.float32).double() - exact) / exact).abs().max() < 1e-3


def test_operands_as_quantisers_write_them() -> None:
    from fp8ctl.fp8 import kernels
    from fp8ctl.fp8.block_gemm import block_gemm

    x, w = normal(1000, 576, seed=1), normal(192, 576, seed=2)
    a, b = kernels.quantize_tile(x, pad_to=16), kernels.quantize_block(w, pad_to=16)
    got = block_gemm(a, b, torch.float32)
    assert got.shape == (1008, 192) and not got[1000:].any()
    assert torch.equal(got[:1000], block_gemm(quantize_tile(x), quantize_block(w), torch.float32))


@BY
def test_nan_shows_in_the_results_it_touches(b_by: str) -> None:
    from fp8ctl.fp8.block_gemm import block_gemm

    x, w = normal(150, 576, seed=1), normal(192, 576, seed=2)
    x[3, 5], w[7, 9], x[4] = float("inf"), float("nan"), 0.0
    got = block_gemm(quantize_tile(x), (quantize_block if b_by == "block" else quantize_tile)(w), torch.bfloat16)
    is_nan = torch.zeros(150, 192, dtype=torch.bool, device="cuda")
    is_nan[3], is_nan[:, 7] = True, True
    assert torch.equal(got.isnan(), is_nan)
    assert not got[4][~is_nan[4]].any()


def test_nothing_to_do() -> None:
    from fp8ctl.fp8.block_gemm import block_gemm

    some, none = quantize_tile(normal(20, 128, seed=1)), quantize_tile(normal(0, 128, seed=1))
    assert block_gemm(none, some, torch.bfloat16).shape == (0, 20)
    assert block_gemm(some, none, torch.bfloat16).shape == (20, 0)
    empty, bias = quantize_tile(normal(20, 0, seed=1)), normal(20, seed=2)
    assert torch.equal(block_gemm(empty, empty, torch.bfloat16, bias), bias.expand(20, 20))
