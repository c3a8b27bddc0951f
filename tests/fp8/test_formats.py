"""Scales against exact rational arithmetic."""

from __future__ import annotations

import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8ctl.fp8.formats import E4M3, E5M2, Fp8Format, pow2_exponent, power_of_two, scales

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
amaxes = st.one_of(
    st.floats(min_value=0, allow_infinity=False, allow_nan=False, width=32, exclude_min=True),
    st.integers(min_value=1, max_value=0x7F7FFFFF).map(lambda bits: struct.unpack("<f", struct.pack("<I", bits))[0]),
)


def exact_exponent(amax: float, fmt: Fp8Format) -> int:
    """Smallest e >= -126 with amax <= largest * 2^e, by trying."""
    e = -126
    while Fraction(amax) > Fraction(fmt.largest) * Fraction(2) ** e:
        e += 1
    return e


def nearest_float32(value: Fraction) -> float:
    """Correctly rounded FP32 of a positive fraction in the normal range, ties to even."""
    e = 0
    while value >= 2:
        value, e = value / 2, e + 1
    while value < 1:
        value, e = value * 2, e - 1
    mantissa = value * 2**23
    return float(Fraction(round(mantissa)) * Fraction(2) ** (e - 23))  # round() of a Fraction is ties-to-even


def test_largest_values_are_those_of_torch() -> None:
    assert torch.finfo(torch.float8_e4m3fn).max == E4M3.largest == 448
    assert torch.finfo(torch.float8_e5m2).max == E5M2.largest == 57344
    assert torch.finfo(torch.float8_e4m3fn).smallest_normal == 2.0**E4M3.min_exponent
    assert torch.finfo(torch.float8_e5m2).smallest_normal == 2.0**E5M2.min_exponent


@FORMATS
@given(amax=amaxes)
def test_pow2_scale_inv_is_the_exact_ceiling(fmt: Fp8Format, amax: float) -> None:
    scale, scale_inv = scales(torch.tensor([amax]), fmt, "pow2")
    expected = Fraction(2) ** exact_exponent(amax, fmt)
    assert Fraction(scale_inv.item()) == expected
    assert Fraction(scale.item()) == 1 / expected


@FORMATS
@pytest.mark.parametrize("exponent", [-135, -126, -100, -1, 0, 1, 64, 119])
def test_pow2_exponent_steps_exactly_above_the_largest_value(fmt: Fp8Format, exponent: int) -> None:
    """At largest * 2^e the exponent is e, one FP32 step above it e + 1."""
    exponent = min(exponent, 127 - fmt.max_exponent - 1)
    at = torch.tensor([fmt.largest], dtype=torch.float64).mul(2.0**exponent).to(torch.float32)
    above = at.view(torch.int32).add(1).view(torch.float32)
    assert pow2_exponent(at, fmt).item() == max(exponent, -126)
    assert pow2_exponent(above, fmt).item() == max(exponent + 1, -126)


@FORMATS
@given(amax=amaxes)
def test_fp32_scales_are_one_correctly_rounded_division(fmt: Fp8Format, amax: float) -> None:
    scale, scale_inv = scales(torch.tensor([amax]), fmt, "fp32")
    clamped = max(Fraction(amax), Fraction(fmt.largest) / 2**126)
    assert scale_inv.item() == nearest_float32(clamped / Fraction(fmt.largest))
    assert scale.item() == nearest_float32(Fraction(fmt.largest) / clamped)


@FORMATS
@pytest.mark.parametrize("kind", ["pow2", "fp32"])
def test_scales_are_normal_numbers_at_both_ends(fmt: Fp8Format, kind: str) -> None:
    ends = torch.tensor([0.0, 2.0**-149, 2.0**-126, 1.0, torch.finfo(torch.float32).max])
    for values in scales(ends, fmt, kind):  # type: ignore[arg-type]
        assert values.isfinite().all() and (values >= 2.0**-126).all()
    assert [v[0].item() for v in scales(ends, fmt, kind)] == [1.0, 1.0]  # type: ignore[arg-type]


def test_power_of_two_over_its_whole_range() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert [Fraction(v) for v in power_of_two(exponents).tolist()] == [Fraction(2) ** e for e in range(-126, 128)]
