"""How well a tensor survived quantisation: four numbers per tensor, cheap enough to take on chosen steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ctl.fp8.emulate import Along, Granularity, magnitude_bits, split_tiles, tile_amax, tile_shape
from fp8ctl.fp8.formats import Fp8Format, ScaleKind, scales

_CERTAINLY_FINITE = 2.0**127
"""Below it neither a value nor its rounding to FP8 is infinite."""


@dataclass(frozen=True)
class QuantStats:
    """Statistics of one quantised tensor."""

    amax: float
    """Largest magnitude before quantising; NaN or inf if the tensor holds one."""
    underflow_share: float
    """Nonzero values that became zero / all values."""
    saturation_share: float
    """Values at the largest code, of either sign / all values. Never clipping: a scale always covers its tile's amax.
    With FP32 scales each tile has at least one."""
    sqnr_db: float
    """10 log10(sum x^2 / sum (x - values)^2) over the finite values; inf where nothing was lost."""


def quant_stats(
    x_RC: Tensor,
    values_RC: Tensor,
    along: Along,
    fmt: Fp8Format,
    scale_kind: ScaleKind,
    *,
    granularity: Granularity = "block",
) -> QuantStats:
    """Statistics of the matrix x (BF16 or FP32) and its `values` after `emulate.quantize_dequantize` with the same
    arguments.

    An empty matrix gives 0, 0, 0, inf.
    """
    if x_RC.numel() == 0:
        return QuantStats(0.0, 0.0, 0.0, math.inf)
    values, num_values = values_RC.contiguous(), x_RC.numel()
    x = x_RC.detach().to(values.dtype).contiguous()
    tile = tile_shape(x, along, granularity)
    x_tiles = magnitude_bits(split_tiles(x, tile))
    amax = x_tiles.amax().view(x.dtype)
    if not bool(amax < _CERTAINLY_FINITE):
        is_finite = x.isfinite() & values.isfinite()
        x, values = torch.where(is_finite, x, 0.0), torch.where(is_finite, values, 0.0)
        x_tiles = magnitude_bits(split_tiles(x, tile))
    value_tiles = magnitude_bits(split_tiles(values, tile))

    # A zero stays zero, so what became zero is the difference in number
    underflow = torch.count_nonzero(x_tiles) - torch.count_nonzero(value_tiles)
    scale_inv = scales(tile_amax(x_tiles).view(x.dtype).to(torch.float32), fmt, scale_kind)[1]
    saturated = (value_tiles == magnitude_bits((fmt.largest * scale_inv).to(values.dtype))).sum()
    # The difference is exact in x's own dtype; the squares leave its range
    noise = torch.linalg.vector_norm(x - values, dtype=torch.float64)
    signal = torch.linalg.vector_norm(x, dtype=torch.float64)

    # One transfer for all numbers: on a GPU each would wait for the device
    numbers = torch.stack([t.to(torch.float64) for t in (amax, underflow, saturated, signal, noise)]).tolist()
    largest, num_underflow, num_saturated, signal_norm, noise_norm = numbers
    sqnr_db = math.inf if noise_norm == 0 else 20 * math.log10(signal_norm / noise_norm)
    return QuantStats(largest, num_underflow / num_values, num_saturated / num_values, sqnr_db)
