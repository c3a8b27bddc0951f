"""The `native` backend: Triton quantisers, and FP8 GEMMs on tensor cores by cuBLAS or by a Triton kernel.

cuBLAS comes through `torch.nn.functional.scaled_mm`. What it asks for:

    operands     contiguous along the contraction (NT): dgrad reads W stored transposed, wgrad reads X and dY stored
                 transposed; the quantisers write them so
    block        both E4M3, 1x128 tiles by 128x128 blocks or tiles by tiles, not blocks by blocks; Hopper only. Scales are the
                 factors that multiply back, stored contraction tile by contraction tile: [ceil(C/128), R] for tiles;
                 [ceil(R/128), L] for blocks, L = ceil(C/128) rounded up to a multiple of 4, or cuBLAS reads beyond the end
    row, tensor  E4M3 or one of the two E5M2; [R, 1] and one scale
    dimensions   multiples of 16 along the contraction and in B; M 17 and M 1 are refused as well

So every dimension is padded to a multiple of 16 by the quantisers (`pad_to`). Padding is code 0 with scale_inv 1; it adds
exact zeros to sums, and its rows and columns are cut off the result. A counter's `padding_flops` tells what it costs: nothing
for tokens in multiples of 16 and the dimensions of common models (SmolLM2's 576 and 192 included), up to 15/16 of the work
for a single token.

Accumulation: by block in FP32 proper (fast accumulation off). By row and by tensor with the tensor cores' fast accumulation,
whose sums have some 14 bits: that is what makes these recipes fast; their error bound is wider (tests).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.fp8 import kernels
from fp8ctl.fp8.counter import Direction, Precision
from fp8ctl.fp8.formats import E4M3, FORMATS, Fp8Format
from fp8ctl.fp8.gemms import GemmKernel, GemmSize, Operand, blocks_stay_apart, place
from fp8ctl.fp8.reference import Quantized

PAD_TO = 16
_SCALES_PAD_TO = 4


class NativeGemms:
    """The operations of `gemms.Gemms`; operands are (codes [R, C], scale_inv as `reference.Quantized` has it), padded."""

    precision: Precision = "fp8"
    keeps_quantized_input = True

    def __init__(self, kernel: GemmKernel) -> None:
        self.kernel: GemmKernel = kernel

    def joins(self, weights: Sequence[Tensor], recipe: RecipeConfig) -> bool:
        """Wherever it changes no bit of the recipe."""
        return len(weights) > 1 and (recipe.granularity != "block" or blocks_stay_apart(weights))

    def input(
        self, x_MK: Tensor, recipe: RecipeConfig, *, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        """See `Gemms`."""
        x_MK = x_MK.contiguous()
        if recipe.wgrad != "x_block" or not columns:
            return self._both([x_MK], 0, E4M3, recipe, rows, columns)
        along_rows = kernels.quantize_tile(x_MK, E4M3, recipe.scale, pad_to=PAD_TO) if rows else None
        return along_rows, kernels.quantize_block(x_MK, E4M3, recipe.scale, transposed=True, pad_to=PAD_TO)

    def gradients(
        self, dys: Sequence[Tensor], recipe: RecipeConfig, *, rows: bool, columns: bool, join: bool
    ) -> tuple[list[Operand], list[Operand]]:
        """See `Gemms`."""
        fmt = FORMATS[recipe.grad_format]
        contiguous = [dy.contiguous() for dy in dys]
        groups = [contiguous] if join else [[dy] for dy in contiguous]
        pairs = [self._both(group, 1, fmt, recipe, rows, columns) for group in groups]
        return [r for r, _ in pairs if r is not None], [c for _, c in pairs if c is not None]

    def weights(
        self, weights: Sequence[Tensor], recipe: RecipeConfig, *, transposed: bool, join: bool
    ) -> list[Operand]:
        """See `Gemms`."""
        contiguous = [w.contiguous() for w in weights]
        groups = [contiguous] if join else [[w] for w in contiguous]
        if recipe.granularity == "block":
            return [
                kernels.quantize_block(group, E4M3, recipe.scale, transposed=transposed, pad_to=PAD_TO)
                for group in groups
            ]
        pairs = [self._both(group, 0, E4M3, recipe, not transposed, transposed) for group in groups]
        return [q for pair in pairs for q in pair if q is not None]

    def gemm(
        self,
        direction: Direction,
        recipe: RecipeConfig,
        a: Operand,
        b: Operand,
        size: GemmSize,
        out_dtype: torch.dtype,
        *,
        bias_N: Tensor | None = None,
        add_to: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Gemms`."""
        qa, qb = Quantized(*a), Quantized(*b)
        b_is_block = recipe.granularity == "block" and (direction != "wgrad" or recipe.wgrad == "x_block")
        if 0 in size:
            d_MN = qa.codes.new_zeros(size.m, size.n, dtype=out_dtype)
            return place(d_MN if bias_N is None else d_MN + bias_N.to(out_dtype), add_to, out)
        if bias_N is not None and bias_N.shape[0] != qb.codes.shape[0]:
            bias_N = torch.nn.functional.pad(bias_N, (0, qb.codes.shape[0] - bias_N.shape[0]))
        if self.kernel == "triton" and recipe.granularity == "block":
            from fp8ctl.fp8.block_gemm import block_gemm

            d_MN = block_gemm(qa, qb, out_dtype, bias_N)
        else:
            d_MN = _scaled_mm(qa, qb, recipe.granularity, b_is_block, out_dtype, bias_N)
        if d_MN.shape != (size.m, size.n):
            d_MN = d_MN[: size.m, : size.n].contiguous()
        return place(d_MN, add_to, out)

    def values(self, operand: Operand | None) -> Tensor | None:
        """None: there are codes only."""
        return None

    def padding_flops(self, size: GemmSize) -> int:
        """See `Gemms`; beside the 2 M N K that are counted."""
        return 2 * (pad(size.m) * pad(size.n) * pad(size.k) - size.m * size.n * size.k)

    def _both(
        self, parts: Sequence[Tensor], axis: int, fmt: Fp8Format, recipe: RecipeConfig, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        """A matrix that lies in parts along an axis, by tiles, by row or by tensor."""
        if recipe.granularity == "row":
            return kernels.quantize_row(parts, fmt, recipe.scale, rows=rows, columns=columns, axis=axis, pad_to=PAD_TO)
        if recipe.granularity == "tensor":
            return kernels.quantize_tensor(
                parts, fmt, recipe.scale, rows=rows, columns=columns, axis=axis, pad_to=PAD_TO
            )
        if rows and columns:
            return kernels.quantize_tile_both(parts, fmt, recipe.scale, pad_to=PAD_TO)
        x_MK = parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)
        if rows:
            return kernels.quantize_tile(x_MK, fmt, recipe.scale, pad_to=PAD_TO), None
        return None, kernels.quantize_tile_transposed(x_MK, fmt, recipe.scale, pad_to=PAD_TO) if columns else None


