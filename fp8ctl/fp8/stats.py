"""How well a tensor survived quantisation: four numbers per tensor, cheap enough to take on chosen steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ctl.fp8.formats import Fp8Format
from fp8ctl.fp8.reference import Quantized, dequantize


@dataclass(frozen=True)
class QuantStats:
    """Statistics of one quantised tensor."""

    amax: float
    """Largest magnitude before quantising; NaN or inf if the tensor holds one."""
    underflow_share: float
    """Nonzero values that became zero / all values."""
    saturation_share: float
    """Values at the largest code, of either sign / all values. Each tile with FP32 scales has at least one; with pow2
    scales few have.
    """
    sqnr_db: float
    """10 log10(sum x^2 / sum (x - dequantised)^2) over the finite values; inf where nothing was lost."""


def quant_stats(x_RC: Tensor, q: Quantized, fmt: Fp8Format) -> QuantStats:
    """Statistics of x and its quantised form q (same shape). An empty tensor gives 0, 0, 0, inf."""
    if x_RC.numel() == 0:
        return QuantStats(0.0, 0.0, 0.0, math.inf)
    x = x_RC.detach().to(torch.float64)  # squares of FP32 values leave the range of FP32
    values = dequantize(*q).to(torch.float64)
    code_magnitude = q.codes.to(torch.float32).abs()
    is_finite = x.isfinite() & values.isfinite()
    signal = torch.where(is_finite, x, 0.0).square().sum()
    noise = torch.where(is_finite, x - values, 0.0).square().sum()
    # One transfer for all numbers: on a GPU each would wait for the device
    amax, underflow, saturation, signal_sum, noise_sum = torch.stack(
        [
            x.abs().max(),
            ((x != 0) & (code_magnitude == 0)).to(torch.float64).mean(),
            (code_magnitude == fmt.largest).to(torch.float64).mean(),
            signal,
            noise,
        ]
    ).tolist()
    sqnr_db = math.inf if noise_sum == 0 else 10 * math.log10(signal_sum / noise_sum)
    return QuantStats(amax, underflow, saturation, sqnr_db)
