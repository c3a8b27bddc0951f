"""The `native` backend: Triton quantisers and cuBLAS's block-scaled GEMM, on Hopper (compute capability 9.0).

The GEMM is `torch.nn.functional.scaled_mm` with FP32 accumulation (fast accumulation off). What it asks for:

    operands     both E4M3, contiguous along the contraction (NT): dgrad reads W stored transposed, wgrad reads X and dY
                 stored transposed; the quantisers write them so
    recipes      1x128 tiles by 128x128 blocks (fprop, dgrad) and tiles by tiles (wgrad); not blocks by blocks
    scales       the factors that multiply back, stored contraction tile by contraction tile: [ceil(C/128), R] for
                 tiles; [ceil(R/128), L] for blocks, L = ceil(C/128) rounded up to a multiple of 4, or cuBLAS reads
                 beyond the end
    dimensions   multiples of 16 along the contraction and in B; M 17 and M 1 are refused as well

So every dimension is padded to a multiple of 16, at one place each: `operand` here for matrices already quantised, and
the quantisers' `pad_to`. Padding is code 0 with scale_inv 1; it adds exact zeros to sums, and its rows and columns
are cut off the result. A counter's `padding_flops` tells what it costs: nothing for tokens in multiples of 16 and the dimensions of
common models (SmolLM2's 576 and 192 included), up to 15/16 of the work for a single token.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8ctl.fp8 import kernels
from fp8ctl.fp8.counter import Direction
from fp8ctl.fp8.formats import E4M3, Fp8Format, ScaleKind
from fp8ctl.fp8.gemms import GemmSize, Operand
from fp8ctl.fp8.reference import Quantized

PAD_TO = 16
_SCALES_PAD_TO = 4


def gemm_nt(a_MK: Quantized, b_NK: Quantized, out_dtype: torch.dtype, bias_N: Tensor | None = None) -> Tensor:
    """`reference.gemm_nt` for E4M3 matrices; `a` by tiles, `b` by tiles or blocks.

    Raises:
        ValueError: `a` is quantised by blocks.
    """
    size = GemmSize(a_MK.codes.shape[0], b_NK.codes.shape[0], a_MK.codes.shape[1])
    if a_MK.scale_inv.shape[0] != size.m:
        raise ValueError("the first matrix must be quantised by tiles")
    # With one row, tiles and blocks are the same thing, and cuBLAS's layout for blocks does
    b_is_tiled = b_NK.scale_inv.shape[0] == size.n > 1
    direction: Direction = "wgrad" if b_is_tiled else "fprop"
    return NATIVE.gemm(direction, operand(a_MK), operand(b_NK, is_block=not b_is_tiled), size, out_dtype, bias_N)


def operand(q: Quantized, *, is_block: bool = False) -> Operand:
    """Codes and scales as cuBLAS takes them: padded, contiguous, scales in its layout. Copies only what has to change."""
    codes, scale_inv = q
    rows, columns = codes.shape
    padded_rows, padded_columns = pad(rows), pad(columns)
    if (padded_rows, padded_columns) != (rows, columns):
        padding = (0, padded_columns - columns, 0, padded_rows - rows)
        codes = torch.nn.functional.pad(codes.view(torch.uint8), padding).view(codes.dtype)
    if is_block:
        missing = -scale_inv.shape[1] % _SCALES_PAD_TO
        scale_inv = torch.nn.functional.pad(scale_inv, (0, missing), value=1.0) if missing else scale_inv
        return codes.contiguous(), scale_inv.contiguous()
    scale_inv = scale_inv.t()
    if scale_inv.shape[1] != padded_rows:
        scale_inv = torch.nn.functional.pad(scale_inv, (0, padded_rows - scale_inv.shape[1]), value=1.0)
    return codes.contiguous(), scale_inv.contiguous()


def pad(size: int) -> int:
    """The size a GEMM runs with."""
    return -(-size // PAD_TO) * PAD_TO


@dataclass
class _LastInput:
    """The matrix quantised last and what came out: q, k and v share an input, gate and up share another."""

    source: Any = None
    key: tuple[object, ...] = ()
    result: tuple[Operand | None, Operand | None] = (None, None)


class NativeGemms:
    """The operations of `gemms.Fp8Gemms` on Hopper."""

    keeps_quantized_input = True

    def __init__(self) -> None:
        self._last = _LastInput()

    def quantize(
        self, x_MK: Tensor, fmt: Fp8Format, scale: ScaleKind, *, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        """See `Fp8Gemms`. The very same tensor again, unchanged since, is not quantised again while it lives."""
        if x_MK.is_inference():  # such a tensor does not tell whether it was changed
            return self._quantize(x_MK, fmt, scale, rows, columns)
        key = (x_MK._version, x_MK.data_ptr(), fmt.name, scale, rows, columns)
        last = self._last
        if last.source is not None and last.source() is x_MK and last.key == key:
            return last.result
        result = self._quantize(x_MK, fmt, scale, rows, columns)
        # Dies with its source: what backward needs is kept by the layers that need it
        self._last = _LastInput(weakref.ref(x_MK, self._forget), key, result)
        return result

    def quantize_weight(self, w_NK: Tensor, scale: ScaleKind, *, transposed: bool) -> Operand:
        """See `Fp8Gemms`."""
        q = kernels.quantize_block(w_NK.contiguous(), E4M3, scale, transposed=transposed, pad_to=PAD_TO)
        return operand(q, is_block=True)

    def gemm(
        self,
        direction: Direction,
        a: Operand,
        b: Operand,
        size: GemmSize,
        out_dtype: torch.dtype,
        bias_N: Tensor | None,
    ) -> Tensor:
        """See `Fp8Gemms`."""
        from torch.nn.functional import ScalingType, scaled_mm

        (a_codes, a_scale_inv), (b_codes, b_scale_inv) = a, b
        if 0 in size:
            d_MN = a_codes.new_zeros(size.m, size.n, dtype=out_dtype)
            return d_MN if bias_N is None else d_MN + bias_N.to(out_dtype)
        # cuBLAS adds no bias to an FP32 result
        fuses_bias = bias_N is not None and out_dtype != torch.float32
        d_MN = scaled_mm(
            a_codes,
            b_codes.t(),
            a_scale_inv.t(),
            ScalingType.BlockWise1x128,
            b_scale_inv.t(),
            ScalingType.BlockWise1x128 if direction == "wgrad" else ScalingType.BlockWise128x128,
            bias=_padded_bias(bias_N, size.n, out_dtype) if fuses_bias and bias_N is not None else None,
            output_dtype=out_dtype,
            use_fast_accum=False,
        )
        if d_MN.shape != (size.m, size.n):
            d_MN = d_MN[: size.m, : size.n].contiguous()
        return d_MN if bias_N is None or fuses_bias else d_MN + bias_N.to(out_dtype)

    def values(self, operand: Operand | None) -> Tensor | None:
        """None: there are codes only."""
        return None

    def padding_flops(self, size: GemmSize) -> int:
        """See `Fp8Gemms`; beside the 2 M N K that are counted."""
        return 2 * (pad(size.m) * pad(size.n) * pad(size.k) - size.m * size.n * size.k)

    def _quantize(
        self, x_MK: Tensor, fmt: Fp8Format, scale: ScaleKind, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        x_MK = x_MK.contiguous()
        if rows and columns:
            along_rows, along_columns = kernels.quantize_tile_both(x_MK, fmt, scale, pad_to=PAD_TO)
            return operand(along_rows), operand(along_columns)
        if rows:
            return operand(kernels.quantize_tile(x_MK, fmt, scale, pad_to=PAD_TO)), None
        return None, operand(kernels.quantize_tile_transposed(x_MK, fmt, scale, pad_to=PAD_TO)) if columns else None

    def _forget(self, source: Any) -> None:
        if self._last.source is source:
            self._last = _LastInput()


NATIVE = NativeGemms()


def _padded_bias(bias_N: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.pad(bias_N.to(dtype), (0, pad(n) - n)) if pad(n) != n else bias_N.to(dtype)


def self_check() -> str | None:
    """Runs the three GEMMs once on the current GPU; None if they are right, else what went wrong."""
    from fp8ctl.fp8 import reference

    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(s, generator=generator) for s in ((80, 576), (192, 576), (80, 192)))
    on_gpu = [t.to("cuda", torch.bfloat16) for t in (x, w, dy)]
    x, w, dy = (t.cpu() for t in on_gpu)
    (x_rows, x_columns), (dy_rows, dy_columns) = (
        NATIVE.quantize(t, E4M3, "pow2", rows=True, columns=True) for t in (on_gpu[0], on_gpu[2])
    )
    w_q = reference.quantize_block(w)
    cases: list[tuple[Direction, Operand | None, Operand | None, Quantized, Quantized]] = [
        ("fprop", x_rows, NATIVE.quantize_weight(on_gpu[1], "pow2", transposed=False), reference.quantize_tile(x), w_q),
        (
            "dgrad",
            dy_rows,
            NATIVE.quantize_weight(on_gpu[1], "pow2", transposed=True),
            reference.quantize_tile(dy),
            w_q.t(),
        ),
        ("wgrad", dy_columns, x_columns, reference.quantize_tile(dy.t()), reference.quantize_tile(x.t())),
    ]
    for direction, a, b, a_wanted, b_wanted in cases:
        assert a is not None and b is not None
        wanted = reference.gemm_nt(a_wanted, b_wanted, torch.float32)
        size = GemmSize(wanted.shape[0], wanted.shape[1], a_wanted.codes.shape[1])
        got = NATIVE.gemm(direction, a, b, size, torch.bfloat16, None).cpu().float()
        error = ((got - wanted).norm() / wanted.norm()).item()
        if not error < 0.01:  # rounding the result to BF16 alone is 0.002
            return f"{direction} is off by {error:.2g}"
    return None
