"""The specification against an oracle in rational arithmetic, and its rules for values that no one wants to see."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8ctl.fp8.formats import E4M3, E5M2, FORMATS, Fp8Format, scales
from fp8ctl.fp8.reference import (
    Quantized,
    dequantize,
    gemm_nt,
    num_tiles,
    quantize_block,
    quantize_row,
    quantize_tensor,
    quantize_tile,
    swiglu,
    swiglu_backward,
)

BOTH_FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
KINDS = pytest.mark.parametrize("kind", ["pow2", "fp32"])
ALONG_ROWS = pytest.mark.parametrize("quantize", [quantize_tile, quantize_row, quantize_tensor])
FP32_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max
NOT_FINITE, TINY = [math.inf, -math.inf, math.nan], [0.0, -0.0, 2.0**-149, -(2.0**-130), 2.0**-126, 1e-30]
AWKWARD = [*NOT_FINITE, *TINY, FP32_MAX, -BF16_MAX, 448.0, 464.0, 3e38]


def value_table(fmt: Fp8Format) -> list[Fraction]:
    """All non-negative finite values of a format, from its definition: the index is the code."""
    subnormal_step = Fraction(2) ** (fmt.min_exponent - fmt.mantissa_bits)
    values = [subnormal_step * m for m in range(2**fmt.mantissa_bits)]
    exponent = fmt.min_exponent
    while values[-1] < fmt.largest:
        values += [
            Fraction(2) ** exponent * (1 + Fraction(m, 2**fmt.mantissa_bits)) for m in range(2**fmt.mantissa_bits)
        ]
        exponent += 1
    return values[: values.index(Fraction(fmt.largest)) + 1]


TABLES = {name: value_table(fmt) for name, fmt in FORMATS.items()}


def oracle_code(value: float, scale: float, fmt: Fp8Format) -> int:
    """The code that the docstring of reference.py prescribes, computed without floating-point rounding of ours."""
    if not math.isfinite(value):
        return 0x7F
    product = float(np.float32(value) * np.float32(scale))  # the one FP32 rounding the rule names
    magnitude = min(abs(Fraction(product)), Fraction(fmt.largest))
    table = TABLES[fmt.name]
    distances = [abs(v - magnitude) for v in table]
    smallest = min(distances)
    candidates = [code for code, d in enumerate(distances) if d == smallest]
    code = next((c for c in candidates if c % 2 == 0), candidates[0])  # a tie goes to the even code
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def oracle_scale(values: list[float], fmt: Fp8Format, kind: str) -> tuple[float, float]:
    amax = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    scale, scale_inv = scales(torch.tensor([amax]), fmt, kind)  # type: ignore[arg-type]
    return scale.item(), scale_inv.item()


def codes_of(q: Quantized) -> list[list[int]]:
    return q.codes.view(torch.uint8).tolist()


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    rows, columns = draw(st.integers(1, 3)), draw(st.sampled_from([1, 5, 127, 128, 129, 200, 256]))
    seed = draw(st.integers(0, 2**32 - 1))
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0 ** draw(st.integers(-140, 120))
    spread = draw(st.integers(0, 30))
    exponents = torch.randint(-spread, spread + 1, (rows, columns), generator=torch.Generator().manual_seed(seed + 1))
    x = (x * 2.0**exponents).nan_to_num(posinf=FP32_MAX, neginf=-FP32_MAX)
    for _ in range(draw(st.integers(0, 4))):
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = draw(
            st.one_of(st.sampled_from(AWKWARD), st.floats(width=32))
        )
    if draw(st.booleans()):
        x[draw(st.integers(0, rows - 1))] = 0.0
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


@pytest.mark.parametrize(("quantize", "length"), [(quantize_tile, 128), (quantize_row, 256)])
@BOTH_FORMATS
@KINDS
@settings(max_examples=25, deadline=None)
@given(x_MK=matrices())
def test_tiles_and_rows_equal_the_oracle(
    fmt: Fp8Format, kind: str, quantize: Any, length: int, x_MK: torch.Tensor
) -> None:
    q = quantize(x_MK, fmt, kind)
    codes = codes_of(q)
    assert q.scale_inv.shape == (len(x_MK), -(-x_MK.shape[1] // length))
    for row, values in enumerate(x_MK.float().tolist()):
        for tile in range(q.scale_inv.shape[1]):
            inside = values[length * tile : length * (tile + 1)]
            scale, scale_inv = oracle_scale(inside, fmt, kind)
            assert q.scale_inv[row, tile].item() == scale_inv
            assert codes[row][length * tile : length * (tile + 1)] == [oracle_code(v, scale, fmt) for v in inside]


@BOTH_FORMATS
@KINDS
@settings(max_examples=25, deadline=None)
@given(x_MK=matrices())
def test_a_matrix_is_quantised_like_one_long_row(fmt: Fp8Format, kind: Any, x_MK: torch.Tensor) -> None:
    q, row = quantize_tensor(x_MK, fmt, kind), quantize_row(x_MK.reshape(1, -1), fmt, kind)
    assert q.scale_inv.tolist() == row.scale_inv.tolist()
    assert torch.equal(q.codes.view(torch.uint8).flatten(), row.codes.view(torch.uint8)[0])


def test_rows_and_matrix_by_hand() -> None:
    """The rows need 2^0 and 2^-3 (30 / 448 is between 2^-4 and 2^-3), the matrix the larger: 2^-12 underflows there."""
    x_MK = torch.tensor([[448.0, 17.0, -1.0] + [0.0] * 200, [30.0, 3.25, -0.0] + [2.0**-12] * 200])
    by_row = quantize_row(x_MK)
    assert by_row.scale_inv.tolist() == [[1.0], [2.0**-3]]
    assert dequantize(*by_row)[:, :3].tolist() == [[448.0, 16.0, -1.0], [30.0, 3.25, 0.0]]
    assert codes_of(by_row)[1][2:] == [0x80] + [0x01] * 200  # 2^-9 once scaled, the smallest subnormal
    by_tensor = quantize_tensor(x_MK)
    assert by_tensor.scale_inv.tolist() == [[1.0]]
    assert dequantize(*by_tensor)[:, :3].tolist() == [[448.0, 16.0, -1.0], [30.0, 3.25, 0.0]]
    assert codes_of(by_tensor)[1][2:] == [0x80] + [0x00] * 200
    assert quantize_row(x_MK, E4M3, "fp32").scale_inv.tolist() == [[1.0], [torch.tensor(30.0).div(448).item()]]
    assert quantize_tensor(x_MK, E5M2).scale_inv.tolist() == [[2.0**-7]]


@KINDS
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), rows=st.sampled_from([1, 64, 130, 192]), columns=st.sampled_from([3, 128, 129]))
def test_a_block_has_the_scale_of_its_largest_value(kind: str, seed: int, rows: int, columns: int) -> None:
    w_NK = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) ** 5
    q = quantize_block(w_NK, E4M3, kind)  # type: ignore[arg-type]
    assert q.scale_inv.shape == (num_tiles(rows), num_tiles(columns))
    for n in range(q.scale_inv.shape[0]):
        for k in range(q.scale_inv.shape[1]):
            block = (slice(128 * n, 128 * n + 128), slice(128 * k, 128 * k + 128))
            scale, scale_inv = oracle_scale(w_NK[block].flatten().tolist(), E4M3, kind)
            assert q.scale_inv[n, k].item() == scale_inv
            # one row of one tile quantised with that scale: the tile rule with the block's amax in it
            direct = (w_NK[block] * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(q.codes[block].view(torch.uint8), direct.view(torch.uint8))


@BOTH_FORMATS
def test_every_code_of_the_format_survives_the_round_trip(fmt: Fp8Format) -> None:
    """With the largest value in each tile scale_inv is 1, and what the format holds comes back exactly, code by code."""
    table = [float(v) for v in TABLES[fmt.name]]
    x_MK = torch.tensor([[fmt.largest, *table], [fmt.largest, *(-v for v in table)]])
    q = quantize_tile(x_MK, fmt)
    assert (q.scale_inv == 1).all()
    assert codes_of(q) == [
        [len(table) - 1, *range(len(table))],
        [len(table) - 1, *(128 + c for c in range(len(table)))],
    ]
    assert torch.equal(dequantize(*q), x_MK)


@BOTH_FORMATS
def test_ties_go_to_even_and_neighbours_to_the_nearest(fmt: Fp8Format) -> None:
    """Halfway between any two codes, and one FP32 step to either side of it."""
    table = TABLES[fmt.name]
    middles = torch.tensor([float((a + b) / 2) for a, b in zip(table, table[1:], strict=False)])
    below, above = (middles.view(torch.int32) + step for step in (-1, 1))
    rows = torch.stack([middles, below.view(torch.float32), above.view(torch.float32)])
    q = quantize_tile(torch.cat([torch.full((3, 1), fmt.largest), rows], dim=1)[:, :128], fmt)
    lower = list(range(len(table) - 1))[:127]
    assert codes_of(q)[0][1:] == [c if c % 2 == 0 else c + 1 for c in lower]
    assert codes_of(q)[1][1:] == lower
    assert codes_of(q)[2][1:] == [c + 1 for c in lower]


@BOTH_FORMATS
@KINDS
@ALONG_ROWS
def test_zeros_give_zeros_with_scale_one(fmt: Fp8Format, kind: str, quantize: Any) -> None:
    x_MK = torch.zeros(2, 130)
    x_MK[1] = -0.0
    q = quantize(x_MK, fmt, kind)
    assert (q.scale_inv == 1).all()
    assert set(codes_of(q)[0]) == {0x00} and set(codes_of(q)[1]) == {0x80}
    assert torch.equal(dequantize(*q), x_MK)


@BOTH_FORMATS
@KINDS
@pytest.mark.parametrize("quantize", [quantize_row, quantize_tensor])
def test_the_ends_of_the_range_in_rows_and_matrices(fmt: Fp8Format, kind: str, quantize: Any) -> None:
    tiny = quantize(torch.full((2, 200), -(2.0**-130)), fmt, kind)
    assert (tiny.scale_inv == 2.0**-126).all() and (tiny.codes.float() == -(2.0**-4)).all()
    for largest in (FP32_MAX, BF16_MAX):
        q = quantize(torch.tensor([[largest, -largest, 1.0] * 60]), fmt, kind)
        assert q.codes.float()[0, :3].sign().tolist() == [1.0, -1.0, 0.0] and q.codes.float().isfinite().all()


@BOTH_FORMATS
@KINDS
@ALONG_ROWS
def test_non_finite_values_become_nan_and_leave_their_tile_alone(fmt: Fp8Format, kind: str, quantize: Any) -> None:
    clean = torch.linspace(-3, 3, 256).repeat(3, 1)
    clean[:, 7] = 0.0
    dirty = clean.clone()
    dirty[:, 7] = torch.tensor([math.inf, -math.inf, -math.nan])
    q, q_clean = (quantize(x, fmt, kind) for x in (dirty, clean))
    assert torch.equal(q.scale_inv, q_clean.scale_inv)
    assert [row[7] for row in codes_of(q)] == [0x7F] * 3
    expected = q_clean.codes.view(torch.uint8).clone()
    expected[:, 7] = 0x7F
    assert torch.equal(q.codes.view(torch.uint8), expected)
    assert dequantize(*q)[:, 7].isnan().all()

    all_inf = quantize(torch.full((1, 128), -math.inf), fmt, kind)
    assert all_inf.scale_inv.item() == 1 and set(codes_of(all_inf)[0]) == {0x7F}


@BOTH_FORMATS
def test_subnormal_tiles_are_not_flushed(fmt: Fp8Format) -> None:
    """The exponent stops at -126, so an FP32 subnormal keeps what lies within the format's own subnormals."""
    x_MK = torch.tensor([[2.0**-130, 2.0**-132, -(2.0**-149)]])
    q = quantize_tile(x_MK, fmt)
    assert q.scale_inv.item() == 2.0**-126
    step = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    assert q.codes.float().tolist() == [[2.0**-4, 2.0**-6, -(round(2.0**-23 / step) * step)]]
    assert codes_of(q)[0][2] == 0x80


