"""Quantisers of BF16 matrices at the memory's speed: kernels that `kernels.py` takes where the columns fill whole tiles.

A program reads one square of 128 rows x 128 columns as [32, 4, 64] words of two BF16, row 4i + j at [i, j], and writes it by
rows, by columns or both; how it stays fast is told in `swiglu_kernels.py`, whose pieces it is made of. Rows may be ragged: those up
to `padded_M` are written as zeros. The matrix may lie in up to three parts, stacked (AXIS 0) or side by side (AXIS 1); size0 and
size1 are those of the first two along it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8ctl.fp8.formats import TILE
from fp8ctl.fp8.swiglu_kernels import (
    _IS_INTERPRETED,
    _amax,
    _four_codes,
    _quantize_columns,
    _quantize_rows,
    _scales_or_one,
    _two_codes,
    _unpack,
)

_SIDE = tl.constexpr(TILE)
_WORDS = tl.constexpr(TILE // 2)


@triton.jit
def _without_inf(pair):
    """inf becomes NaN; nothing else changes, the sign of zero included."""
    if _IS_INTERPRETED:
        even, odd = _unpack(pair)
        even = tl.fma(even, 0.0, even).to(tl.int32, bitcast=True)
        odd = tl.fma(odd, 0.0, odd).to(tl.int32, bitcast=True)
        pair = ((even >> 16) & 0xFFFF) | (odd & -0x10000)
    else:
        pair = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, zero, $1; }",
            "=r,r",
            [pair],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return pair


@triton.jit
def _square(x0_ptr, x1_ptr, x2_ptr, size0, size1, m, k, M, K, AXIS: tl.constexpr, IS_EVEN: tl.constexpr):
    """Words of the square at row m and column k of up to three matrices put together along an axis, inf turned into NaN."""
    place = k if AXIS == 1 else m
    is_second, is_third = place >= size0, place >= size0 + size1
    source = tl.where(is_third, x2_ptr, tl.where(is_second, x1_ptr, x0_ptr))
    begin = tl.where(is_third, size0 + size1, tl.where(is_second, size0, 0))
    if AXIS == 1:
        stride = tl.where(is_third, K - size0 - size1, tl.where(is_second, size1, size0)) // 2
        source += m * stride + (k - begin) // 2
    else:
        stride = K // 2
        source += (m - begin) * stride + k // 2
    row = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    at = source + row[:, :, None] * stride + tl.arange(0, _WORDS)[None, None, :]
    if IS_EVEN:
        pair = tl.load(at)
    else:
        pair = tl.load(at, mask=row[:, :, None] < M - m, other=0)
    return _without_inf(pair)


@triton.jit
def _place(K):
    squares = K // _SIDE
    m = (tl.program_id(0) // squares).to(tl.int64) * _SIDE
    return m, (tl.program_id(0) % squares).to(tl.int64) * _SIDE


@triton.jit
def quantize_tiles(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    size0,
    size1,
    row_codes_ptr,
    row_stride,
    row_scale_inv_ptr,
    row_scale_inv_stride,
    codes_ptr,
    stride,
    scale_inv_ptr,
    scale_inv_stride,
    M,
    padded_M,
    K,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
):
    """Tiles along the rows, along the columns (written transposed), or both from one read."""
    m, k = _place(K)
    pair = _square(x0_ptr, x1_ptr, x2_ptr, size0, size1, m, k, M, K, AXIS, IS_EVEN)
    if ROWS:
        row = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
        at = row_scale_inv_ptr + k // _SIDE * row_scale_inv_stride + m
        _quantize_rows(
            pair, row_codes_ptr + m * row_stride + k, row_stride, at, row, padded_M - m, IS_EVEN, IS_E4M3, IS_POW2
        )
    if COLUMNS:
        at = scale_inv_ptr + m // _SIDE * scale_inv_stride + k
        _quantize_columns(pair, codes_ptr + k * stride + m, stride, at, padded_M - m, IS_EVEN, IS_E4M3, IS_POW2)


@triton.jit
def _store_square(
    pair,
    row_scale,
    column_scale,
    codes_ptr,
    stride,
    rows,
    IS_EVEN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    IS_E4M3: tl.constexpr,
):
    """Codes of a square; scales as they broadcast against its even and its odd columns."""
    even, odd = _unpack(pair)
    if TRANSPOSED:
        even = _four_codes(even * column_scale[0], IS_E4M3)
        odd = _four_codes(odd * column_scale[1], IS_E4M3)
        column, i = tl.arange(0, _SIDE)[:, None], tl.arange(0, 32)[None, :]
        words = tl.trans(tl.interleave(even, odd))
        at = codes_ptr.to(tl.pointer_type(tl.int32)) + column * (stride // 4) + i
        if IS_EVEN:
            tl.store(at, words)
        else:
            tl.store(at, words, mask=4 * i < rows)
    else:
        row = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
        codes = _two_codes(even * row_scale, odd * row_scale, IS_E4M3)
        at = (
            codes_ptr.to(tl.pointer_type(tl.int16))
            + row[:, :, None] * (stride // 2)
            + tl.arange(0, _WORDS)[None, None, :]
        )
        if IS_EVEN:
            tl.store(at, codes)
        else:
            tl.store(at, codes, mask=row[:, :, None] < rows)


@triton.jit
def quantize_blocks(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    size0,
    size1,
    codes_ptr,
    stride,
    scale_inv_ptr,
    scale_inv_stride,
    M,
    padded_M,
    K,
    AXIS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
):
    """One scale a square."""
    m, k = _place(K)
    pair = _square(x0_ptr, x1_ptr, x2_ptr, size0, size1, m, k, M, K, AXIS, IS_EVEN)
    even_amax, odd_amax = _unpack(_amax(_amax(_amax(pair, 2), 1), 0))
    scale, scale_inv = _scales_or_one(tl.maximum(even_amax, odd_amax), IS_E4M3, IS_POW2)
    if TRANSPOSED:
        codes_at, scale_inv_at = codes_ptr + k * stride + m, k // _SIDE * scale_inv_stride + m // _SIDE
    else:
        codes_at, scale_inv_at = codes_ptr + m * stride + k, m // _SIDE * scale_inv_stride + k // _SIDE
    _store_square(pair, scale, (scale, scale), codes_at, stride, padded_M - m, IS_EVEN, TRANSPOSED, IS_E4M3)
    tl.store(scale_inv_ptr + scale_inv_at, scale_inv)


@triton.jit
def _finite_bits(amax):
    """Bits of amax as an integer of the same order; 0 for NaN, which stands for no finite value."""
    bits = amax.to(tl.int32, bitcast=True)
    return tl.where(bits > 0x7F800000, 0, bits)


@triton.jit
def find_amax(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    size0,
    size1,
    row_amax_ptr,
    column_amax_ptr,
    M,
    K,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Raises the integers at row_amax [M] and column_amax [K], or (neither asked for) the one at row_amax, to the bits of the largest
    finite magnitudes.
    """
    m, k = _place(K)
    pair = _square(x0_ptr, x1_ptr, x2_ptr, size0, size1, m, k, M, K, AXIS, IS_EVEN)
    if ROWS:
        row = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
        even, odd = _unpack(_amax(pair, 2))
        tl.atomic_max(row_amax_ptr + m + row, _finite_bits(tl.maximum(even, odd)), mask=row < M - m, sem="relaxed")
    if COLUMNS:
        even, odd = _unpack(_amax(_amax(pair, 1), 0))
        at = column_amax_ptr + k + 2 * tl.arange(0, _WORDS)
        tl.atomic_max(at, _finite_bits(even), sem="relaxed")
        tl.atomic_max(at + 1, _finite_bits(odd), sem="relaxed")
    if not (ROWS or COLUMNS):
        even, odd = _unpack(_amax(_amax(_amax(pair, 2), 1), 0))
        tl.atomic_max(row_amax_ptr, _finite_bits(tl.maximum(even, odd)), sem="relaxed")


