"""The quantisers of `reference.py` on a GPU: same names, same bits; and the layouts that GEMMs want.

`quantize_tile_both` and the like read a matrix once and write it by its rows and, transposed, by its columns: the operands of a
linear's dgrad and wgrad (or fprop and wgrad).

Codes may be larger than the input (`pad_to`, for GEMMs that want multiples of 16): what lies outside is code 0 with scale_inv 1.
Scales lie in memory as cuBLAS reads them: those of tiles tile by tile ([B, R], handed out transposed); those of blocks in rows of
a multiple of 4. `out` writes into parts of larger matrices (see `Room`), so that operands of joined linears need no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fp8ctl.fp8 import generic_kernels, reference, square_kernels
from fp8ctl.fp8.formats import E4M3, TILE, Fp8Format, ScaleKind
from fp8ctl.fp8.reference import Quantized, num_tiles

_SCALES_PAD_TO = 4
_GENERIC_WARPS = 4
_SQUARE_WARPS = 8
# Measured on an H200: three programs to a multiprocessor, so that some wait for memory while others compute
_BOTH: dict[str, dict[str, int]] = {"pow2": {"num_warps": 4, "maxnreg": 168}, "fp32": {"num_warps": 8, "maxnreg": 128}}

Room = Quantized
"""Where to write: views of codes and scales, whose rows may lie apart, for a part whose sides are multiples of 128 in the joined
dimension."""


def quantize_tile(x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1) -> Quantized:
    """`reference.quantize_tile` for a contiguous matrix, its dimensions padded to a multiple of pad_to."""
    m, k = _sizes(x_MK)
    rows = empty_tiles(x_MK, m, k, fmt, pad_to)
    _tiles(x_MK, fmt, scale_kind, pad_to, rows, None)
    return rows


def quantize_tile_transposed(
    x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1
) -> Quantized:
    """`quantize_tile(x.t())` without transposing x first; codes are contiguous [K, M]."""
    m, k = _sizes(x_MK)
    columns = empty_tiles(x_MK, k, m, fmt, pad_to)
    _tiles(x_MK, fmt, scale_kind, pad_to, None, columns)
    return columns


def quantize_tile_both(
    x_MK: Tensor,
    fmt: Fp8Format = E4M3,
    scale_kind: ScaleKind = "pow2",
    *,
    pad_to: int = 1,
    out: tuple[Room, Room] | None = None,
) -> tuple[Quantized, Quantized]:
    """(`quantize_tile(x)`, `quantize_tile(x.t())`) from one read; codes are contiguous [M, K] and [K, M], or in `out`."""
    m, k = _sizes(x_MK)
    rows, columns = out or (empty_tiles(x_MK, m, k, fmt, pad_to), empty_tiles(x_MK, k, m, fmt, pad_to))
    _tiles(x_MK, fmt, scale_kind, pad_to, rows, columns)
    return rows, columns


def quantize_block(
    w_NK: Tensor,
    fmt: Fp8Format = E4M3,
    scale_kind: ScaleKind = "pow2",
    *,
    transposed: bool = False,
    pad_to: int = 1,
    out: Room | None = None,
) -> Quantized:
    """`reference.quantize_block` of a contiguous matrix; with `transposed` its `.t()`, codes contiguous [K, N], or in `out`."""
    n, k = _sizes(w_NK)
    q = out or (empty_blocks(w_NK, k, n, fmt, pad_to) if transposed else empty_blocks(w_NK, n, k, fmt, pad_to))
    if w_NK.numel() == 0:
        return q
    if _fills_squares(w_NK, pad_to):
        square_kernels.quantize_blocks[_grid(w_NK)](
            w_NK.view(torch.int32),
            q.codes.view(torch.uint8),
            q.codes.stride(0),
            q.scale_inv,
            q.scale_inv.stride(0),
            n,
            _pad(n, pad_to),
            k,
            TRANSPOSED=transposed,
            IS_EVEN=n % TILE == 0,
            IS_E4M3=fmt.name == "e4m3",
            IS_POW2=scale_kind == "pow2",
            num_warps=_SQUARE_WARPS,
        )
        return q
    whole = q if out is None else empty_blocks(w_NK, *((k, n) if transposed else (n, k)), fmt, pad_to)
    generic_kernels.quantize_blocks[_grid(w_NK)](
        w_NK,
        whole.codes.view(torch.uint8),
        whole.scale_inv,
        n,
        k,
        _pad(n, pad_to),
        _pad(k, pad_to),
        whole.scale_inv.stride(0),
        TRANSPOSED=transposed,
        IS_EVEN=_is_even(w_NK),
        **_constants(fmt, scale_kind),
    )
    return q if whole is q else _copy(whole, q)


class Directions(NamedTuple):
    """A matrix as its rows read it and, transposed, as its columns do; None for one that was not asked for."""

    rows: Quantized | None
    columns: Quantized | None


def quantize_row(
    x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, rows: bool, columns: bool, pad_to: int = 1
) -> Directions:
    """`reference.quantize_row` of a contiguous x and of x.t(): two reads of x, one for amax."""
    return quantize_joined([x_MK], fmt, scale_kind, axis=0, by_tensor=False, rows=rows, columns=columns, pad_to=pad_to)


def quantize_tensor(
    x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, rows: bool, columns: bool, pad_to: int = 1
) -> Directions:
    """`reference.quantize_tensor` of a contiguous x and of x.t(): two reads of x, one for amax."""
    return quantize_joined([x_MK], fmt, scale_kind, axis=0, by_tensor=True, rows=rows, columns=columns, pad_to=pad_to)


def quantize_joined(
    parts: Sequence[Tensor],
    fmt: Fp8Format,
    scale_kind: ScaleKind,
    *,
    axis: int,
    by_tensor: bool,
    rows: bool,
    columns: bool,
    pad_to: int = 1,
) -> Directions:
    """`quantize_tensor` or `quantize_row` of the parts put together along an axis, without putting them together first."""
    sizes = [_sizes(part) for part in parts]
    fits = all(part.numel() > 0 and _fills_squares(part, pad_to) for part in parts)
    if not fits or (axis == 0 and len(parts) > 1 and any(m % TILE for m, _ in sizes)):
        x_MK = torch.cat(list(parts), axis)
        quantize = reference.quantize_tensor if by_tensor else reference.quantize_row
        return Directions(
            _padded(quantize(x_MK, fmt, scale_kind), pad_to, by_tensor) if rows else None,
            _padded(quantize(x_MK.t(), fmt, scale_kind), pad_to, by_tensor) if columns else None,
        )
    m = sum(m for m, _ in sizes) if axis == 0 else sizes[0][0]
    k = sum(k for _, k in sizes) if axis == 1 else sizes[0][1]
    new, padded_m = parts[0].new_empty, _pad(m, pad_to)
    amax = parts[0].new_zeros(1 if by_tensor else m + k, dtype=torch.int32)
    row_codes = new(padded_m if rows else 0, k, dtype=fmt.dtype)
    codes = new(k if columns else 0, padded_m, dtype=fmt.dtype)
    row_scale_inv = new(1 if by_tensor else padded_m, 1, dtype=torch.float32)
    column_scale_inv = row_scale_inv if by_tensor else new(k, 1, dtype=torch.float32)

    begins = [(0, 0)]
    for part_m, part_k in sizes:
        begins.append((begins[-1][0] + (part_m if axis == 0 else 0), begins[-1][1] + (part_k if axis == 1 else 0)))
    which = {"ROWS": rows and not by_tensor, "COLUMNS": columns and not by_tensor}
    for part, (m0, k0) in zip(parts, begins, strict=False):
        row_amax, column_amax = (amax, amax) if by_tensor else (amax[m0:], amax[m + k0 :])
        is_even = part.shape[0] % TILE == 0
        square_kernels.find_amax[_grid(part)](
            part.view(torch.int32),
            row_amax,
            column_amax,
            *part.shape,
            **which,
            IS_EVEN=is_even,
            num_warps=_SQUARE_WARPS,
        )
    for part, (m0, k0) in zip(parts, begins, strict=False):
        row_amax, column_amax = (amax, amax) if by_tensor else (amax[m0:], amax[m + k0 :])
        square_kernels.quantize_scaled[_grid(part)](
            part.view(torch.int32),
            row_codes.view(torch.uint8)[m0:, k0:] if rows else row_codes.view(torch.uint8),
            k,
            codes.view(torch.uint8)[k0:, m0:] if columns else codes.view(torch.uint8),
            padded_m,
            row_amax,
            column_amax,
            row_scale_inv if by_tensor else row_scale_inv[m0:],
            column_scale_inv if by_tensor else column_scale_inv[k0:],
            part.shape[0],
            padded_m - m0 if axis == 1 or len(parts) == 1 else part.shape[0],
            part.shape[1],
            ROWS=rows,
            COLUMNS=columns,
            BY_TENSOR=by_tensor,
            IS_EVEN=part.shape[0] % TILE == 0,
            IS_E4M3=fmt.name == "e4m3",
            IS_POW2=scale_kind == "pow2",
            num_warps=_SQUARE_WARPS,
        )
    return Directions(
        Quantized(row_codes, row_scale_inv) if rows else None, Quantized(codes, column_scale_inv) if columns else None
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
    x_MK: Tensor, fmt: Fp8Format, scale_kind: ScaleKind, pad_to: int, rows: Room | None, columns: Room | None
) -> None:
    """Writes the directions that have room."""
    m, k = x_MK.shape
    if x_MK.numel() == 0:
        return
    if _fills_squares(x_MK, pad_to):
        nowhere = x_MK  # a pointer that no code uses
        square_kernels.quantize_tiles[_grid(x_MK)](
            x_MK.view(torch.int32),
            nowhere if rows is None else rows.codes.view(torch.uint8),
            0 if rows is None else rows.codes.stride(0),
            nowhere if rows is None else rows.scale_inv,
            0 if rows is None else rows.scale_inv.stride(1),
            nowhere if columns is None else columns.codes.view(torch.uint8),
            0 if columns is None else columns.codes.stride(0),
            nowhere if columns is None else columns.scale_inv,
            0 if columns is None else columns.scale_inv.stride(1),
            m,
            _pad(m, pad_to),
            k,
            ROWS=rows is not None,
            COLUMNS=columns is not None,
            IS_EVEN=m % TILE == 0,
            IS_E4M3=fmt.name == "e4m3",
            IS_POW2=scale_kind == "pow2",
            **(_BOTH[scale_kind] if rows is not None and columns is not None else {"num_warps": _SQUARE_WARPS}),
        )
        return
    whole_rows = None if rows is None else empty_tiles(x_MK, m, k, fmt, pad_to)
    whole_columns = None if columns is None else empty_tiles(x_MK, k, m, fmt, pad_to)
    none = empty_tiles(x_MK, 0, 0, fmt)
    into_rows, into_columns = whole_rows or none, whole_columns or none
    generic_kernels.quantize_tiles[_grid(x_MK)](
        x_MK,
        into_rows.codes.view(torch.uint8),
        into_rows.scale_inv,
        into_columns.codes.view(torch.uint8),
        into_columns.scale_inv,
        m,
        k,
        _pad(m, pad_to),
        _pad(k, pad_to),
        ROWS=rows is not None,
        COLUMNS=columns is not None,
        IS_EVEN=_is_even(x_MK),
        **_constants(fmt, scale_kind),
    )
    for whole, room in ((whole_rows, rows), (whole_columns, columns)):
        if whole is not None and room is not None:
            _copy(whole, room)


def _sizes(x: Tensor) -> tuple[int, int]:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"expected a matrix of float32, bfloat16 or float16, got {x.dtype} of shape {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"expected a contiguous matrix, got strides {x.stride()}")
    return x.shape[0], x.shape[1]


def _fills_squares(x: Tensor, pad_to: int) -> bool:
    """Whether the fast kernels can take it: BF16 in words, whole tiles of columns, rows written in words of four."""
    return (
        x.dtype == torch.bfloat16
        and x.shape[1] % TILE == 0
        and _pad(x.shape[0], pad_to) % 4 == 0
        and x.data_ptr() % 4 == 0
    )


def _pad(size: int, pad_to: int) -> int:
    assert TILE % pad_to == 0, "padding must end within the last tile"
    return -(-size // pad_to) * pad_to


def _is_even(x: Tensor) -> bool:
    return x.shape[0] % TILE == 0 and x.shape[1] % TILE == 0


def _grid(x: Tensor) -> tuple[int]:
    return (triton.cdiv(x.shape[0], TILE) * triton.cdiv(x.shape[1], TILE),)


def _constants(fmt: Fp8Format, scale_kind: ScaleKind) -> dict[str, object]:
    return {
        "IS_E4M3": fmt.name == "e4m3",
        "IS_POW2": scale_kind == "pow2",
        "LARGEST": fmt.largest,
        "MAX_EXPONENT": fmt.max_exponent,
        "num_warps": _GENERIC_WARPS,
    }


def _copy(whole: Quantized, room: Room) -> Quantized:
    room.codes.view(torch.uint8).copy_(whole.codes.view(torch.uint8))
    room.scale_inv.copy_(whole.scale_inv)
    return room


def _padded(q: Quantized, pad_to: int, by_tensor: bool) -> Quantized:
    rows, columns = q.codes.shape
    more_rows, more_columns = _pad(rows, pad_to) - rows, _pad(columns, pad_to) - columns
    codes = torch.nn.functional.pad(q.codes.view(torch.uint8), (0, more_columns, 0, more_rows)).view(q.codes.dtype)
    more_scales = 0 if by_tensor else more_rows
    return Quantized(codes.contiguous(), torch.nn.functional.pad(q.scale_inv, (0, 0, 0, more_scales), value=1.0))
