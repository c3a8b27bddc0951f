"""What a linear layer asks of a backend, and the backend that runs anywhere.

A backend quantises and multiplies; `Fp8Linear` decides what is multiplied when, keeps what backward needs and counts.
An operand is a tuple of tensors that only its backend looks into; as a matrix it is [R, C] with the contraction along C,
so that every GEMM reads D = A B^T.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fp8ctl.fp8.counter import Direction
from fp8ctl.fp8.emulate import quantize_dequantize
from fp8ctl.fp8.formats import E4M3, Fp8Format, ScaleKind

BackendName = Literal["reference", "native"]
Operand = tuple[Tensor, ...]


class GemmSize(NamedTuple):
    """D [m, n], contracted over k."""

    m: int
    n: int
    k: int


class Fp8Gemms(Protocol):
    """The operations of a backend. Both backends quantise to the same bits."""

    keeps_quantized_input: bool
    """Whether wgrad's quantised input is made in forward and kept (a byte a value), instead of the input itself."""

    def quantize(
        self, x_MK: Tensor, fmt: Fp8Format, scale: ScaleKind, *, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        """x [M, K] by tiles along K and x^T [K, M] by tiles along M, each if it is asked for."""
        ...

    def quantize_weight(self, w_NK: Tensor, scale: ScaleKind, *, transposed: bool) -> Operand:
        """W [N, K] by blocks in E4M3, or transposed the same blocks as [K, N]."""
        ...

    def gemm(
        self,
        direction: Direction,
        a: Operand,
        b: Operand,
        size: GemmSize,
        out_dtype: torch.dtype,
        bias_N: Tensor | None,
    ) -> Tensor:
        """A B^T (+ bias), accumulated in FP32, rounded to out_dtype. wgrad multiplies tiles by tiles, else b is a weight."""
        ...

    def values(self, operand: Operand | None) -> Tensor | None:
        """The values of an operand in high precision, if they lie there anyway."""
        ...

    def padding_flops(self, size: GemmSize) -> int:
        """FLOPs that a GEMM of this size spends on padding."""
        ...


class EmulatedGemms:
    """The `reference` backend: operands make the round trip through FP8, an ordinary GEMM multiplies them.

    Its GEMM takes any matrices of one dtype: it also runs what is not FP8.
    """

    keeps_quantized_input = False

    def quantize(
        self, x_MK: Tensor, fmt: Fp8Format, scale: ScaleKind, *, rows: bool, columns: bool
    ) -> tuple[Operand | None, Operand | None]:
        """See `Fp8Gemms`."""
        along_rows = (quantize_dequantize(x_MK, "rows", fmt, scale),) if rows else None
        along_columns = (quantize_dequantize(x_MK, "columns", fmt, scale).t(),) if columns else None
        return along_rows, along_columns

    def quantize_weight(self, w_NK: Tensor, scale: ScaleKind, *, transposed: bool) -> Operand:
        """See `Fp8Gemms`."""
        values_NK = quantize_dequantize(w_NK, "block", E4M3, scale)
        return (values_NK.t() if transposed else values_NK,)

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
        (a_MK,), (b_NK,) = a, b
        if bias_N is None:
            return torch.mm(a_MK, b_NK.t()).to(out_dtype)
        # FP32 scales give FP32 operands beside a BF16 bias
        return torch.addmm(bias_N.to(a_MK.dtype), a_MK, b_NK.t()).to(out_dtype)

    def values(self, operand: Operand | None) -> Tensor | None:
        """See `Fp8Gemms`."""
        return operand[0] if operand is not None else None

    def padding_flops(self, size: GemmSize) -> int:
        """None: any size runs as it is."""
        return 0


EMULATED = EmulatedGemms()


def gemms_of(backend: BackendName) -> Fp8Gemms:
    """The backend's operations. `native` needs Triton, which is imported here and nowhere earlier."""
    if backend == "reference":
        return EMULATED
    from fp8ctl.fp8.native import NATIVE

    return NATIVE