@BOTH_FORMATS
@KINDS
def test_the_largest_numbers_stay_finite_codes(fmt: Fp8Format, kind: str) -> None:
    for largest in (FP32_MAX, BF16_MAX):
        q = quantize_tile(torch.tensor([[largest, -largest, largest / 4, 1.0]]), fmt, kind)  # type: ignore[arg-type]
        assert q.codes.float().isfinite().all()
        assert q.codes.float()[0, 0] > 0 > q.codes.float()[0, 1]
    # the documented exception: with pow2 scales they round up to 2^128
    assert dequantize(*quantize_tile(torch.tensor([[FP32_MAX]]), fmt, "pow2")).item() == math.inf
    assert dequantize(*quantize_tile(torch.tensor([[FP32_MAX]]), fmt, "fp32")).item() == pytest.approx(
        FP32_MAX, rel=1e-6
    )
    below = quantize_tile(torch.tensor([[1.9 * 2.0**127]]), E4M3, "pow2")
    assert dequantize(*below).item() == 1.875 * 2.0**127


@KINDS
def test_relative_error_is_half_a_step(kind: str) -> None:
    x_MK = torch.randn(64, 300, generator=torch.Generator().manual_seed(0))
    error = (dequantize(*quantize_tile(x_MK, E4M3, kind)) - x_MK).abs()  # type: ignore[arg-type]
    amax = torch.nn.functional.pad(x_MK.abs(), (0, 84)).view(64, 3, 128).amax(2).repeat_interleave(128, 1)[:, :300]
    # half of 2^-3 relative to normals, half of 2^-9 of the scale (at most amax / 224) below
    assert (error <= torch.maximum(x_MK.abs() / 16, amax / 224 * 2.0**-10) * (1 + 1e-6)).all()


