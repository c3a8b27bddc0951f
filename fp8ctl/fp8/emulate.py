"""Quantise and dequantise at once, fast enough for a CPU: the values an FP8 GEMM would see.

Equal bit for bit to `reference.dequantize(*reference.quantize_*(x))` rounded to the dtype that comes out; the reference
is the specification, this is how `Fp8Linear` executes it where no FP8 hardware is used.

How: the FP8 grid has spacing 2^(max(exponent(x), lowest) - mantissa_bits) at x. Adding and subtracting the power of two
whose last mantissa bit has just that weight, in the arithmetic of x's own dtype, rounds |x| to the grid, nearest even.
Exponents, amax and signs are integer operations on the bits (for BF16 on 16-bit integers, the cheapest thing a CPU can
do). With a power-of-two scale_inv the values need no scaling at all, the grid moves to them: lowest is the tile's
exponent plus the format's smallest. With FP32 scales they are multiplied as the reference does. What this can't do
(inf, NaN, tiles near the ends of the exponent range) goes through the reference.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fp8ctl.fp8 import reference
from fp8ctl.fp8.formats import TILE, Fp8Format, ScaleKind, scales

Along = Literal["rows", "columns", "block"]
"""Where a tile lies: `rows` 1x128 along the last dimension, `columns` 128x1 along the first, `block` 128x128."""

Granularity = Literal["block", "row", "tensor", "tensor_delayed", "mxfp8"]
"""`RecipeConfig.granularity`. Delayed scaling counts as scaling by tensor here, and MXFP8 as scaling by tile."""


class _Bits(NamedTuple):
    """How a float dtype lays out its bits; sign, 8 exponent bits and mantissa_bits fill the integer dtype."""

    integer: torch.dtype
    mantissa_bits: int
    sign: int


_BITS = {
    torch.bfloat16: _Bits(torch.int16, 7, -(1 << 15)),
    torch.float32: _Bits(torch.int32, 23, -(1 << 31)),
}

# Biased exponents of amax for which every intermediate of pow2 scales is a normal number, with room to spare.
_LOWEST_FIELD, _HIGHEST_FIELD = 40, 220
_FP32_BIAS = 127


def tile_shape(x_RC: Tensor, along: Along, granularity: Granularity = "block") -> tuple[int, int]:
    """What shares a scale: a tile or block, a whole row (or column) for granularity row, everything for tensor."""
    rows, columns = (max(size, 1) for size in x_RC.shape)
    if granularity in ("tensor", "tensor_delayed"):
        return rows, columns
    if granularity == "row":
        return (rows, 1) if along == "columns" else (1, columns)
    return {"rows": (1, TILE), "columns": (TILE, 1), "block": (TILE, TILE)}[along]


def quantize_dequantize(
    x_RC: Tensor, along: Along, fmt: Fp8Format, scale_kind: ScaleKind, *, granularity: Granularity = "block"
) -> Tensor:
    """The matrix x after a round trip through FP8.

    pow2 scales: same dtype as x (in BF16 exact, but for magnitudes below 2^-126). fp32 scales: always FP32, since BF16
    can't hold the values.
    """
    dtype = x_RC.dtype if scale_kind == "pow2" else torch.float32
    if x_RC.numel() > 0 and dtype in _BITS:
        round_trip = _round_pow2 if scale_kind == "pow2" else _round_fp32
        values = round_trip(x_RC.to(dtype).contiguous(), tile_shape(x_RC, along, granularity), fmt)
        if values is not None:
            return values
    return _by_reference(x_RC, along, fmt, scale_kind, granularity).to(dtype)


def _by_reference(
    x_RC: Tensor, along: Along, fmt: Fp8Format, scale_kind: ScaleKind, granularity: Granularity
) -> Tensor:
    if along == "columns":
        return _by_reference(x_RC.t(), "rows", fmt, scale_kind, granularity).t()
    if granularity in ("tensor", "tensor_delayed"):
        return reference.dequantize(*reference.quantize_tensor(x_RC, fmt, scale_kind))
    if granularity == "row":
        return reference.dequantize(*reference.quantize_row(x_RC, fmt, scale_kind))
    quantize = reference.quantize_tile if along == "rows" else reference.quantize_block
    return reference.dequantize(*quantize(x_RC, fmt, scale_kind))


def _round_pow2(x_RC: Tensor, tile: tuple[int, int], fmt: Fp8Format) -> Tensor | None:
    """The round trip with power-of-two scales; None if a tile holds something that only the reference can do."""
    bits = _BITS[x_RC.dtype]
    source = split_tiles(x_RC, tile).view(bits.integer)
    magnitude = magnitude_bits(source)
    amax = tile_amax(magnitude)
    fields = amax >> bits.mantissa_bits
    if bool(((fields > _HIGHEST_FIELD) | ((fields < _LOWEST_FIELD) & (amax != 0))).any()):
        return None
    # formats.pow2_exponent on these bits: 1.75 is the mantissa of the format's largest value, above it one carries
    one = 1 << bits.mantissa_bits
    scale_fields = (amax + (one - 1 - 3 * one // 4)) >> bits.mantissa_bits
    lowest = (scale_fields - fmt.max_exponent + fmt.min_exponent).clamp_min_(1) << bits.mantissa_bits
    exponent = magnitude.bitwise_and(255 << bits.mantissa_bits)
    torch.maximum(exponent, lowest, out=exponent)
    return _join_tiles(_round_to_grid(source, magnitude, exponent, bits, x_RC.dtype, fmt), x_RC)


def _round_fp32(x_RC: Tensor, tile: tuple[int, int], fmt: Fp8Format) -> Tensor | None:
    """The round trip of an FP32 matrix with FP32 scales; None if it holds inf or NaN."""
    bits = _BITS[torch.float32]
    source = split_tiles(x_RC, tile)
    amax = tile_amax(magnitude_bits(source)).view(torch.float32)
    if not bool(amax.isfinite().all()):
        return None
    scale, scale_inv = scales(amax, fmt, "fp32")
    scaled = (source * scale).clamp_(-fmt.largest, fmt.largest).view(bits.integer)
    magnitude = magnitude_bits(scaled)
    exponent = magnitude.bitwise_and(255 << bits.mantissa_bits)
    exponent.clamp_min_((fmt.min_exponent + _FP32_BIAS) << bits.mantissa_bits)
    return _join_tiles(_round_to_grid(scaled, magnitude, exponent, bits, torch.float32, fmt).mul_(scale_inv), x_RC)


def _round_to_grid(
    source: Tensor, magnitude: Tensor, exponent: Tensor, bits: _Bits, dtype: torch.dtype, fmt: Fp8Format
) -> Tensor:
    """|source| rounded to the grid of its exponent, with source's sign; takes bits, overwrites magnitude and exponent."""
    magic = exponent.add_((bits.mantissa_bits - fmt.mantissa_bits) << bits.mantissa_bits)
    magnitude.view(dtype).add_(magic.view(dtype)).sub_(magic.view(dtype))
    signs = torch.bitwise_and(source, bits.sign, out=magic)  # the magic numbers are done with: one buffer less
    return magnitude.bitwise_or_(signs).view(dtype)


