from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ctl.fp8.emulate import quantize_dequantize
from fp8ctl.fp8.formats import E4M3, E5M2, Fp8Format
from fp8ctl.fp8.reference import Quantized, dequantize, quantize_block, quantize_row, quantize_tensor, quantize_tile
from fp8ctl.fp8.stats import QuantStats, quant_stats


def stats_of(
    x: torch.Tensor, along: Any = "rows", fmt: Fp8Format = E4M3, kind: Any = "pow2", granularity: Any = "block"
) -> QuantStats:
    values = quantize_dequantize(x, along, fmt, kind, granularity=granularity)
    return quant_stats(x, values, along, fmt, kind, granularity=granularity)


def codes_of(source: torch.Tensor, along: str, fmt: Fp8Format, kind: Any, granularity: str) -> Quantized:
    if granularity == "tensor":
        return quantize_tensor(source, fmt, kind)
    if granularity == "row":
        return quantize_row(source, fmt, kind)
    return (quantize_block if along == "block" else quantize_tile)(source, fmt, kind)


def test_numbers_of_a_tile_made_by_hand() -> None:
    """scale_inv is 1: 448 saturates, 2^-11 underflows, 17 becomes 16, the rest is exact."""
    stats = stats_of(torch.tensor([[448.0, -448.0, 2.0**-11, 17.0, 0.0, 1.0, 2.0, 3.0]]))
    assert stats.amax == 448
    assert stats.underflow_share == 1 / 8
    assert stats.saturation_share == 2 / 8
    signal = 2 * 448.0**2 + 2.0**-22 + 17**2 + 1 + 4 + 9
    assert stats.sqnr_db == pytest.approx(10 * math.log10(signal / (1 + 2.0**-22)), abs=1e-5)


def test_numbers_by_row_and_by_matrix_made_by_hand() -> None:
    """By row scale_inv is 1 and 2^-3: of the second row only 56 is the largest code. By matrix 2^-11 underflows."""
    x = torch.tensor([[448.0, 17.0] + [0.0] * 148, [56.0, 2.0**-11] + [0.0] * 148])
    by_row, by_tensor = (stats_of(x, granularity=granularity) for granularity in ("row", "tensor"))
    assert by_row.amax == by_tensor.amax == 448
    assert (by_row.underflow_share, by_tensor.underflow_share) == (0, 1 / 300)
    assert (by_row.saturation_share, by_tensor.saturation_share) == (2 / 300, 1 / 300)
    signal = 448**2 + 17**2 + 56**2 + 2.0**-22
    assert by_row.sqnr_db == pytest.approx(10 * math.log10(signal / 1), abs=1e-5)
    assert by_tensor.sqnr_db == pytest.approx(10 * math.log10(signal / (1 + 2.0**-22)), abs=1e-5)
    assert stats_of(x.t(), "columns", granularity="row") == by_row
    assert stats_of(x, "block", granularity="row") == by_row


@pytest.mark.parametrize("granularity", ["block", "row", "tensor"])
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
    granularity: str,
    along: str,
    kind: str,
    seed: int,
    size: tuple[int, int],
    exponent: int,
    fmt: Fp8Format,
    dtype: torch.dtype,
) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)).double() ** 7 * 2.0**exponent
    x = x.clamp(-1e38, 1e38).to(dtype)
    stats = stats_of(x, along, fmt, kind, granularity)
    source = x.t() if along == "columns" else x
    q = codes_of(source, along, fmt, kind, granularity)
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


@pytest.mark.parametrize("granularity", ["row", "tensor", "tensor_delayed"])
def test_zero_empty_and_non_finite_tensors_by_row_and_by_matrix(granularity: str) -> None:
    for shape in ((2, 130), (0, 130), (130, 0)):
        assert stats_of(torch.zeros(shape), granularity=granularity) == QuantStats(0.0, 0.0, 0.0, math.inf)
    x = torch.randn(3, 200)
    finite = stats_of(x, granularity=granularity)
    x[1] = torch.cat([torch.tensor([math.inf, -math.inf]), x[0, 2:]])
    stats = stats_of(x, granularity=granularity)
    assert stats.amax == math.inf and stats.sqnr_db == pytest.approx(finite.sqnr_db, abs=3)
    x[1, 0] = math.nan
    assert math.isnan(stats_of(x, granularity=granularity).amax)


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