def test_transposed_blocks_are_the_same_values() -> None:
    w_NK = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    q = quantize_block(w_NK)
    assert torch.equal(dequantize(*q.t()), dequantize(*q).t())
    with pytest.raises(ValueError, match="by blocks"):
        quantize_tile(w_NK).t()


@KINDS
def test_one_scale_spreads_over_the_whole_axis(kind: Any) -> None:
    """So a matrix by tensor can be transposed, one by row can't; up to 128 columns a row is a tile."""
    x_MK = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    by_tensor, by_row = (quantize(x_MK, E4M3, kind) for quantize in (quantize_tensor, quantize_row))
    assert torch.equal(dequantize(*by_tensor), by_tensor.codes.float() * by_tensor.scale_inv.item())
    assert torch.equal(dequantize(*by_row), by_row.codes.float() * by_row.scale_inv)
    assert torch.equal(dequantize(*by_tensor.t()), dequantize(*by_tensor).t())
    transposed = quantize_tensor(x_MK.t(), E4M3, kind)  # type: ignore[arg-type]
    assert codes_of(by_tensor.t()) == codes_of(transposed)
    with pytest.raises(ValueError, match="by blocks"):
        by_row.t()
    narrow = [quantize(x_MK[:, :128], E4M3, kind) for quantize in (quantize_row, quantize_tile)]
    assert codes_of(narrow[0]) == codes_of(narrow[1]) and torch.equal(narrow[0].scale_inv, narrow[1].scale_inv)


