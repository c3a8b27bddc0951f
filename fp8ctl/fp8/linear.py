"""A linear layer whose three GEMMs run in FP8 or in BF16, switchable between steps, and counted where they run.

    fprop  Y_MN  = X_MK  W_NK^T     X by 1x128 tiles along K,        W by 128x128 blocks
    dgrad  dX_MK = dY_MN W_NK       dY by 1x128 tiles along N,       the same blocks of W, read transposed
    wgrad  dW_NK = dY_MN^T X_MK     dY^T and X^T by 1x128 tiles along the tokens M, each from its high-precision tensor

No tensor is quantised twice over: wgrad does not start from fprop's codes. FP8 is emulated: operands make the round
trip through FP8 (`emulate.py`, equal to the reference) and an ordinary GEMM multiplies them. With pow2 scales the
values are exact in BF16, so a BF16 GEMM with FP32 accumulation gives what an FP8 GEMM with FP32 accumulation would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.fp8.counter import Direction, GemmCounter, Precision
from fp8ctl.fp8.emulate import Along, quantize_dequantize
from fp8ctl.fp8.formats import E4M3, FORMATS, Fp8Format, ScaleKind
from fp8ctl.fp8.stats import QuantStats, quant_stats

StatsSink = Callable[[str, QuantStats], None]


class Fp8Linear(nn.Linear):
    """nn.Linear with a `precision`. Parameters, their names and the checkpoint are those of nn.Linear.

    `precision` may change between steps; forward captures it, so a backward pass always agrees with its own forward.
    Shapes: x [..., K] -> [..., N], any leading dimensions. Weight and input share one dtype, BF16 or FP32; the output
    has it too.

    `counter` counts each GEMM where it is executed. `stats_sink`, when set, is called with (role, QuantStats) for the
    roles `input`, `weight` (in forward) and `grad_output` (in backward), in BF16 too: there it tells what FP8 would do.
    Under activation checkpointing the roles of forward are reported at each recomputation.

    `weight_is_frozen` promises that the weight won't change (inference): its quantised form is then kept after the
    first use.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        precision: Precision = "fp8",
        recipe: RecipeConfig | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.precision: Precision = precision
        self.recipe = recipe or RecipeConfig()
        self.counter = GemmCounter()
        self.stats_sink: StatsSink | None = None
        self.weight_is_frozen = False
        self._frozen_weight: tuple[ScaleKind, Tensor] | None = None

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, precision: Precision, recipe: RecipeConfig) -> Fp8Linear:
        """The same layer with the very same parameter objects."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            precision=precision,
            recipe=recipe,
            device="meta",
            dtype=linear.weight.dtype,
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> y [..., N]."""
        is_training = torch.is_grad_enabled() and self.weight.requires_grad
        assert not (self.weight_is_frozen and is_training), (
            "a frozen weight can't be trained: its FP8 form would go stale"
        )
        y_MN = _Gemms.apply(input.reshape(-1, self.in_features), self.weight, self.bias, self)
        return y_MN.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What nn.Linear prints, and the precision."""
        return f"{super().extra_repr()}, precision={self.precision}"

    def quantized_weight(self) -> Tensor:
        """The weight after its round trip through FP8, [N, K]; kept if the weight is frozen."""
        scale_kind = self.recipe.scale
        if self.weight_is_frozen and self._frozen_weight is not None and self._frozen_weight[0] == scale_kind:
            return self._frozen_weight[1]
        w_NK = quantize_dequantize(self.weight.detach(), "block", E4M3, scale_kind)
        self._frozen_weight = (scale_kind, w_NK) if self.weight_is_frozen else None
        return w_NK


class _Gemms(torch.autograd.Function):
    """fprop in forward, dgrad and wgrad in backward."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, layer: Fp8Linear) -> Tensor:
        # The parameter itself is saved, never a copy: under ZeRO-3 its data is freed after forward and gathered again
        # in place for backward, and only the parameter sees that
        ctx.save_for_backward(x_MK, w_NK)
        ctx.layer, ctx.precision, ctx.recipe = layer, layer.precision, layer.recipe
        a_MK, b_NK = x_MK, w_NK
        if layer.precision == "fp8":
            a_MK, b_NK = quantize_dequantize(x_MK, "rows", E4M3, layer.recipe.scale), layer.quantized_weight()
        _report(layer, "input", x_MK, a_MK, "rows", E4M3)
        _report(layer, "weight", w_NK, b_NK, "block", E4M3)
        return _gemm(layer.counter, "fprop", layer.precision, a_MK, b_NK.t(), x_MK.dtype, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_MK, w_NK = ctx.saved_tensors
        layer, recipe = ctx.layer, ctx.recipe
        grad_format = FORMATS[recipe.grad_format]
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        dx_MK = dw_NK = db_N = None
        a_MN = dy_MN
        if needs_dx:
            b_NK = w_NK
            if ctx.precision == "fp8":
                a_MN = quantize_dequantize(dy_MN, "rows", grad_format, recipe.scale)
                b_NK = quantize_dequantize(w_NK, "block", E4M3, recipe.scale)
            dx_MK = _gemm(layer.counter, "dgrad", ctx.precision, a_MN, b_NK, x_MK.dtype)
        _report(layer, "grad_output", dy_MN, a_MN, "rows", grad_format)
        if needs_dw:
            precision: Precision = "fp8" if ctx.precision == "fp8" and recipe.wgrad == "fp8" else "bf16"
            a_MN, b_MK = dy_MN, x_MK
            if precision == "fp8":
                a_MN = quantize_dequantize(dy_MN, "columns", grad_format, recipe.scale)
                b_MK = quantize_dequantize(x_MK, "columns", E4M3, recipe.scale)
            dw_NK = _gemm(layer.counter, "wgrad", precision, a_MN.t(), b_MK, w_NK.dtype)
        if needs_db:
            db_N = dy_MN.sum(0)
        return dx_MK, dw_NK, db_N, None


def _gemm(
    counter: GemmCounter,
    direction: Direction,
    precision: Precision,
    a_MK: Tensor,
    b_KN: Tensor,
    out_dtype: torch.dtype,
    bias_N: Tensor | None = None,
) -> Tensor:
    """The one place where a GEMM of a linear layer is executed and counted; accumulates in FP32, rounds once."""
    if bias_N is None:
        d_MN = torch.mm(a_MK, b_KN)
    else:
        # FP32 scales give FP32 operands beside a BF16 bias
        d_MN = torch.addmm(bias_N.to(a_MK.dtype), a_MK, b_KN)
    counter.add(direction, precision, m=a_MK.shape[0], n=b_KN.shape[1], k=a_MK.shape[1])
    return d_MN.to(out_dtype)


def _report(layer: Fp8Linear, role: str, x_RC: Tensor, values_RC: Tensor, along: Along, fmt: Fp8Format) -> None:
    """Hands statistics to the sink, if there is one. `values` is x itself where the GEMM takes it unrounded."""
    if layer.stats_sink is None:
        return
    scale_kind = layer.recipe.scale
    if values_RC is x_RC:
        values_RC = quantize_dequantize(x_RC, along, fmt, scale_kind)
    layer.stats_sink(role, quant_stats(x_RC, values_RC, along, fmt, scale_kind))