NATIVE: dict[GemmKernel, NativeGemms] = {"cublas": NativeGemms("cublas"), "triton": NativeGemms("triton")}


def gemm_nt(
    a_MK: Quantized,
    b_NK: Quantized,
    out_dtype: torch.dtype,
    bias_N: Tensor | None = None,
    *,
    kernel: GemmKernel = "cublas",
) -> Tensor:
    """`reference.gemm_nt`; `a` by tiles, `b` by tiles or blocks, any sizes.

    Raises:
        ValueError: `a` is quantised by blocks.
    """
    size = GemmSize(a_MK.codes.shape[0], b_NK.codes.shape[0], a_MK.codes.shape[1])
    if a_MK.scale_inv.shape[0] != size.m:
        raise ValueError("the first matrix must be quantised by tiles")
    # With one row, tiles and blocks are the same thing, and cuBLAS's layout for blocks does
    b_is_tiled = b_NK.scale_inv.shape[0] == size.n > 1
    direction: Direction = "wgrad" if b_is_tiled else "fprop"
    a, b = _padded(a_MK, is_block=False), _padded(b_NK, is_block=not b_is_tiled)
    return NATIVE[kernel].gemm(direction, RecipeConfig(), a, b, size, out_dtype, bias_N=bias_N)


def pad(size: int) -> int:
    """The size a GEMM runs with."""
    return -(-size // PAD_TO) * PAD_TO


def _scaled_mm(
    a: Quantized, b: Quantized, granularity: str, b_is_block: bool, out_dtype: torch.dtype, bias_N: Tensor | None
) -> Tensor:
    """cuBLAS's GEMM for the granularity."""
    from torch.nn.functional import ScalingType, scaled_mm

    if granularity == "block":
        scale_a, scale_b = a.scale_inv, _whole_rows(b.scale_inv) if b_is_block else b.scale_inv
        kinds = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128 if b_is_block else ScalingType.BlockWise1x128)
    elif granularity == "row":
        scale_a, scale_b, kinds = a.scale_inv, b.scale_inv.t(), (ScalingType.RowWise, ScalingType.RowWise)
    else:
        scale_a, scale_b, kinds = a.scale_inv, b.scale_inv, (ScalingType.TensorWise, ScalingType.TensorWise)
    # cuBLAS adds no bias to an FP32 result
    fuses_bias = bias_N is not None and out_dtype != torch.float32
    d_MN = scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a,
        kinds[0],
        scale_b,
        kinds[1],
        bias=bias_N.to(out_dtype) if fuses_bias and bias_N is not None else None,
        output_dtype=out_dtype,
        use_fast_accum=granularity != "block",
    )
    return d_MN if bias_N is None or fuses_bias else d_MN + bias_N.to(out_dtype)


