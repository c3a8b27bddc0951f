"""The fast round trip through FP8 equals the reference, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ctl.fp8 import emulate
from fp8ctl.fp8.emulate import quantize_dequantize
from fp8ctl.fp8.formats import E4M3, E5M2, FORMATS
from fp8ctl.fp8.reference import dequantize, quantize_block, quantize_row, quantize_tensor, quantize_tile

DTYPES = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
COARSE = [("row", "rows"), ("row", "columns"), ("row", "block"), ("tensor", "rows"), ("tensor_delayed", "columns")]


def by_reference(x: torch.Tensor, along: str, fmt_name: str, kind: str, granularity: str = "block") -> torch.Tensor:
    fmt = FORMATS[fmt_name]
    if granularity in ("tensor", "tensor_delayed"):
        return dequantize(*quantize_tensor(x, fmt, kind))  # type: ignore[arg-type]
    if granularity == "row":
        if along == "columns":
            return dequantize(*quantize_row(x.t(), fmt, kind)).t()  # type: ignore[arg-type]
        return dequantize(*quantize_row(x, fmt, kind))  # type: ignore[arg-type]
    if along == "block":
        return dequantize(*quantize_block(x, fmt, kind))  # type: ignore[arg-type]
    if along == "columns":
        return dequantize(*quantize_tile(x.t(), fmt, kind)).t()  # type: ignore[arg-type]
    return dequantize(*quantize_tile(x, fmt, kind))  # type: ignore[arg-type]


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape and a.dtype == b.dtype
    nan = a.isnan()
    assert torch.equal(nan, b.isnan())
    integer = DTYPES[a.dtype]
    assert torch.equal(
        a.contiguous().view(integer).masked_fill(nan, 0), b.contiguous().view(integer).masked_fill(nan, 0)
    )


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.sampled_from([1, 3, 128, 130])), draw(st.sampled_from([1, 100, 128, 192, 257]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    x = torch.randn(rows, columns, generator=generator)
    spread = draw(st.sampled_from([0, 4, 12, 40]))
    exponents = torch.randint(-spread, spread + 1, (rows, columns), generator=generator) + draw(st.integers(-145, 125))
    x = torch.ldexp(x.double(), exponents).clamp(-3e38, 3e38).float()
    zeros = torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    x = torch.where(zeros, torch.where(x < 0, -0.0, 0.0), x)
    if draw(st.booleans()):
        x[0, -1] = draw(st.sampled_from([math.inf, -math.inf, math.nan, 3.39e38, 2.0**-149, -(2.0**-127)]))
    return x.to(draw(st.sampled_from(list(DTYPES))))


@pytest.mark.parametrize("along", ["rows", "columns", "block"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@settings(max_examples=60, deadline=None)
@given(x=matrices())
def test_it_equals_the_reference(along: str, fmt: object, x: torch.Tensor) -> None:
    got = quantize_dequantize(x, along, fmt, "pow2")  # type: ignore[arg-type]
    assert_same_bits(got, by_reference(x, along, fmt.name, "pow2").to(x.dtype))  # type: ignore[attr-defined]
    got = quantize_dequantize(x, along, fmt, "fp32")  # type: ignore[arg-type]
    assert_same_bits(got, by_reference(x, along, fmt.name, "fp32"))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("granularity", "along"), COARSE)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@settings(max_examples=40, deadline=None)
@given(x=matrices())
def test_rows_and_whole_matrices_equal_the_reference(granularity: str, along: str, fmt: Any, x: torch.Tensor) -> None:
    for kind, dtype in (("pow2", x.dtype), ("fp32", torch.float32)):
        got = quantize_dequantize(x, along, fmt, kind, granularity=granularity)  # type: ignore[arg-type]
        assert_same_bits(got, by_reference(x, along, fmt.name, kind, granularity).to(dtype))


@pytest.mark.parametrize(
    ("along", "granularity", "tile"),
    [
        ("rows", "block", (1, 128)),
        ("columns", "mxfp8", (128, 1)),
        ("block", "mxfp8", (128, 128)),
        ("rows", "row", (1, 300)),
        ("columns", "row", (200, 1)),
        ("block", "row", (1, 300)),
        ("rows", "tensor", (200, 300)),
        ("columns", "tensor_delayed", (200, 300)),
        ("block", "tensor", (200, 300)),
    ],
)
def test_what_shares_a_scale(along: Any, granularity: Any, tile: tuple[int, int]) -> None:
    """Seen in the shape, and in how far one huge value makes the others underflow."""
    x = torch.ones(200, 300)
    assert emulate.tile_shape(x, along, granularity) == tile
    x[0, 0] = 2.0**30
    became_zero = torch.zeros(200, 300, dtype=torch.bool)
    became_zero[: tile[0], : tile[1]] = True
    became_zero[0, 0] = False
    for kind in ("pow2", "fp32"):
        values = quantize_dequantize(x, along, E4M3, kind, granularity=granularity)  # type: ignore[arg-type]
        assert torch.equal(values == 0, became_zero)


@pytest.mark.parametrize(("granularity", "along"), COARSE)
def test_rows_and_whole_matrices_take_the_fast_way(granularity: Any, along: Any) -> None:
    x = torch.randn(70, 200)
    x[0] = 0.0
    tile = emulate.tile_shape(x, along, granularity)
    for dtype in DTYPES:
        got = emulate._round_pow2(x.to(dtype), tile, E4M3)
        assert got is not None and got.is_contiguous()
        assert_same_bits(got, by_reference(x.to(dtype), along, "e4m3", "pow2", granularity).to(dtype))
    got = emulate._round_fp32(x, tile, E4M3)
    assert got is not None
    assert_same_bits(got, by_reference(x, along, "e4m3", "fp32", granularity))


@pytest.mark.parametrize(("granularity", "along"), COARSE)
def test_rows_and_whole_matrices_of_any_layout_empty_or_half(granularity: Any, along: Any) -> None:
    x = torch.randn(150, 130).bfloat16()
    out = quantize_dequantize(x, along, E4M3, "pow2", granularity=granularity)
    assert_same_bits(quantize_dequantize(x.t().contiguous().t(), along, E4M3, "pow2", granularity=granularity), out)
    half = x.half()
    assert torch.equal(
        quantize_dequantize(half, along, E4M3, "pow2", granularity=granularity),
        by_reference(half, along, "e4m3", "pow2", granularity).half(),
    )
    for shape in ((0, 130), (130, 0), (0, 0)):
        for kind, dtype in (("pow2", torch.bfloat16), ("fp32", torch.float32)):
            empty = quantize_dequantize(x.new_zeros(shape), along, E4M3, kind, granularity=granularity)  # type: ignore[arg-type]
            assert empty.shape == shape and empty.dtype == dtype


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_bf16_number_beside_every_kind_of_amax(fmt: object) -> None:
    """All 32,640 finite magnitudes of BF16, in tiles whose amax runs through many exponents and mantissas."""
    everything = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for exponent in (-80, -20, -3, 0, 1, 30, 90):
        for mantissa in (1.0, 1.7421875, 1.75, 1.7578125, 1.9921875):
            amax = torch.tensor(mantissa * 2.0**exponent, dtype=torch.bfloat16)
            inside = everything[everything <= amax]
            inside = torch.cat([inside, inside.new_zeros(-len(inside) % 127)]).view(-1, 127)
            x = torch.cat([amax.expand(len(inside), 1), -inside], dim=1)
            got = emulate._round_pow2(x.contiguous(), (1, 128), fmt)  # type: ignore[arg-type]
            assert got is not None
            assert_same_bits(got, by_reference(x, "rows", fmt.name, "pow2").to(torch.bfloat16))  # type: ignore[attr-defined]


def test_ordinary_tensors_take_the_fast_way_and_odd_ones_the_reference() -> None:
    x = torch.randn(8, 200)
    x[0] = 0.0
    assert emulate._round_pow2(x, (1, 128), E4M3) is not None
    for odd in (math.inf, math.nan, 1e38):
        y = x.clone()
        y[3, 5] = odd
        assert emulate._round_pow2(y, (1, 128), E4M3) is None
    assert emulate._round_pow2(x * 1e-35, (1, 128), E4M3) is None


def test_the_input_is_left_alone_and_strides_do_not_matter() -> None:
    x = torch.randn(150, 130).bfloat16()
    before = x.clone()
    for along in ("rows", "columns", "block"):
        out = quantize_dequantize(x, along, E4M3, "pow2")  # type: ignore[arg-type]
        assert_same_bits(x, before)
        assert_same_bits(quantize_dequantize(x.t().contiguous().t(), along, E4M3, "pow2"), out)  # type: ignore[arg-type]
    assert_same_bits(quantize_dequantize(torch.ones(1, 1).expand(4, 200), "rows", E4M3, "pow2"), torch.ones(4, 200))


def test_bf16_values_are_exact_with_pow2_scales() -> None:
    x = torch.randn(64, 300).bfloat16()
    assert torch.equal(quantize_dequantize(x, "rows", E4M3, "pow2").float(), dequantize(*quantize_tile(x)))


def test_fp32_scales_come_out_in_fp32() -> None:
    x = torch.randn(64, 300).bfloat16()
    assert emulate._round_fp32(x.float(), (1, 128), E4M3) is not None
    for along in ("rows", "columns", "block"):
        got = quantize_dequantize(x, along, E4M3, "fp32")  # type: ignore[arg-type]
        assert_same_bits(got, by_reference(x, along, "e4m3", "fp32"))
    x[2, 7] = math.inf
    assert emulate._round_fp32(x.float(), (1, 128), E4M3) is None


def test_empty_and_half_precision_inputs() -> None:
    assert quantize_dequantize(torch.zeros(0, 576).bfloat16(), "columns", E4M3, "pow2").shape == (0, 576)
    half = torch.randn(4, 130).half()
    assert torch.equal(
        quantize_dequantize(half, "rows", E4M3, "pow2"), by_reference(half, "rows", "e4m3", "pow2").half()
    )