@pytest.mark.parametrize("quantize", [quantize_tile, quantize_block, quantize_row, quantize_tensor])
def test_only_matrices_of_float_are_taken(quantize: Any) -> None:
    not_float = (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.float64))
    for bad in (torch.tensor(1.0), torch.zeros(3), *not_float):
        with pytest.raises(ValueError, match="expected a matrix"):
            quantize(bad)


def test_empty_matrices_stay_empty() -> None:
    assert quantize_tile(torch.zeros(0, 200)).scale_inv.shape == (0, 2)
    assert quantize_block(torch.zeros(0, 200)).codes.shape == (0, 200)
    tiles, blocks = quantize_tile(torch.zeros(0, 200)), quantize_block(torch.ones(5, 200))
    assert gemm_nt(tiles, blocks, torch.float32).shape == (0, 5)


@pytest.mark.parametrize("shape", [(0, 200), (5, 0), (0, 0)], ids=str)
def test_empty_rows_and_matrices_have_scale_one(shape: tuple[int, int]) -> None:
    by_row, by_tensor = (quantize(torch.zeros(shape)) for quantize in (quantize_row, quantize_tensor))
    assert by_row.scale_inv.tolist() == [[1.0]] * shape[0] and by_tensor.scale_inv.tolist() == [[1.0]]
    for q in (by_row, by_tensor, by_tensor.t().t()):
        assert dequantize(*q).shape == shape
        assert torch.equal(gemm_nt(q, q, torch.float32), torch.zeros(shape[0], shape[0]))


