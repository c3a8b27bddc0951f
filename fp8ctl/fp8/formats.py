"""The two FP8 formats and the scales that bring high-precision values into their range.

`scale` multiplies into FP8, `scale_inv` multiplies back; only `scale_inv` is stored. Both scale kinds are defined so
that CPU and GPU agree to the bit: nothing here uses log2, pow, or a division that hardware may approximate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

TILE = 128
"""Length of a tile along the contraction dimension, and side of a block."""

ScaleKind = Literal["pow2", "fp32"]

MIN_EXPONENT = -126
"""Smallest exponent of a scale_inv, that of the smallest normal FP32 number: scale and scale_inv are both normal."""

_FP32_BIAS = 127
_FP32_MANTISSA_BITS = 23
# Both largest values are 1.75 * 2^k. Added to the bits of an FP32 number it carries into the exponent exactly when the
# mantissa is above 1.75, which is when amax / (1.75 * 2^k) needs the next power of two.
_ROUND_UP_ABOVE_1_75 = (1 << _FP32_MANTISSA_BITS) - 1 - 0x600000


@dataclass(frozen=True)
class Fp8Format:
    """One FP8 format: 1.m * 2^exponent, subnormals below 2^min_exponent, largest finite value 1.75 * 2^max_exponent."""

    name: Literal["e4m3", "e5m2"]
    dtype: torch.dtype
    mantissa_bits: int
    min_exponent: int
    max_exponent: int

    @property
    def largest(self) -> float:
        """Largest finite value: 448 (E4M3), 57344 (E5M2)."""
        return 1.75 * 2.0**self.max_exponent


E4M3 = Fp8Format("e4m3", torch.float8_e4m3fn, mantissa_bits=3, min_exponent=-6, max_exponent=8)
E5M2 = Fp8Format("e5m2", torch.float8_e5m2, mantissa_bits=2, min_exponent=-14, max_exponent=15)
FORMATS: dict[str, Fp8Format] = {f.name: f for f in (E4M3, E5M2)}


def pow2_exponent(amax: Tensor, fmt: Fp8Format) -> Tensor:
    """ceil(log2(amax / largest)) clamped to at least -126, as int32 of the same shape, from the bits of the FP32 amax.

    amax is finite and >= 0. The upper clamp of the rule, 127, is out of reach: the largest FP32 number gives 120
    (E4M3). Source: InfiR2's UE8M0 algorithm (log2, ceil, clamp) and TransformerEngine's recipe_common.cuh, which agree.
    """
    field = (amax.view(torch.int32) + _ROUND_UP_ABOVE_1_75) >> _FP32_MANTISSA_BITS
    return (field - (_FP32_BIAS + fmt.max_exponent)).clamp_min(MIN_EXPONENT)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in FP32, exactly, built from bits; exponent is int32 within [-126, 127]."""
    return ((exponent + _FP32_BIAS) << _FP32_MANTISSA_BITS).view(torch.float32)


def scales(amax: Tensor, fmt: Fp8Format, kind: ScaleKind) -> tuple[Tensor, Tensor]:
    """(scale, scale_inv) in FP32 for each amax (FP32, finite, >= 0); both are finite, normal and positive.

    pow2: scale_inv = 2^ceil(log2(amax / largest)), scale = 1 / scale_inv, both exact; the dequantising scale is rounded
    up, so nothing saturates. fp32: scale_inv = amax / largest and scale = largest / amax, each one division rounded to
    nearest even; amax below largest * 2^-126 counts as that, which is the clamp of pow2. amax = 0 gives 1 and 1.
    """
    if kind == "pow2":
        exponent = torch.where(amax == 0, 0, pow2_exponent(amax, fmt))
        return power_of_two(-exponent), power_of_two(exponent)
    # Tensor by tensor: dividing by a Python number may become a multiplication by its rounded reciprocal
    largest = torch.full_like(amax, fmt.largest)
    amax = torch.where(amax == 0, largest, amax.clamp_min(fmt.largest * 2.0**MIN_EXPONENT))
    return largest / amax, amax / largest
