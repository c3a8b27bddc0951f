"""CPU and GPU agree to the bit: the reference is the specification on both."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch

from fp8ctl.fp8.emulate import quantize_dequantize
from fp8ctl.fp8.formats import E4M3, E5M2, scales
from fp8ctl.fp8.reference import dequantize, quantize_block, quantize_tile
from fp8ctl.fp8.stats import quant_stats

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def awkward(dtype: torch.dtype) -> torch.Tensor:
    """[1100, 700]: all magnitudes from subnormal to the largest, zeros, inf, NaN, whole tiles of each."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-150, 128, (1100, 1), generator=generator) + torch.randint(
        -20, 21, (1100, 700), generator=generator
    )
    x = torch.ldexp(torch.randn(1100, 700, generator=generator).double(), exponents).clamp(-3.4e38, 3.4e38).float()
    x[torch.rand(x.shape, generator=generator) < 0.1] = 0.0
    x[torch.rand(x.shape, generator=generator) < 0.1] *= -0.0
    for value in (math.inf, -math.inf, math.nan):
        x[torch.rand(x.shape, generator=generator) < 2e-4] = value
        x[int(torch.randint(0, 1100, (), generator=generator))] = value
    x[3], x[4] = 0.0, torch.finfo(torch.float32).max
    return x.to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", ["pow2", "fp32"])
def test_scales_of_every_kind_of_amax(fmt: object, kind: str) -> None:
    amax = torch.arange(0, 0x7F800000, 9973, dtype=torch.int32).view(torch.float32)
    for on_cpu, on_gpu in zip(scales(amax, fmt, kind), scales(amax.cuda(), fmt, kind), strict=True):  # type: ignore[arg-type]
        assert torch.equal(bits(on_cpu), bits(on_gpu))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("kind", ["pow2", "fp32"])
def test_quantisers(dtype: torch.dtype, fmt: object, kind: str) -> None:
    x = awkward(dtype)
    for quantize in (quantize_tile, quantize_block):
        on_cpu, on_gpu = quantize(x, fmt, kind), quantize(x.cuda(), fmt, kind)  # type: ignore[arg-type]
        assert torch.equal(bits(on_cpu.scale_inv), bits(on_gpu.scale_inv))
        assert torch.equal(bits(on_cpu.codes), bits(on_gpu.codes))
        a, b = dequantize(*on_cpu), dequantize(*on_gpu).cpu()
        assert torch.equal(a.nan_to_num(nan=7.0, posinf=8.0), b.nan_to_num(nan=7.0, posinf=8.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("along", ["rows", "columns", "block"])
@pytest.mark.parametrize("kind", ["pow2", "fp32"])
@pytest.mark.parametrize("clean", [True, False])
def test_emulation_and_statistics(dtype: torch.dtype, along: str, kind: str, clean: bool) -> None:
    x = torch.randn(1100, 700, generator=torch.Generator().manual_seed(1)).to(dtype) if clean else awkward(dtype)
    a, b = (quantize_dequantize(t, along, E4M3, kind) for t in (x, x.cuda()))  # type: ignore[arg-type]
    assert torch.equal(a.isnan(), b.cpu().isnan())
    assert torch.equal(bits(a.nan_to_num(nan=7.0)), bits(b.nan_to_num(nan=7.0)))
    if clean:
        on_cpu, on_gpu = (quant_stats(t, v, along, E4M3, kind) for t, v in ((x, a), (x.cuda(), b)))  # type: ignore[arg-type]
        assert astuple(on_cpu)[:3] == astuple(on_gpu)[:3]
        assert on_cpu.sqnr_db == pytest.approx(on_gpu.sqnr_db, abs=1e-4)