@pytest.mark.parametrize("shape", [(64, 128, 128), (17, 192, 576), (100, 576, 192), (33, 130, 1)])
@pytest.mark.parametrize(
    ("quantize_a", "quantize_b"),
    [(quantize_tile, quantize_block), (quantize_row, quantize_row), (quantize_tensor, quantize_tensor)],
)
@KINDS
def test_gemm_error_is_at_most_twice_that_of_bf16(
    kind: str, quantize_a: Any, quantize_b: Any, shape: tuple[int, int, int]
) -> None:
    """Against the exact (FP64) product of the same quantised operands."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m * n + k)
    a = quantize_a(torch.randn(m, k, generator=generator), E4M3, kind)
    b = quantize_b(torch.randn(n, k, generator=generator), E4M3, kind)
    a_MK, b_NK = dequantize(*a), dequantize(*b)
    exact = a_MK.double() @ b_NK.double().t()
    bf16 = (a_MK.bfloat16() @ b_NK.bfloat16().t()).double()
    assert (gemm_nt(a, b, torch.bfloat16).double() - exact).norm() <= 2 * (bf16 - exact).norm()
    assert (gemm_nt(a, b, torch.float32).double() - exact).norm() <= 1e-6 * exact.norm()


def test_gemm_adds_the_bias_before_rounding() -> None:
    a, b = quantize_tile(torch.ones(1, 4)), quantize_block(torch.ones(2, 4))
    bias_N = torch.tensor([0.5, -4.0], dtype=torch.bfloat16)
    assert gemm_nt(a, b, torch.bfloat16, bias_N).tolist() == [[4.5, 0.0]]


def test_quantisation_error_of_one_gemm_is_that_of_the_recipe() -> None:
    """The figure measured on hardware for the same recipe: 0.0369 relative error on Gaussian data."""
    generator = torch.Generator().manual_seed(1)
    x_MK, w_NK = torch.randn(256, 1024, generator=generator), torch.randn(256, 1024, generator=generator)
    d_MN = gemm_nt(quantize_tile(x_MK), quantize_block(w_NK), torch.float32)
    exact = x_MK @ w_NK.t()
    assert ((d_MN - exact).norm() / exact.norm()).item() == pytest.approx(0.0369, rel=0.03)


def test_swiglu_by_hand() -> None:
    """At 0 the slope of silu is 1/2; far out silu is 0 or the gate itself."""
    gate = torch.tensor([[0.0, 200.0, -200.0, math.log(3)]])
    up, d_act = torch.tensor([[3.0, 3.0, 3.0, 2.0]]), torch.tensor([[5.0, 5.0, 5.0, 1.0]])
    d_gate, d_up, act = swiglu_backward(gate, up, d_act)
    s, log3 = 0.75, math.log(3)
    torch.testing.assert_close(swiglu(gate, up), torch.tensor([[0.0, 600.0, 0.0, log3 * s * 2]]))
    torch.testing.assert_close(d_up, torch.tensor([[0.0, 1000.0, 0.0, log3 * s]]))
    torch.testing.assert_close(d_gate, torch.tensor([[7.5, 15.0, 0.0, 2 * s * (1 + log3 * (1 - s))]]))
    assert torch.equal(act, swiglu(gate, up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_swiglu_is_the_formula_rounded_once(dtype: torch.dtype, seed: int, scale: float) -> None:
    """Against FP64 and its automatic derivative, half a step of the dtype plus FP32's own error away."""
    generator = torch.Generator().manual_seed(seed)
    gate, up, d_act = ((torch.randn(5, 33, generator=generator) * scale).to(dtype) for _ in range(3))
    exact_gate, exact_up = gate.double().requires_grad_(), up.double().requires_grad_()
    exact = exact_gate / (1 + torch.exp(-exact_gate)) * exact_up
    exact.backward(d_act.double())
    d_gate, d_up, act = swiglu_backward(gate, up, d_act)
    assert torch.equal(act, swiglu(gate, up))
    half_a_step, smallest = torch.finfo(dtype).eps / 2, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    # FP32 may lose a few steps of the terms, which are larger than their sum where s + g s (1 - s) cancels
    d_gate_terms = (d_act.double() * up.double()).abs() * (1 + gate.double().abs()) * torch.sigmoid(gate.double())
    triples = ((d_gate, exact_gate.grad, d_gate_terms), (d_up, exact_up.grad, None), (act, exact.detach(), None))
    for got, wanted, terms in triples:
        assert got.dtype == dtype and wanted is not None
        error = (got.double() - wanted).abs()
        allowed = half_a_step * wanted.abs() + 8 * 2.0**-24 * (wanted if terms is None else terms).abs() + smallest
        both_vanish = (gate < -87) & (got.abs() < 1e-30) & (wanted.abs() < 1e-30)
        assert ((error <= allowed) | both_vanish).all()


def test_swiglu_of_nothing_and_of_what_is_not_finite() -> None:
    empty = torch.zeros(0, 8, dtype=torch.bfloat16)
    for result in (swiglu(empty, empty), *swiglu_backward(empty, empty, empty)):
        assert result.shape == (0, 8) and result.dtype == torch.bfloat16
    gate, up = torch.tensor([math.nan, math.inf, 1.0]), torch.tensor([1.0, 1.0, math.inf])
    assert swiglu(gate[None], up[None]).nan_to_num(7.0, math.inf).tolist() == [[7.0, math.inf, math.inf]]
    halves = torch.randn(3, 16).chunk(2, dim=1)
    assert torch.equal(swiglu(*halves), swiglu(*(half.contiguous() for half in halves)))