def split_tiles(x_RC: Tensor, tile: tuple[int, int]) -> Tensor:
    """4D view (of a copy padded with zeros, if ragged): row tiles x rows in a tile x column tiles x columns in a tile."""
    tile_rows, tile_columns = tile
    padding = (0, -x_RC.shape[1] % tile_columns, 0, -x_RC.shape[0] % tile_rows)
    if any(padding):
        x_RC = torch.nn.functional.pad(x_RC, padding)
    return x_RC.view(x_RC.shape[0] // tile_rows, tile_rows, x_RC.shape[1] // tile_columns, tile_columns)


def _join_tiles(tiles: Tensor, like: Tensor) -> Tensor:
    rows, columns = like.shape
    return tiles.view(tiles.shape[0] * tiles.shape[1], -1)[:rows, :columns]


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as integers of the same order, NaN above inf above all else. x: BF16, FP32, or the integers of their bits."""
    integer = _BITS[x.dtype].integer if x.is_floating_point() else x.dtype
    return x.view(integer).bitwise_and(torch.iinfo(integer).max)


def tile_amax(magnitude: Tensor) -> Tensor:
    """Largest of the `magnitude_bits` in each tile of `split_tiles`, dimensions kept."""
    # Reducing a dimension of size 1 would cost a slow pass over everything
    amax = magnitude.amax(1, keepdim=True) if magnitude.shape[1] > 1 else magnitude
    return amax.amax(3, keepdim=True) if magnitude.shape[3] > 1 else amax
