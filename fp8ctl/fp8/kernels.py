"""The quantisers of `reference.py` on a GPU: same names, same bits; and the layouts that GEMMs want.

`quantize_tile_both` and the like read a matrix once and write it by its rows and, transposed, by its columns: the operands of a
linear's dgrad and wgrad (or fprop and wgrad). What is quantised may lie in several parts, which are one matrix put together:
weights stacked, output gradients side by side; nothing is copied together if they are BF16 with sides of multiples of 128.

Codes may be larger than the input (`pad_to`, for GEMMs that want multiples of 16): what lies outside is code 0 with scale_inv 1.
Scales lie in memory as cuBLAS reads them: those of tiles tile by tile ([B, R], handed out transposed); those of blocks in rows of
a multiple of 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8ctl.fp8 import generic_kernels, reference, square_kernels
from fp8ctl.fp8.formats import E4M3, TILE, Fp8Format, ScaleKind
from fp8ctl.fp8.launch import launch
from fp8ctl.fp8.reference import Quantized, num_tiles

Matrix = Tensor | Sequence[Tensor]
"""A contiguous matrix, or its parts in order."""

_SCALES_PAD_TO = 4
_MOST_PARTS = 3
_GENERIC_WARPS = 4
_SQUARE_WARPS = 8
# Measured on an H200: three programs to a multiprocessor, so that some wait for memory while others compute
_BOTH: dict[str, dict[str, int]] = {"pow2": {"num_warps": 4, "maxnreg": 168}, "fp32": {"num_warps": 8, "maxnreg": 128}}


class Directions(NamedTuple):
    """A matrix as its rows read it and, transposed, as its columns do; None for one that was not asked for."""

    rows: Quantized | None
    columns: Quantized | None


def quantize_tile(x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1) -> Quantized:
    """`reference.quantize_tile` for a contiguous matrix, its dimensions padded to a multiple of pad_to."""
    rows, _ = _tiles(x_MK, fmt, scale_kind, pad_to, rows=True, columns=False)
    assert rows is not None
    return rows


def quantize_tile_transposed(
    x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1
) -> Quantized:
    """`quantize_tile(x.t())` without transposing x first; codes are contiguous [K, M]."""
    _, columns = _tiles(x_MK, fmt, scale_kind, pad_to, rows=False, columns=True)
    assert columns is not None
    return columns


def quantize_tile_both(
    x_MK: Matrix, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1
) -> tuple[Quantized, Quantized]:
    """(`quantize_tile(x)`, `quantize_tile(x.t())`) from one read; codes are contiguous [M, K] and [K, M]. Parts: side by side."""
    rows, columns = _tiles(x_MK, fmt, scale_kind, pad_to, rows=True, columns=True)
    assert rows is not None and columns is not None
    return rows, columns


def quantize_block(
    w_NK: Matrix, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, transposed: bool = False, pad_to: int = 1
) -> Quantized:
    """`reference.quantize_block` of a contiguous matrix; with `transposed` its `.t()`, codes contiguous [K, N]. Parts: stacked."""
    parts = _parts(w_NK, 0, pad_to)
    n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
    q = empty_blocks(parts[0], *((k, n) if transposed else (n, k)), fmt, pad_to)
    if q.codes.numel() == 0:
        return q
    if _fills_squares(parts[0], pad_to):
        constants = {"AXIS": 0, "TRANSPOSED": transposed, "IS_EVEN": n % TILE == 0, **_formats(fmt, scale_kind)}
        launch(
            square_kernels.quantize_blocks,
            num_tiles(n) * num_tiles(k),
            *_sources(parts, 0),
            *(q.codes.view(torch.uint8), q.codes.shape[1], q.scale_inv, q.scale_inv.stride(0), n, _pad(n, pad_to), k),
            constants=constants,
            num_warps=_SQUARE_WARPS,
        )
        return q
    (whole,) = parts
    launch(
        generic_kernels.quantize_blocks,
        num_tiles(n) * num_tiles(k),
        *(whole, q.codes.view(torch.uint8), q.scale_inv, n, k, _pad(n, pad_to), _pad(k, pad_to), q.scale_inv.stride(0)),
        constants={"TRANSPOSED": transposed, "IS_EVEN": _is_even(whole), **_formats(fmt, scale_kind), **_range(fmt)},
        num_warps=_GENERIC_WARPS,
    )
    return q


def quantize_row(
    x_MK: Matrix,
    fmt: Fp8Format = E4M3,
    scale_kind: ScaleKind = "pow2",
    *,
    rows: bool,
    columns: bool,
    axis: int = 0,
    pad_to: int = 1,
) -> Directions:
    """`reference.quantize_row` of x and of x.t(): two reads of x, one for amax. Parts: along `axis`."""
    parts = _parts(x_MK, axis, pad_to)
    if not _fills_squares(parts[0], pad_to):
        return _by_reference(reference.quantize_row, parts[0], fmt, scale_kind, rows, columns, pad_to)
    m, k = _size(parts, axis)
    amax = parts[0].new_zeros(m + k, dtype=torch.int32)
    scale_inv = parts[0].new_empty(_pad(m, pad_to) + k, 1, dtype=torch.float32)
    row_scale_inv, column_scale_inv = scale_inv[: _pad(m, pad_to)], scale_inv[_pad(m, pad_to) :]
    pointers = (amax, amax[m:], row_scale_inv, column_scale_inv)
    row_codes, codes = _scaled(parts, axis, pointers, fmt, scale_kind, rows, columns, pad_to, by_tensor=False)
    return Directions(
        Quantized(row_codes, row_scale_inv) if rows else None, Quantized(codes, column_scale_inv) if columns else None
    )


def quantize_tensor(
    x_MK: Matrix,
    fmt: Fp8Format = E4M3,
    scale_kind: ScaleKind = "pow2",
    *,
    rows: bool,
    columns: bool,
    axis: int = 0,
    pad_to: int = 1,
) -> Directions:
    """`reference.quantize_tensor` of x and of x.t(): two reads of x, one for amax. Parts: along `axis`."""
    parts = _parts(x_MK, axis, pad_to)
    if not _fills_squares(parts[0], pad_to):
        return _by_reference(reference.quantize_tensor, parts[0], fmt, scale_kind, rows, columns, pad_to)
    amax = parts[0].new_zeros(1, dtype=torch.int32)
    scale_inv = parts[0].new_empty(1, 1, dtype=torch.float32)
    pointers = (amax, amax, scale_inv, scale_inv)
    row_codes, codes = _scaled(parts, axis, pointers, fmt, scale_kind, rows, columns, pad_to, by_tensor=True)
    return Directions(
        Quantized(row_codes, scale_inv) if rows else None, Quantized(codes, scale_inv) if columns else None
    )


def empty_tiles(like: Tensor, rows: int, columns: int, fmt: Fp8Format = E4M3, pad_to: int = 1) -> Quantized:
    """Room for a matrix by tiles."""
    codes = like.new_empty(_pad(rows, pad_to), _pad(columns, pad_to), dtype=fmt.dtype)
    return Quantized(codes, like.new_empty(num_tiles(columns), codes.shape[0], dtype=torch.float32).t())


def empty_blocks(like: Tensor, rows: int, columns: int, fmt: Fp8Format = E4M3, pad_to: int = 1) -> Quantized:
    """Room for a matrix by blocks."""
    codes = like.new_empty(_pad(rows, pad_to), _pad(columns, pad_to), dtype=fmt.dtype)
    length = _pad(num_tiles(columns), _SCALES_PAD_TO)
    return Quantized(codes, like.new_ones(num_tiles(rows), length, dtype=torch.float32)[:, : num_tiles(columns)])


def _tiles(
    x_MK: Matrix, fmt: Fp8Format, scale_kind: ScaleKind, pad_to: int, *, rows: bool, columns: bool
) -> tuple[Quantized | None, Quantized | None]:
    parts = _parts(x_MK, 1, pad_to)
    first, (m, k) = parts[0], _size(parts, 1)
    along_rows = empty_tiles(first, m, k, fmt, pad_to) if rows else None
    along_columns = empty_tiles(first, k, m, fmt, pad_to) if columns else None
    if m * k == 0:
        return along_rows, along_columns
    # A pointer that no code uses stands where there is nothing to write
    places = [
        (q.codes.view(torch.uint8), q.scale_inv) if q is not None else (first, first)
        for q in (along_rows, along_columns)
    ]
    (row_codes, row_scale_inv), (codes, scale_inv) = places
    padded_m, constants = _pad(m, pad_to), {"ROWS": rows, "COLUMNS": columns}
    if _fills_squares(first, pad_to):
        launch(
            square_kernels.quantize_tiles,
            num_tiles(m) * num_tiles(k),
            *_sources(parts, 1),
            *(row_codes, k, row_scale_inv, padded_m, codes, padded_m, scale_inv, k, m, padded_m, k),
            constants={"AXIS": 1, **constants, "IS_EVEN": m % TILE == 0, **_formats(fmt, scale_kind)},
            **(_BOTH[scale_kind] if rows and columns else {"num_warps": _SQUARE_WARPS}),
        )
    else:
        launch(
            generic_kernels.quantize_tiles,
            num_tiles(m) * num_tiles(k),
            *(first, row_codes, row_scale_inv, codes, scale_inv, m, k, padded_m, _pad(k, pad_to)),
            constants={**constants, "IS_EVEN": _is_even(first), **_formats(fmt, scale_kind), **_range(fmt)},
            num_warps=_GENERIC_WARPS,
        )
    return along_rows, along_columns


def _scaled(
    parts: Sequence[Tensor],
    axis: int,
    pointers: tuple[Tensor, Tensor, Tensor, Tensor],
    fmt: Fp8Format,
    scale_kind: ScaleKind,
    rows: bool,
    columns: bool,
    pad_to: int,
    *,
    by_tensor: bool,
) -> tuple[Tensor, Tensor]:
    """Codes of both directions, scaled by the largest magnitudes. pointers: amax of rows and of columns, and their scale_inv."""
    (m, k), sources = _size(parts, axis), _sources(parts, axis)
    num_squares, padded_m = num_tiles(m) * num_tiles(k), _pad(m, pad_to)
    is_even = {"IS_EVEN": m % TILE == 0}
    directions = {"AXIS": axis, "ROWS": rows and not by_tensor, "COLUMNS": columns and not by_tensor}
    launch(
        square_kernels.find_amax,
        num_squares,
        *(*sources, *pointers[:2], m, k),
        constants={**directions, **is_even},
        num_warps=_SQUARE_WARPS,
    )
    row_codes = parts[0].new_empty(padded_m if rows else 0, k, dtype=fmt.dtype)
    codes = parts[0].new_empty(k if columns else 0, padded_m, dtype=fmt.dtype)
    launch(
        square_kernels.quantize_scaled,
        num_squares,
        *sources,
        *(row_codes.view(torch.uint8), k, codes.view(torch.uint8), padded_m, *pointers, m, padded_m, k),
        constants={
            "AXIS": axis,
            "ROWS": rows,
            "COLUMNS": columns,
            "BY_TENSOR": by_tensor,
            **is_even,
            **_formats(fmt, scale_kind),
        },
        num_warps=_SQUARE_WARPS,
    )
    return row_codes, codes


def _by_reference(
    quantize: Any, x_MK: Tensor, fmt: Fp8Format, scale_kind: ScaleKind, rows: bool, columns: bool, pad_to: int
) -> Directions:
    """By row or tensor where the fast kernels can't."""
    found: list[Quantized | None] = []
    for matrix, is_asked in ((x_MK, rows), (x_MK.t(), columns)):
        if not is_asked:
            found.append(None)
            continue
        codes, scale_inv = quantize(matrix, fmt, scale_kind)
        more_rows, more_columns = (_pad(size, pad_to) - size for size in codes.shape)
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, more_columns, 0, more_rows)).view(codes.dtype)
        more_scales = more_rows if quantize is reference.quantize_row else 0
        found.append(
            Quantized(codes.contiguous(), torch.nn.functional.pad(scale_inv, (0, 0, 0, more_scales), value=1.0))
        )
    return Directions(*found)


