"""The specification of FP8 in this project, in plain PyTorch, on any device. Each fast kernel has its twin here.

Quantising a tile (1x128 along the contraction dimension K), a block (128x128), a row or a whole matrix, in this order:

1. The input is converted to FP32 (exact for BF16 and FP16). Subnormals count; nothing is flushed to zero.
2. amax is the largest magnitude among the finite values of the tile; 0 if there is none. The last tile or block of a
   dimension that is no multiple of 128 is short.
3. scale and scale_inv follow from amax alone (`formats.scales`); they are finite, also for tiles of zeros, inf or NaN.
4. Each value is multiplied by scale in FP32, rounded to nearest even (exact with pow2 scales, except that a product
   below 2^-126 may round; it quantises to zero either way).
5. It is clamped to [-largest, largest], and inf and NaN become NaN. Both come before the cast, because casts of values
   out of range differ between versions and devices of PyTorch (NaN, infinity or saturation).
6. It is cast to FP8, rounded to nearest even, subnormals included. The sign of zero stays: -0 and negative values that
   underflow have code 0x80. NaN has code 0x7F, whatever sign or payload it had.

E5M2 could hold infinity, E4M3 can't; here both turn inf into NaN. So the two formats share one rule, an FP8 tensor
never holds infinity, and one non-finite value makes the GEMM outputs that it touches NaN in either format.

Dequantising multiplies the code's value by scale_inv in FP32, rounded to nearest even. With pow2 scales that is exact,
with one exception: a finite value above 248 * 2^120 (E4M3; 3.3e38) rounds up to 2^128, which FP32 calls infinity. The
stored code is finite.

Letters: M, N, K as in the GEMM, B tiles along K, Nb and Kb blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8ctl.fp8.formats import E4M3, TILE, Fp8Format, ScaleKind, scales

_Tile = tuple[int | None, int | None]
"""Rows and columns that share a scale; None is all of the axis: one scale, even if the axis is empty."""


class Quantized(NamedTuple):
    """An FP8 matrix: values = codes * scale_inv, each scale_inv spread over its tile, block, row or the whole matrix.

    codes: [R, K] float8. scale_inv: FP32, [R, ceil(K/128)] for tiles, [ceil(R/128), ceil(K/128)] for blocks, [R, 1] for
    rows, [1, 1] for the whole matrix. Shapes tell them apart: as many scales as the axis is long are one each, one
    scale is for all of the axis, else each is for 128. (Where two readings agree, they are the same thing.)
    """

    codes: Tensor
    scale_inv: Tensor

    def t(self) -> Quantized:
        """The transposed matrix, exact; for blocks and for one scale only: a tile or a row transposed lies across the
        contraction dimension.

        This is how dgrad reads the weight: the same block quantisation, contracted over N instead of K.
        """
        if self.scale_inv.shape[0] != num_tiles(self.codes.shape[0]) and self.scale_inv.numel() != 1:
            raise ValueError("only a matrix quantised by blocks can be transposed without quantising again")
        return Quantized(self.codes.t(), self.scale_inv.t())


def num_tiles(size: int) -> int:
    """Tiles along a dimension of this size, the short last one included."""
    return -(-size // TILE)


def quantize_tile(x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2") -> Quantized:
    """Quantises by 1x128 tiles along K: codes_MK, scale_inv_MB.

    For wgrad hand in the transposed high-precision tensor (`x_MK.t()`): its tiles lie along the tokens.
    """
    return _quantize(x_MK, fmt, scale_kind, (1, TILE))


def quantize_block(w_NK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2") -> Quantized:
    """Quantises by 128x128 blocks: codes_NK, scale_inv_NbKb."""
    return _quantize(w_NK, fmt, scale_kind, (TILE, TILE))


def quantize_row(x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2") -> Quantized:
    """Quantises with one scale for each row: codes_MK, scale_inv [M, 1]. Also how weights of a per-row recipe are."""
    return _quantize(x_MK, fmt, scale_kind, (1, None))


def quantize_tensor(x_MK: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2") -> Quantized:
    """Quantises with one scale for the matrix: codes_MK, scale_inv [1, 1]."""
    return _quantize(x_MK, fmt, scale_kind, (None, None))


def swiglu(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) * up with silu(g) = g / (1 + exp(-g)): computed in FP32, rounded to the dtype of gate once.

    From a gate of about -88 down, where exp(-g) leaves the range of FP32, it and its gradients are zero or close to it.
    """
    gate, up = gate_TF.float(), up_TF.float()
    return (gate * torch.sigmoid(gate) * up).to(gate_TF.dtype)


