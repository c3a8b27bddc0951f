"""Quantisers of any matrix (FP32, FP16, ragged columns): the kernels that `kernels.py` takes where `square_kernels.py` can't.

How the bits agree with the specification: amax is the maximum of magnitudes as integers, exponents of scales come from those
bits, FP32 scales from divisions rounded to nearest (`div_rn`, a plain `/` is approximate on a GPU), values are clamped before the
cast and inf and NaN get the NaN code by hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8ctl.fp8.formats import TILE

# A constexpr, since kernels can't see other globals
_SIDE = tl.constexpr(TILE)


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
def quantize_tiles(
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
def quantize_blocks(
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
