"""Quantise and dequantise at once, fast enough for a CPU: the values an FP8 GEMM would see, in the dtype of the input.

Equal bit for bit to `reference.dequantize(*reference.quantize_*(x))` rounded to the dtype that comes out; the reference
is the specification, this is how `Fp8Linear` executes it where no FP8 hardware is used.

How: with a power-of-two scale_inv = 2^e, rounding x to the FP8 grid of its tile needs no scaling. The grid spacing at x
is 2^(max(exponent(x), e + min_exponent) - mantissa_bits). Adding and subtracting the power of two whose last mantissa
bit has just that weight, in the input's own arithmetic, rounds |x| to the grid, nearest even. Exponents, amax and signs
are integer operations on the bits (for BF16 on 16-bit integers, the cheapest thing a CPU can do). What this can't do
(inf, NaN, scales or values near the ends of the exponent range, FP32 scales) goes through the reference.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp8ctl.fp8 import reference
from fp8ctl.fp8.formats import TILE, Fp8Format, ScaleKind

Along = Literal["rows", "columns", "block"]
"""Where a tile lies: `rows` 1x128 along the last dimension, `columns` 128x1 along the first, `block` 128x128."""

_TILE_SHAPE: dict[Along, tuple[int, int]] = {"rows": (1, TILE), "columns": (TILE, 1), "block": (TILE, TILE)}


class _Bits(NamedTuple):
    """How a float dtype lays out its bits; sign, 8 exponent bits and mantissa_bits fill the integer dtype."""

    integer: torch.dtype
    mantissa_bits: int
    sign: int


_BITS = {
    torch.bfloat16: _Bits(torch.int16, 7, -(1 << 15)),
    torch.float32: _Bits(torch.int32, 23, -(1 << 31)),
}

# Biased exponents of amax for which every intermediate below stays a normal number, with room to spare.
_LOWEST_FIELD, _HIGHEST_FIELD = 40, 220


def quantize_dequantize(x_RC: Tensor, along: Along, fmt: Fp8Format, scale_kind: ScaleKind) -> Tensor:
    """The matrix x after a round trip through FP8.

    pow2 scales: same dtype as x (in BF16 exact, but for magnitudes below 2^-126). fp32 scales: always FP32, since BF16
    can't hold the values.
    """
    if scale_kind == "pow2" and x_RC.dtype in _BITS and x_RC.numel() > 0:
        rounded = _round_pow2(x_RC.contiguous(), along, fmt)
        if rounded is not None:
            return rounded
    values = _by_reference(x_RC, along, fmt, scale_kind)
    return values.to(x_RC.dtype) if scale_kind == "pow2" else values


def _by_reference(x_RC: Tensor, along: Along, fmt: Fp8Format, scale_kind: ScaleKind) -> Tensor:
    if along == "rows":
        return reference.dequantize(*reference.quantize_tile(x_RC, fmt, scale_kind))
    if along == "columns":
        return reference.dequantize(*reference.quantize_tile(x_RC.t(), fmt, scale_kind)).t()
    return reference.dequantize(*reference.quantize_block(x_RC, fmt, scale_kind))


def _round_pow2(x_RC: Tensor, along: Along, fmt: Fp8Format) -> Tensor | None:
    """x rounded to the grid of its tile; None if a tile holds something that only the reference can do."""
    rows, columns = x_RC.shape
    tile_rows, tile_columns = _TILE_SHAPE[along]
    bits = _BITS[x_RC.dtype]
    padding = (0, -columns % tile_columns, 0, -rows % tile_rows)
    source = x_RC.view(bits.integer)
    if any(padding):
        source = torch.nn.functional.pad(source, padding)
    # row blocks x rows in a tile x column blocks x columns in a tile
    source = source.view(source.shape[0] // tile_rows, tile_rows, source.shape[1] // tile_columns, tile_columns)
    magnitude = source.bitwise_and(~bits.sign)
    amax = _tile_amax(magnitude)
    fields = amax >> bits.mantissa_bits
    if bool(((fields > _HIGHEST_FIELD) | ((fields < _LOWEST_FIELD) & (amax != 0))).any()):
        return None

    magic = _magic_bits(magnitude, amax, bits, fmt)
    magnitude.view(x_RC.dtype).add_(magic.view(x_RC.dtype)).sub_(magic.view(x_RC.dtype))
    signs = torch.bitwise_and(source, bits.sign, out=magic)  # the magic numbers are done with: one buffer less
    rounded = magnitude.bitwise_or_(signs).view(x_RC.dtype)
    return rounded.view(rows + padding[3], columns + padding[1])[:rows, :columns]


def _tile_amax(magnitude: Tensor) -> Tensor:
    """Largest magnitude bits of each tile, dimensions kept."""
    # Reducing a dimension of size 1 would cost a slow pass over everything
    amax = magnitude.amax(1, keepdim=True) if magnitude.shape[1] > 1 else magnitude
    return amax.amax(3, keepdim=True) if magnitude.shape[3] > 1 else amax


def _magic_bits(magnitude: Tensor, amax: Tensor, bits: _Bits, fmt: Fp8Format) -> Tensor:
    """Bits of the power of two whose last mantissa bit weighs as much as the FP8 grid spacing at each value."""
    one = 1 << bits.mantissa_bits
    # formats.pow2_exponent on these bits: 1.75 is the mantissa of the format's largest value, above it one carries
    scale_field = (amax + (one - 1 - 3 * one // 4)) >> bits.mantissa_bits
    lowest = (scale_field - fmt.max_exponent + fmt.min_exponent).clamp_min_(1) << bits.mantissa_bits
    exponent = magnitude.bitwise_and(255 << bits.mantissa_bits)
    torch.maximum(exponent, lowest.to(bits.integer), out=exponent)
    return exponent.add_((bits.mantissa_bits - fmt.mantissa_bits) * one)