def swiglu_backward(gate_TF: Tensor, up_TF: Tensor, d_act_TF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(d_gate, d_up, act) of `swiglu`: computed in FP32, each rounded once.

    With s = sigmoid(gate): d_up = d_act (gate s), d_gate = d_act up (s + gate s (1 - s)).
    """
    gate, up, d_act = gate_TF.float(), up_TF.float(), d_act_TF.float()
    s = torch.sigmoid(gate)
    silu = gate * s
    d_gate = d_act * up * (s + silu * (1 - s))
    dtype = gate_TF.dtype
    return d_gate.to(dtype), (d_act * silu).to(dtype), (silu * up).to(dtype)


def dequantize(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """FP32 values of a quantised matrix (see `Quantized`), same shape as its codes."""
    return codes.to(torch.float32) * _spread(scale_inv, *codes.shape)


def gemm_nt(a_MK: Quantized, b_NK: Quantized, out_dtype: torch.dtype, bias_N: Tensor | None = None) -> Tensor:
    """D_MN = A_MK B_NK^T (+ bias) of dequantised operands: products and sums in FP32, rounded to out_dtype once.

    The order of the sum is free: implementations agree within a tolerance, at most twice the error of a plain BF16 GEMM
    against this function with out_dtype=torch.float32.
    """
    d_MN = dequantize(*a_MK) @ dequantize(*b_NK).t()
    if bias_N is not None:
        d_MN = d_MN + bias_N.to(torch.float32)
    return d_MN.to(out_dtype)


def _quantize(x: Tensor, fmt: Fp8Format, scale_kind: ScaleKind, tile: _Tile) -> Quantized:
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"expected a matrix of float32, bfloat16 or float16, got {x.dtype} of shape {tuple(x.shape)}")
    x = x.to(torch.float32)
    is_finite = x.isfinite()
    scale, scale_inv = scales(_tile_amax(torch.where(is_finite, x.abs(), 0.0), tile), fmt, scale_kind)
    scaled = (x * _spread(scale, *x.shape)).clamp(-fmt.largest, fmt.largest)
    return Quantized(torch.where(is_finite, scaled, torch.nan).to(fmt.dtype), scale_inv)


def _tile_amax(magnitude: Tensor, tile: _Tile) -> Tensor:
    """Largest value of each tile."""
    grid: list[int] = []
    for size, length in zip(magnitude.shape, tile, strict=True):
        grid += [1, max(size, 1)] if length is None else [-(-size // length), length]
    missing_rows, missing_columns = (grid[2 * i] * grid[2 * i + 1] - magnitude.shape[i] for i in (0, 1))
    padded = torch.nn.functional.pad(magnitude, (0, missing_columns, 0, missing_rows))
    return padded.view(grid).amax(dim=(1, 3))


def _spread(per_tile: Tensor, rows: int, columns: int) -> Tensor:
    """Repeats one value per tile over the elements of its tile."""
    for axis, size in enumerate((rows, columns)):
        if per_tile.shape[axis] == 1:
            per_tile = per_tile.expand(size, -1) if axis == 0 else per_tile.expand(-1, size)
        elif per_tile.shape[axis] != size:
            per_tile = per_tile.repeat_interleave(TILE, axis).narrow(axis, 0, size)
    return per_tile
