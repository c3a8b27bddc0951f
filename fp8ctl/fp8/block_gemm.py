"""The block-scaled GEMM in Triton, with the contract of `reference.gemm_nt`, for GPUs where cuBLAS has none.

A program makes one tile of the result. Of each stretch of 128 along the contraction it multiplies the codes on tensor cores,
then adds the product, times the scales of that stretch, to a sum in FP32. So tensor cores that keep fewer bits in their sums
than FP32 (Hopper's do, for FP8) never sum more than 128 products.

Needs FP8 tensor cores: compute capability 8.9 or later.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8ctl.fp8.formats import TILE
from fp8ctl.fp8.reference import Quantized, num_tiles

# A constexpr, since kernels can't see other globals
_SIDE = tl.constexpr(TILE)
# Major compute capabilities with 227 KiB for a program; the others have 99, and a stage takes 24
_WITH_LARGE_SHARED_MEMORY = (9, 10)
_OUT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


class _Shape(NamedTuple):
    """What a program makes, and with what. columns never exceeds 128, so that a tile has one block of b at a time."""

    rows: int
    columns: int
    warps: int
    stages: int


def block_gemm(a_MK: Quantized, b_NK: Quantized, out_dtype: torch.dtype, bias_N: Tensor | None = None) -> Tensor:
    """D_MN = A_MK B_NK^T (+ bias), see `reference.gemm_nt`; any M, N, K, each of a and b in E4M3 or E5M2.

    Args:
        a_MK: by 1x128 tiles, rows contiguous.
        b_NK: by 128x128 blocks or 1x128 tiles, rows contiguous.
        out_dtype: bfloat16, float32 or float16.

    Raises:
        ValueError: the operands don't fit each other or are scaled in another way, or the result has another type.
    """
    m, n, k = _sizes(a_MK, b_NK, out_dtype)
    d_MN = a_MK.codes.new_empty(m, n, dtype=out_dtype)
    if d_MN.numel() == 0:
        return d_MN
    shape = _shape(m, n, d_MN.device)
    _gemm[(triton.cdiv(m, shape.rows) * triton.cdiv(n, shape.columns),)](
        a_MK.codes,
        b_NK.codes,
        d_MN,
        a_MK.scale_inv,
        b_NK.scale_inv,
        bias_N,
        m,
        n,
        k,
        a_MK.codes.stride(0),
        b_NK.codes.stride(0),
        *a_MK.scale_inv.stride(),
        *b_NK.scale_inv.stride(),
        B_IS_BLOCK=b_NK.scale_inv.shape[0] != n,
        HAS_BIAS=bias_N is not None,
        IS_EVEN_K=k % TILE == 0,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return d_MN


def _sizes(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> tuple[int, int, int]:
    (m, k), (n, b_k) = a.codes.shape, b.codes.shape
    if k != b_k:
        raise ValueError(f"contractions of {k} and {b_k} don't fit each other")
    if tuple(a.scale_inv.shape) != (m, num_tiles(k)):
        raise ValueError("the first matrix must be quantised by tiles")
    if tuple(b.scale_inv.shape) not in ((n, num_tiles(k)), (num_tiles(n), num_tiles(k))):
        raise ValueError("the second matrix must be quantised by blocks or tiles")
    if out_dtype not in _OUT_DTYPES:
        raise ValueError(f"the result is bfloat16, float32 or float16, not {out_dtype}")
    if k > 0 and (a.codes.stride(1) != 1 or b.codes.stride(1) != 1):
        raise ValueError("rows of codes must be contiguous")
    return m, n, k


def _shape(m: int, n: int, device: torch.device) -> _Shape:
    """64 x 128, three to a multiprocessor on Hopper, where that was the fastest of 128 x 128, 128 x 64 and it; less columns if
    most of the GPU would be idle.
    """
    if device.type != "cuda":
        return _Shape(16 if m <= 16 else 64, 64, 4, 1)
    properties = torch.cuda.get_device_properties(device)
    stages = 3 if properties.major in _WITH_LARGE_SHARED_MEMORY else 2
    programs = triton.cdiv(m, 64) * triton.cdiv(n, 128)
    return _Shape(64, 64 if programs < properties.multi_processor_count else 128, 4, stages)


@triton.jit
def _gemm(
    a_ptr,
    b_ptr,
    d_ptr,
    a_scale_inv_ptr,
    b_scale_inv_ptr,
    bias_ptr,
    M,
    N,
    K,
    a_stride,
    b_stride,
    a_scale_row,
    a_scale_tile,
    b_scale_row,
    b_scale_tile,
    B_IS_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Eight tiles of rows beside each other, then the next tile of columns: neighbours share operands in the L2 cache
    tiles_n = tl.cdiv(N, COLUMNS)
    band = tl.program_id(0) // (8 * tiles_n)
    in_band = tl.program_id(0) % (8 * tiles_n)
    height = min(tl.cdiv(M, ROWS) - band * 8, 8)
    row = (band * 8 + in_band % height).to(tl.int64) * ROWS
    column = (in_band // height).to(tl.int64) * COLUMNS
    # Rows beyond the end read the last one again, which is cheaper than masks; they aren't stored
    rows = tl.minimum(tl.arange(0, ROWS), M - row - 1).to(tl.int32)
    columns = tl.minimum(tl.arange(0, COLUMNS), N - column - 1).to(tl.int32)
    along = tl.arange(0, _SIDE)
    a_at = a_ptr + row * a_stride + rows[:, None] * a_stride + along[None, :]
    b_at = b_ptr + column * b_stride + columns[None, :] * b_stride + along[:, None]
    a_scale_at = a_scale_inv_ptr + row * a_scale_row + rows * a_scale_row
    if B_IS_BLOCK:
        b_scale_at = b_scale_inv_ptr + column // _SIDE * b_scale_row
    else:
        b_scale_at = b_scale_inv_ptr + column * b_scale_row + columns * b_scale_row
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for tile in range(tl.cdiv(K, _SIDE)):
        if IS_EVEN_K:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            left = K - tile * _SIDE
            a = tl.load(a_at, mask=along[None, :] < left, other=0.0)
            b = tl.load(b_at, mask=along[:, None] < left, other=0.0)
        a_scale, b_scale = tl.load(a_scale_at), tl.load(b_scale_at)
        product = tl.dot(a, b)
        if B_IS_BLOCK:
            total += product * (a_scale * b_scale)[:, None]
        else:
            total += product * (a_scale[:, None] * b_scale[None, :])
        a_at += _SIDE
        b_at += _SIDE
        a_scale_at += a_scale_tile
        b_scale_at += b_scale_tile
    if HAS_BIAS:
        total += tl.load(bias_ptr + column + columns).to(tl.float32)[None, :]
    at = d_ptr + row * N + column + tl.arange(0, ROWS)[:, None].to(tl.int64) * N + tl.arange(0, COLUMNS)[None, :]
    is_inside = (tl.arange(0, ROWS)[:, None] < M - row) & (tl.arange(0, COLUMNS)[None, :] < N - column)
    tl.store(at, total.to(d_ptr.dtype.element_ty), mask=is_inside)
