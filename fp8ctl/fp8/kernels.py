"""The quantisers of `reference.py` as Triton kernels: same names, same signatures, equal to it bit for bit.

A program reads one 128x128 square once. `quantize_tile_both` writes it quantised by tiles along its rows and, transposed,
along its columns: the operands of a linear's dgrad and wgrad (or fprop and wgrad) for one read of the matrix.

How the bits agree with the specification: amax is the maximum of magnitudes as integers, exponents of scales come from
those bits, FP32 scales from divisions rounded to nearest (`div_rn`, a plain `/` is approximate on a GPU), values are
clamped before the cast and inf and NaN get the NaN code by hand.

Outputs may be larger than the input (`pad_to`, for GEMMs that want multiples of 16): what lies outside is code 0 with
scale_inv 1. scale_inv of tiles is stored as GEMMs read it, tile by tile ([B, M] in memory), and handed out transposed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8ctl.fp8.formats import E4M3, TILE, Fp8Format, ScaleKind
from fp8ctl.fp8.reference import Quantized, num_tiles

_NUM_WARPS = 4
# A constexpr, since kernels can't see other globals
_SIDE = tl.constexpr(TILE)


def quantize_tile(x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1) -> Quantized:
    """`reference.quantize_tile` for a contiguous matrix, its dimensions padded to a multiple of pad_to."""
    return _tiles(x_MK, fmt, scale_kind, pad_to, rows=True, columns=False)[0]


def quantize_tile_both(
    x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1
) -> tuple[Quantized, Quantized]:
    """(`quantize_tile(x)`, `quantize_tile(x.t())`) from one read; codes are contiguous [M, K] and [K, M]."""
    return _tiles(x_MK, fmt, scale_kind, pad_to, rows=True, columns=True)


def quantize_tile_transposed(
    x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1
) -> Quantized:
    """`quantize_tile(x.t())` without transposing x first; codes are contiguous [K, M]."""
    return _tiles(x_MK, fmt, scale_kind, pad_to, rows=False, columns=True)[1]


def quantize_block(
    w_NK: Tensor,
    fmt: Fp8Format = E4M3,
    scale_kind: ScaleKind = "pow2",
    *,
    transposed: bool = False,
    pad_to: int = 1,
) -> Quantized:
    """`reference.quantize_block` of a contiguous matrix; with `transposed` its `.t()`, codes contiguous [K, N]."""
    _check(w_NK)
    rows, columns = w_NK.shape
    out_rows, out_columns = (columns, rows) if transposed else (rows, columns)
    codes = _empty_codes(w_NK, out_rows, out_columns, fmt, pad_to)
    scale_inv = w_NK.new_empty(num_tiles(out_rows), num_tiles(out_columns), dtype=torch.float32)
    if w_NK.numel() > 0:
        _quantize_block[(num_tiles(rows) * num_tiles(columns),)](
            w_NK,
            codes.view(torch.uint8),
            scale_inv,
            rows,
            columns,
            codes.shape[1 if transposed else 0],
            codes.shape[0 if transposed else 1],
            scale_inv.shape[1],
            TRANSPOSED=transposed,
            IS_EVEN=_is_even(rows, columns),
            **_constants(fmt, scale_kind),
        )
    return Quantized(codes, scale_inv)


def _tiles(
    x_MK: Tensor, fmt: Fp8Format, scale_kind: ScaleKind, pad_to: int, *, rows: bool, columns: bool
) -> tuple[Quantized, Quantized]:
    """Both directions; one that is not asked for comes back as an empty matrix."""
    _check(x_MK)
    m, k = x_MK.shape
    along_rows = _empty_codes(x_MK, m, k, fmt, pad_to) if rows else x_MK.new_empty(0, 0, dtype=fmt.dtype)
    along_columns = _empty_codes(x_MK, k, m, fmt, pad_to) if columns else x_MK.new_empty(0, 0, dtype=fmt.dtype)
    row_scale_inv = x_MK.new_empty(num_tiles(k), along_rows.shape[0], dtype=torch.float32)
    column_scale_inv = x_MK.new_empty(num_tiles(m), along_columns.shape[0], dtype=torch.float32)
    if x_MK.numel() > 0:
        _quantize_tile[(num_tiles(m) * num_tiles(k),)](
            x_MK,
            along_rows.view(torch.uint8),
            row_scale_inv,
            along_columns.view(torch.uint8),
            column_scale_inv,
            m,
            k,
            -(-m // pad_to) * pad_to,
            -(-k // pad_to) * pad_to,
            ROWS=rows,
            COLUMNS=columns,
            IS_EVEN=_is_even(m, k),
            **_constants(fmt, scale_kind),
        )
    return Quantized(along_rows, row_scale_inv.t()), Quantized(along_columns, column_scale_inv.t())


def _check(x: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"expected a matrix of float32, bfloat16 or float16, got {x.dtype} of shape {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"expected a contiguous matrix, got strides {x.stride()}")


def _empty_codes(like: Tensor, rows: int, columns: int, fmt: Fp8Format, pad_to: int) -> Tensor:
    assert TILE % pad_to == 0, "padding must end within the last tile"
    return like.new_empty(-(-rows // pad_to) * pad_to, -(-columns // pad_to) * pad_to, dtype=fmt.dtype)


def _is_even(rows: int, columns: int) -> bool:
    return rows % TILE == 0 and columns % TILE == 0


def _constants(fmt: Fp8Format, scale_kind: ScaleKind) -> dict[str, object]:
    return {
        "IS_E4M3": fmt.name == "e4m3",
        "IS_POW2": scale_kind == "pow2",
        "LARGEST": fmt.largest,
        "MAX_EXPONENT": fmt.max_exponent,
        "num_warps": _NUM_WARPS,
    }


@triton.jit
def _load(x_ptr, rows, columns, num_rows, num_columns, IS_EVEN: tl.constexpr):
    """A square in FP32, its magnitudes' bits with 0 for inf and NaN, and whether each value is finite."""
    at = x_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    if IS_EVEN:
        x = tl.load(at).to(tl.float32)
    else:
        x = tl.load(at, mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns), other=0.0).to(tl.float32)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    is_finite = magnitude < 0x7F800000
    return x, tl.where(is_finite, magnitude, 0), is_finite