def _parts(x: Matrix, axis: int, pad_to: int) -> Sequence[Tensor]:
    """The matrix as the kernels can take it: in parts if the fast ones can, else in one piece."""
    parts = (x,) if isinstance(x, Tensor) else x
    for part in parts:
        _check(part)
    if len(parts) == 1:
        return parts
    fits = all(part.numel() > 0 and part.shape[axis] % TILE == 0 and _fills_squares(part, pad_to) for part in parts)
    return parts if fits and len(parts) <= _MOST_PARTS else (torch.cat(list(parts), axis),)


def _sources(parts: Sequence[Tensor], axis: int) -> tuple[Any, ...]:
    """Three pointers to words, and the sizes of the first two along the axis."""
    words = [part.view(torch.int32) for part in parts]
    sizes = [part.shape[axis] for part in parts]
    return (*words, *words[-1:] * (_MOST_PARTS - len(words)), sizes[0], sizes[1] if len(sizes) > 1 else 0)


def _size(parts: Sequence[Tensor], axis: int) -> tuple[int, int]:
    m, k = parts[0].shape
    total = sum(part.shape[axis] for part in parts)
    return (total, k) if axis == 0 else (m, total)


def _check(x: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"expected a matrix of float32, bfloat16 or float16, got {x.dtype} of shape {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"expected a contiguous matrix, got strides {x.stride()}")


def _fills_squares(x: Tensor, pad_to: int) -> bool:
    """Whether the fast kernels can take it: BF16 in words, whole tiles of columns, rows written in words of four."""
    rows, columns = x.shape
    return (
        x.dtype == torch.bfloat16
        and columns % TILE == 0
        and _pad(rows, pad_to) % 4 == 0
        and x.data_ptr() % 4 == 0
        and x.numel() > 0
    )


def _pad(size: int, pad_to: int) -> int:
    assert TILE % pad_to == 0, "padding must end within the last tile"
    return -(-size // pad_to) * pad_to


def _is_even(x: Tensor) -> bool:
    return x.shape[0] % TILE == 0 and x.shape[1] % TILE == 0


def _formats(fmt: Fp8Format, scale_kind: ScaleKind) -> dict[str, bool]:
    return {"IS_E4M3": fmt.name == "e4m3", "IS_POW2": scale_kind == "pow2"}


def _range(fmt: Fp8Format) -> dict[str, float | int]:
    return {"LARGEST": fmt.largest, "MAX_EXPONENT": fmt.max_exponent}
