"""What a linear layer asks of the thing that multiplies, and the two that run anywhere: plain GEMMs and emulated FP8.

It quantises and multiplies; `calls.py` decides what is multiplied when, keeps what backward needs and counts. An operand
is a tuple of tensors that only its own gemms look into; as a matrix it is [R, C] with the contraction along C, so that
every GEMM reads D = A B^T:

    fprop  A = X [M, K]      B = W [N, K]        D = Y
    dgrad  A = dY [M, N]     B = W^T [K, N]      D = dX
    wgrad  A = dY^T [N, M]   B = X^T [K, M]      D = dW

Linears that share an input (q, k, v; gate, up) may be *joined*: their weights, and their output gradients, are one
matrix along N. By block that changes no bit as long as no 128x128 block holds rows of two weights; by row and by tensor
the joined matrix is what shares scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.fp8.counter import Direction, Precision
from fp8ctl.fp8.emulate import Along, quantize_dequantize
from fp8ctl.fp8.formats import E4M3, FORMATS, TILE, Fp8Format

BackendName = Literal["reference", "native", "te"]
GemmKernel = Literal["cublas", "triton"]
Operand = tuple[Tensor, ...]


class GemmSize(NamedTuple):
    """D [m, n], contracted over k."""

    m: int
    n: int
    k: int


class Gemms(Protocol):
    """The operations. All that are FP8 quantise to the same bits."""

    precision: Precision
    keeps_quantized_input: bool
    """Whether wgrad's quantised input is made in forward and kept (a byte a value), instead of the input itself."""

    def joins(self, weights: Sequence[Tensor], recipe: RecipeConfig) -> bool:
        """Whether linears with these weights run as one matrix."""
        ...

    def input(
        self, x_MK: Tensor, recipe: RecipeConfig, *, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        """X as fprop reads it and X^T as wgrad does, each if it is asked for."""
        ...

    def gradients(
        self, dys: Sequence[Tensor], recipe: RecipeConfig, *, rows: bool, columns: bool, join: bool
    ) -> tuple[list[Operand], list[Operand]]:
        """dY [M, Ni] of each linear as dgrad reads it and dY^T as wgrad does; one operand for all if joined."""
        ...

    def weights(
        self, weights: Sequence[Tensor], recipe: RecipeConfig, *, transposed: bool, join: bool
    ) -> list[Operand]:
        """W [Ni, K] of each linear, or W^T as dgrad reads it; one operand for all if joined."""
        ...

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
        """A B^T (+ bias), accumulated in FP32 and rounded to out_dtype.

        `add_to`: added to that matrix, in place. `out`: written there (a matrix whose rows may lie apart).
        """
        ...

    def values(self, operand: Operand | None) -> Tensor | None:
        """The rounded values of an operand in high precision, if they lie there anyway."""
        ...

    def padding_flops(self, size: GemmSize) -> int:
        """FLOPs that a GEMM of this size spends on padding."""
        ...


class PlainGemms:
    """What is not FP8: operands are the matrices themselves."""

    precision: Precision = "bf16"
    keeps_quantized_input = False

    def joins(self, weights: Sequence[Tensor], recipe: RecipeConfig) -> bool:
        """Never: it would take a copy of the weights."""
        return False

    def input(
        self, x_MK: Tensor, recipe: RecipeConfig, *, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        """See `Gemms`."""
        return (x_MK,) if rows else None, (x_MK.t(),) if columns else None

    def gradients(
        self, dys: Sequence[Tensor], recipe: RecipeConfig, *, rows: bool, columns: bool, join: bool
    ) -> tuple[list[Operand], list[Operand]]:
        """See `Gemms`."""
        return [(dy,) for dy in dys], [(dy.t(),) for dy in dys]

    def weights(
        self, weights: Sequence[Tensor], recipe: RecipeConfig, *, transposed: bool, join: bool
    ) -> list[Operand]:
        """See `Gemms`."""
        return [(w.t() if transposed else w,) for w in weights]

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
        """See `Gemms`; any matrices of one dtype."""
        (a_MK,), (b_NK,) = a, b
        # FP32 scales give FP32 operands beside a BF16 bias, sum or output
        if add_to is not None and add_to.dtype == a_MK.dtype:
            return add_to.addmm_(a_MK, b_NK.t())
        if out is not None and out.dtype == a_MK.dtype and bias_N is None:
            return torch.mm(a_MK, b_NK.t(), out=out)
        if bias_N is None:
            d_MN = torch.mm(a_MK, b_NK.t()).to(out_dtype)
        else:
            d_MN = torch.addmm(bias_N.to(a_MK.dtype), a_MK, b_NK.t()).to(out_dtype)
        return place(d_MN, add_to, out)

    def values(self, operand: Operand | None) -> Tensor | None:
        """None: nothing is rounded."""
        return None

    def padding_flops(self, size: GemmSize) -> int:
        """None: any size runs as it is."""
        return 0


class EmulatedGemms(PlainGemms):
    """The `reference` backend: operands make the round trip through FP8, an ordinary GEMM multiplies them."""

    precision: Precision = "fp8"

    def joins(self, weights: Sequence[Tensor], recipe: RecipeConfig) -> bool:
        """By row and by tensor: there it decides which values share a scale."""
        return len(weights) > 1 and recipe.granularity != "block"

    def input(
        self, x_MK: Tensor, recipe: RecipeConfig, *, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        """See `Gemms`."""
        along_columns: Along = "block" if recipe.wgrad == "x_block" else "columns"
        return (
            (_emulate(x_MK, "rows", E4M3, recipe),) if rows else None,
            (_emulate(x_MK, along_columns, E4M3, recipe).t(),) if columns else None,
        )

    def gradients(
        self, dys: Sequence[Tensor], recipe: RecipeConfig, *, rows: bool, columns: bool, join: bool
    ) -> tuple[list[Operand], list[Operand]]:
        """See `Gemms`."""
        fmt = FORMATS[recipe.grad_format]
        parts = [torch.cat(list(dys), dim=1)] if join else dys
        return (
            [(_emulate(dy, "rows", fmt, recipe),) for dy in parts] if rows else [],
            [(_emulate(dy, "columns", fmt, recipe).t(),) for dy in parts] if columns else [],
        )

    def weights(
        self, weights: Sequence[Tensor], recipe: RecipeConfig, *, transposed: bool, join: bool
    ) -> list[Operand]:
        """See `Gemms`."""
        along: Along = "block"
        if recipe.granularity == "row":
            along = "columns" if transposed else "rows"
        parts = [torch.cat(list(weights))] if join else weights
        values = [_emulate(w, along, E4M3, recipe) for w in parts]
        return [(v.t() if transposed else v,) for v in values]

    def values(self, operand: Operand | None) -> Tensor | None:
        """See `Gemms`."""
        return operand[0] if operand is not None else None


def _emulate(x_RC: Tensor, along: Along, fmt: Fp8Format, recipe: RecipeConfig) -> Tensor:
    return quantize_dequantize(x_RC, along, fmt, recipe.scale, granularity=recipe.granularity)


PLAIN = PlainGemms()
EMULATED = EmulatedGemms()


def place(d_MN: Tensor, add_to: Tensor | None, out: Tensor | None) -> Tensor:
    """What `Gemms.gemm` does with a result that was computed elsewhere."""
    if add_to is not None:
        return add_to.add_(d_MN)
    return d_MN if out is None else out.copy_(d_MN)


def blocks_stay_apart(weights: Sequence[Tensor]) -> bool:
    """Whether no 128x128 block of the joined matrix holds rows of two weights."""
    return all(w.shape[0] % TILE == 0 for w in weights)


def gemms_of(precision: Precision, backend: BackendName, kernel: GemmKernel = "cublas") -> Gemms:
    """The operations of a backend. `native` needs Triton, which is imported here and nowhere earlier."""
    if precision == "bf16":
        return PLAIN
    if backend == "reference":
        return EMULATED
    from fp8ctl.fp8.native import NATIVE

    return NATIVE[kernel]
