from __future__ import annotations

import math

import pytest
import torch

from fp8ctl.fp8.formats import E4M3
from fp8ctl.fp8.reference import quantize_tile
from fp8ctl.fp8.stats import quant_stats


def test_numbers_of_a_tile_made_by_hand() -> None:
    """scale_inv is 1: 448 saturates, 2^-11 underflows, 17 becomes 16, the rest is exact."""
    x = torch.tensor([[448.0, -448.0, 2.0**-11, 17.0, 0.0, 1.0, 2.0, 3.0]])
    stats = quant_stats(x, quantize_tile(x), E4M3)
    assert stats.amax == 448
    assert stats.underflow_share == 1 / 8
    assert stats.saturation_share == 2 / 8
    signal = 2 * 448.0**2 + 2.0**-22 + 17**2 + 1 + 4 + 9
    assert stats.sqnr_db == pytest.approx(10 * math.log10(signal / (1 + 2.0**-22)), abs=1e-9)


def test_gaussian_data_has_about_thirty_decibels() -> None:
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    stats = quant_stats(x, quantize_tile(x), E4M3)
    assert 31 < stats.sqnr_db < 32.5
    assert stats.saturation_share < 0.01 and stats.underflow_share < 0.01


def test_exact_zero_empty_tiny_and_non_finite_tensors() -> None:
    zero = torch.zeros(2, 130)
    assert quant_stats(zero, quantize_tile(zero), E4M3).sqnr_db == math.inf
    empty = torch.zeros(0, 130)
    assert quant_stats(empty, quantize_tile(empty), E4M3).amax == 0
    tiny = torch.full((1, 128), 1e-30) * torch.linspace(1, 2, 128)  # squares underflow in FP32
    assert 25 < quant_stats(tiny, quantize_tile(tiny), E4M3).sqnr_db < 40
    x = torch.randn(1, 128)
    x[0, 0] = math.inf
    stats = quant_stats(x, quantize_tile(x), E4M3)
    assert stats.amax == math.inf and 25 < stats.sqnr_db < 40
    x[0, 1] = math.nan
    assert math.isnan(quant_stats(x, quantize_tile(x), E4M3).amax)
