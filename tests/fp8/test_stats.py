from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ctl.fp8.emulate import quantize_dequantize
from fp8ctl.fp8.formats import E4M3, E5M2, Fp8Format
from fp8ctl.fp8.reference import dequantize, quantize_block, quantize_tile
from fp8ctl.fp8.stats import QuantStats, quant_stats


def stats_of(x: torch.Tensor, along: str = "rows", fmt: Fp8Format = E4M3, kind: str = "pow2") -> QuantStats:
    return quant_stats(x, quantize_dequantize(x, along, fmt, kind), along, fmt, kind)  # type: ignore[arg-type]


def test_numbers_of_a_tile_made_by_hand() -> None:
    """scale_inv is 1: 448 saturates, 2^-11 underflows, 17 becomes 16, the rest is exact."""
    stats = stats_of(torch.tensor([[448.0, -448.0, 2.0**-11, 17.0, 0.0, 1.0, 2.0, 3.0]]))
    assert stats.amax == 448
    assert stats.underflow_share == 1 / 8
    assert stats.saturation_share == 2 / 8
    signal = 2 * 448.0**2 + 2.0**-22 + 17**2 + 1 + 4 + 9
    assert stats.sqnr_db == pytest.approx(10 * math.log10(signal / (1 + 2.0**-22)), abs=1e-5)


@pytest.mark.parametrize("along", ["rows", "columns", "block"])
@pytest.mark.parametrize("kind", ["pow2", "fp32"])
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([(1, 1), (3, 130), (130, 200), (128, 256)]),
    exponent=st.sampled_from([-140, -60, 0, 60, 115]),
    fmt=st.sampled_from([E4M3, E5M2]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_equals_the_definition_on_the_codes(
    along: str, kind: str, seed: int, size: tuple[int, int], exponent: int, fmt: Fp8Format, dtype: torch.dtype
) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).double() ** 7 * 2.0**exponent
    x = x.clamp(-1e38, 1e38).to(dtype)
    stats = stats_of(x, along, fmt, kind)
    source = x.t() if along == "columns" else x
    q = (quantize_block if along == "block" else quantize_tile)(source, fmt, kind)  # type: ignore[arg-type]
    codes, values, exact = q.codes.float().abs(), dequantize(*q).double(), source.double()
    assert stats.amax == exact.abs().max().item()
    assert stats.underflow_share == ((exact != 0) & (codes == 0)).double().mean().item()
    assert stats.saturation_share == (codes == fmt.largest).double().mean().item()
    noise = (exact - values).square().sum().item()
    if noise:
        assert stats.sqnr_db == pytest.approx(10 * math.log10(exact.square().sum().item() / noise), abs=1e-3)


def test_gaussian_data_has_about_thirty_decibels() -> None:
    stats = stats_of(torch.randn(128, 512, generator=torch.Generator().manual_seed(0)))
    assert 31 < stats.sqnr_db < 32.5
    assert stats.saturation_share < 0.01 and stats.underflow_share < 0.01


def test_exact_zero_empty_and_non_finite_tensors() -> None:
    assert stats_of(torch.zeros(2, 130)) == QuantStats(0.0, 0.0, 0.0, math.inf)
    assert stats_of(torch.zeros(0, 130)) == QuantStats(0.0, 0.0, 0.0, math.inf)
    x = torch.randn(1, 128)
    x[0, 0] = math.inf
    stats = stats_of(x)
    assert stats.amax == math.inf and 25 < stats.sqnr_db < 40
    x[0, 0] = 3.39e38  # rounds up to 2^128
    assert 25 < stats_of(torch.cat([x, 1e37 * torch.randn(1, 128)])).sqnr_db < 40
    x[0, 1] = math.nan
    assert math.isnan(stats_of(x).amax)