@triton.jit
def quantize_scaled(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    size0,
    size1,
    row_codes_ptr,
    row_stride,
    codes_ptr,
    stride,
    row_amax_ptr,
    column_amax_ptr,
    row_scale_inv_ptr,
    column_scale_inv_ptr,
    M,
    padded_M,
    K,
    AXIS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_TENSOR: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
):
    """Codes with the scales of given amax (bits): of each row for the one direction and of each column for the other, or of the
    integer at row_amax for both. The first squares of each row and column write scale_inv.
    """
    m, k = _place(K)
    pair = _square(x0_ptr, x1_ptr, x2_ptr, size0, size1, m, k, M, K, AXIS, IS_EVEN)
    if BY_TENSOR:
        scale, scale_inv = _scales_or_one(tl.load(row_amax_ptr).to(tl.float32, bitcast=True), IS_E4M3, IS_POW2)
        if tl.program_id(0) == 0:
            tl.store(row_scale_inv_ptr, scale_inv)
    if ROWS:
        if not BY_TENSOR:
            row = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
            amax = tl.load(row_amax_ptr + m + row, mask=row < M - m, other=0).to(tl.float32, bitcast=True)
            scale, scale_inv = _scales_or_one(amax, IS_E4M3, IS_POW2)
            if k == 0:
                tl.store(row_scale_inv_ptr + m + row, scale_inv, mask=row < padded_M - m)
            scale = scale[:, :, None]
        _store_square(
            pair,
            scale,
            (scale, scale),
            row_codes_ptr + m * row_stride + k,
            row_stride,
            padded_M - m,
            IS_EVEN,
            False,
            IS_E4M3,
        )
    if COLUMNS:
        if BY_TENSOR:
            even_scale, odd_scale = scale, scale
        else:
            at = column_amax_ptr + k + 2 * tl.arange(0, _WORDS)
            even_scale, even_scale_inv = _scales_or_one(tl.load(at).to(tl.float32, bitcast=True), IS_E4M3, IS_POW2)
            odd_scale, odd_scale_inv = _scales_or_one(tl.load(at + 1).to(tl.float32, bitcast=True), IS_E4M3, IS_POW2)
            if m == 0:
                column = column_scale_inv_ptr + k + tl.arange(0, _SIDE)
                tl.store(column, tl.interleave(even_scale_inv, odd_scale_inv))
            even_scale, odd_scale = even_scale[None, None, :], odd_scale[None, None, :]
        _store_square(
            pair,
            even_scale,
            (even_scale, odd_scale),
            codes_ptr + k * stride + m,
            stride,
            padded_M - m,
            IS_EVEN,
            True,
            IS_E4M3,
        )