@triton.jit
def _scales(amax, IS_POW2: tl.constexpr, LARGEST: tl.constexpr, MAX_EXPONENT: tl.constexpr):
    """`formats.scales` from the bits of amax."""
    if IS_POW2:
        exponent = tl.maximum(((amax + 0x1FFFFF) >> 23) - (127 + MAX_EXPONENT), -126)
        exponent = tl.where(amax == 0, 0, exponent)
        scale = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        scale_inv = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    else:
        # the bits of largest * 2^-126 and of largest, both 1.75 * 2^k
        smallest: tl.constexpr = ((1 + MAX_EXPONENT) << 23) + 0x600000
        largest_bits: tl.constexpr = ((127 + MAX_EXPONENT) << 23) + 0x600000
        clamped = tl.where(amax == 0, largest_bits, tl.maximum(amax, smallest)).to(tl.float32, bitcast=True)
        largest = tl.zeros_like(clamped) + LARGEST
        scale = tl.div_rn(largest, clamped)
        scale_inv = tl.div_rn(clamped, largest)
    return scale, scale_inv


@triton.jit
def _codes(x, scale, is_finite, IS_E4M3: tl.constexpr, LARGEST: tl.constexpr):
    scaled = tl.minimum(tl.maximum(x * scale, -LARGEST), LARGEST)
    if IS_E4M3:
        codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = scaled.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return tl.where(is_finite, codes, 0x7F).to(tl.uint8)


@triton.jit
def _store(ptr, values, rows, columns, num_rows, num_columns, stride, IS_EVEN: tl.constexpr):
    at = ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if IS_EVEN:
        tl.store(at, values)
    else:
        tl.store(at, values, mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns))


@triton.jit
def _quantize_tile(
    x_ptr,
    row_codes_ptr,
    row_scale_inv_ptr,
    column_codes_ptr,
    column_scale_inv_ptr,
    num_rows,
    num_columns,
    padded_rows,
    padded_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
):
    tiles_along_columns = tl.cdiv(num_columns, _SIDE)
    square_row = tl.program_id(0) // tiles_along_columns
    square_column = tl.program_id(0) % tiles_along_columns
    rows = square_row * _SIDE + tl.arange(0, _SIDE)
    columns = square_column * _SIDE + tl.arange(0, _SIDE)
    x, magnitude, is_finite = _load(x_ptr, rows, columns, num_rows, num_columns, IS_EVEN)
    if ROWS:
        scale, scale_inv = _scales(tl.max(magnitude, axis=1), IS_POW2, LARGEST, MAX_EXPONENT)
        codes = _codes(x, scale[:, None], is_finite, IS_E4M3, LARGEST)
        _store(row_codes_ptr, codes, rows, columns, padded_rows, padded_columns, padded_columns, IS_EVEN)
        tl.store(
            row_scale_inv_ptr + square_column.to(tl.int64) * padded_rows + rows, scale_inv, mask=rows < padded_rows
        )
    if COLUMNS:
        scale, scale_inv = _scales(tl.max(magnitude, axis=0), IS_POW2, LARGEST, MAX_EXPONENT)
        codes = tl.trans(_codes(x, scale[None, :], is_finite, IS_E4M3, LARGEST))
        _store(column_codes_ptr, codes, columns, rows, padded_columns, padded_rows, padded_rows, IS_EVEN)
        at = column_scale_inv_ptr + square_row.to(tl.int64) * padded_columns + columns
        tl.store(at, scale_inv, mask=columns < padded_columns)


@triton.jit
def _quantize_block(
    w_ptr,
    codes_ptr,
    scale_inv_ptr,
    num_rows,
    num_columns,
    padded_rows,
    padded_columns,
    scale_inv_stride,
    TRANSPOSED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
):
    tiles_along_columns = tl.cdiv(num_columns, _SIDE)
    square_row = tl.program_id(0) // tiles_along_columns
    square_column = tl.program_id(0) % tiles_along_columns
    rows = square_row * _SIDE + tl.arange(0, _SIDE)
    columns = square_column * _SIDE + tl.arange(0, _SIDE)
    w, magnitude, is_finite = _load(w_ptr, rows, columns, num_rows, num_columns, IS_EVEN)
    scale, scale_inv = _scales(tl.max(tl.max(magnitude, axis=1), axis=0), IS_POW2, LARGEST, MAX_EXPONENT)
    codes = _codes(w, scale, is_finite, IS_E4M3, LARGEST)
    if TRANSPOSED:
        _store(codes_ptr, tl.trans(codes), columns, rows, padded_columns, padded_rows, padded_rows, IS_EVEN)
        tl.store(scale_inv_ptr + square_column * scale_inv_stride + square_row, scale_inv)
    else:
        _store(codes_ptr, codes, rows, columns, padded_rows, padded_columns, padded_columns, IS_EVEN)
        tl.store(scale_inv_ptr + square_row * scale_inv_stride + square_column, scale_inv)