def _whole_rows(scale_inv: Tensor) -> Tensor:
    """Scales of blocks as cuBLAS reads them: [L, Nb], the padding that lies behind each row in memory included."""
    rows, columns = scale_inv.shape
    padded = -(-columns // _SCALES_PAD_TO) * _SCALES_PAD_TO
    if scale_inv.stride() != (padded, 1):
        scale_inv = torch.nn.functional.pad(scale_inv, (0, padded - columns), value=1.0)
    return scale_inv.as_strided((padded, rows), (1, padded))


def _padded(q: Quantized, *, is_block: bool) -> Operand:
    """A matrix quantised elsewhere as the GEMMs take it."""
    codes, scale_inv = q
    rows, columns = codes.shape
    padding = (0, pad(columns) - columns, 0, pad(rows) - rows)
    codes = torch.nn.functional.pad(codes.view(torch.uint8), padding).view(codes.dtype).contiguous()
    if not is_block:
        scale_inv = torch.nn.functional.pad(scale_inv.t(), (0, pad(rows) - rows), value=1.0).contiguous().t()
    return codes, scale_inv


def self_check(kernel: GemmKernel, granularity: str) -> str | None:
    """Runs the three GEMMs of a layer once on the current GPU; None if they are right, else what went wrong."""
    from fp8ctl.fp8.gemms import EMULATED

    recipe = RecipeConfig.model_validate(
        {"granularity": granularity, "scale": "pow2" if granularity == "block" else "fp32"}
    )
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (
        torch.randn(s, generator=generator).to("cuda", torch.bfloat16) for s in ((80, 576), (192, 576), (80, 192))
    )
    results = []
    for gemms in (NATIVE[kernel], EMULATED):
        x_rows, x_columns = gemms.input(x, recipe, rows=True, columns=True)
        (dy_rows,), (dy_columns,) = gemms.gradients([dy], recipe, rows=True, columns=True, join=False)
        (w_rows,) = gemms.weights([w], recipe, transposed=False, join=False)
        (w_columns,) = gemms.weights([w], recipe, transposed=True, join=False)
        assert x_rows is not None and x_columns is not None
        cases: list[tuple[Direction, Operand, Operand, GemmSize]] = [
            ("fprop", x_rows, w_rows, GemmSize(80, 192, 576)),
            ("dgrad", dy_rows, w_columns, GemmSize(80, 576, 192)),
            ("wgrad", dy_columns, x_columns, GemmSize(192, 576, 80)),
        ]
        results.append([(d, gemms.gemm(d, recipe, a, b, size, torch.bfloat16).float()) for d, a, b, size in cases])
    for (direction, got), (_, wanted) in zip(*results, strict=True):
        error = ((got - wanted).norm() / wanted.norm()).item()
        if not error < 0.01:  # rounding the result to BF16 alone is 0.002, fast accumulation somewhat more
            return f"{direction} is off by {error:.2g}"
    return None
