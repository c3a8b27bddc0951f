"""A linear layer whose three GEMMs run in FP8 or in BF16, switchable between steps, and counted where they run.

    fprop  Y_MN  = X_MK  W_NK^T     X by 1x128 tiles along K,        W by 128x128 blocks
    dgrad  dX_MK = dY_MN W_NK       dY by 1x128 tiles along N,       the same blocks of W, read transposed
    wgrad  dW_NK = dY_MN^T X_MK     dY^T and X^T by 1x128 tiles along the tokens M, each from its high-precision tensor

No tensor is quantised twice over: wgrad does not start from fprop's codes. What executes the FP8 GEMMs is a backend
(`gemms.py`): `reference` emulates them anywhere, `native` runs them on tensor cores. Both see the same bits of operands.
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
from fp8ctl.fp8.formats import E4M3, FORMATS, Fp8Format
from fp8ctl.fp8.gemms import EMULATED, BackendName, Fp8Gemms, GemmSize, Operand, gemms_of
from fp8ctl.fp8.stats import QuantStats, quant_stats

StatsSink = Callable[[str, QuantStats], None]


class Fp8Linear(nn.Linear):
    """nn.Linear with a `precision`. Parameters, their names and the checkpoint are those of nn.Linear.

    `precision` may change between steps; forward captures it, so a backward pass always agrees with its own forward.
    `backend` executes what is FP8. Shapes: x [..., K] -> [..., N], any leading dimensions. Weight and input share one
    dtype, BF16 or FP32; the output has it too.

    `counter` counts each GEMM where it is executed. `stats_sink`, when set, is called with (role, QuantStats) for the
    roles `input`, `weight` (in forward) and `grad_output` (in backward), in BF16 too: there it tells what FP8 would do.
    Under activation checkpointing the roles of forward are reported at each recomputation.

    The weight is quantised anew for each GEMM, unless somebody vouches for it. `weight_is_frozen` promises that it won't
    change (inference), `weight_is_kept` that whoever changes it calls `weight_changed`: its quantised form is then kept
    after the first use. (DeepSpeed writes weights through flat buffers, which the tensor's version does not show.)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        precision: Precision = "fp8",
        recipe: RecipeConfig | None = None,
        backend: BackendName = "reference",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.precision: Precision = precision
        self.recipe = recipe or RecipeConfig()
        self.backend: BackendName = backend
        self.counter = GemmCounter()
        self.stats_sink: StatsSink | None = None
        self.weight_is_frozen = False
        self.weight_is_kept = False
        self._quantized_weights: dict[tuple[object, ...], Operand] = {}

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, precision: Precision, recipe: RecipeConfig, backend: BackendName = "reference"
    ) -> Fp8Linear:
        """The same layer with the very same parameter objects."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            precision=precision,
            recipe=recipe,
            backend=backend,
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
        # A matrix is handed on as it is: the native backend knows an input that it has just quantised by its identity
        x_MK = input if input.dim() == 2 else input.reshape(-1, self.in_features)
        y_MN = _Gemms.apply(x_MK, self.weight, self.bias, self, is_training)
        return y_MN.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What nn.Linear prints, and the precision."""
        return f"{super().extra_repr()}, precision={self.precision}"

    def quantized_weight(self, *, transposed: bool = False) -> Operand:
        """The weight as fprop multiplies it, or as dgrad does (`transposed`); kept if somebody vouches for the weight."""
        return self._quantized_weight(self.weight, self.backend, self.recipe, transposed)

    def weight_changed(self) -> None:
        """Forgets the quantised weight."""
        self._quantized_weights.clear()

    def _quantized_weight(self, w_NK: Tensor, backend: BackendName, recipe: RecipeConfig, transposed: bool) -> Operand:
        if not (self.weight_is_frozen or self.weight_is_kept):
            self._quantized_weights.clear()
            return gemms_of(backend).quantize_weight(w_NK.detach(), recipe.scale, transposed=transposed)
        # The last two catch what PyTorch itself can see, should the promise be broken
        version = None if w_NK.is_inference() else w_NK._version
        key = (backend, recipe.scale, transposed, version, w_NK.data_ptr())
        if key not in self._quantized_weights:
            for old in [k for k in self._quantized_weights if k[2] == transposed]:
                del self._quantized_weights[old]
            self._quantized_weights[key] = gemms_of(backend).quantize_weight(
                w_NK.detach(), recipe.scale, transposed=transposed
            )
        return self._quantized_weights[key]


class _Gemms(torch.autograd.Function):
    """fprop in forward, dgrad and wgrad in backward."""

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, layer: Fp8Linear, is_training: bool
    ) -> Tensor:
        ctx.layer, ctx.precision, ctx.recipe, ctx.backend = layer, layer.precision, layer.recipe, layer.backend
        ctx.x_dtype = x_MK.dtype
        size = GemmSize(x_MK.shape[0], w_NK.shape[0], x_MK.shape[1])
        kept: Operand = (x_MK,) if is_training else ()
        a: Operand | None = (x_MK,)
        b: Operand = (w_NK,)
        gemms: Fp8Gemms = EMULATED
        if layer.precision == "fp8":
            gemms, scale = gemms_of(layer.backend), layer.recipe.scale
            keeps_columns = is_training and gemms.keeps_quantized_input and layer.recipe.wgrad == "fp8"
            a, x_columns = gemms.quantize(x_MK, E4M3, scale, rows=True, columns=keeps_columns)
            b = layer._quantized_weight(w_NK, layer.backend, layer.recipe, transposed=False)
            kept = x_columns if x_columns is not None else kept
        y_MN = _gemm(layer, gemms, "fprop", layer.precision, a, b, size, x_MK.dtype, bias_N)
        # The parameter itself is saved, never a copy: under ZeRO-3 its data is freed after forward and gathered again
        # in place for backward, and only the parameter sees that
        ctx.save_for_backward(w_NK, *kept)
        _report(layer, "input", x_MK, "rows", E4M3, gemms.values(a))
        _report(layer, "weight", w_NK, "block", E4M3, gemms.values(b))
        return y_MN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        w_NK, *kept = ctx.saved_tensors
        layer, recipe = ctx.layer, ctx.recipe
        grad_format = FORMATS[recipe.grad_format]
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        (m, n), k = dy_MN.shape, w_NK.shape[1]
        wgrad: Precision = "fp8" if ctx.precision == "fp8" and recipe.wgrad == "fp8" else "bf16"
        gemms = gemms_of(ctx.backend) if ctx.precision == "fp8" else EMULATED
        dy_rows: Operand | None = (dy_MN,)
        dy_columns: Operand | None = (dy_MN.t(),)
        if ctx.precision == "fp8":
            dy_rows, quantized_columns = gemms.quantize(
                dy_MN, grad_format, recipe.scale, rows=needs_dx, columns=needs_dw and wgrad == "fp8"
            )
            dy_columns = quantized_columns or dy_columns
        dx_MK = dw_NK = db_N = None
        if needs_dx:
            b: Operand = (w_NK.t(),)
            if ctx.precision == "fp8":
                b = layer._quantized_weight(w_NK, ctx.backend, recipe, transposed=True)
            dx_MK = _gemm(layer, gemms, "dgrad", ctx.precision, dy_rows, b, GemmSize(m, k, n), ctx.x_dtype)
        _report(layer, "grad_output", dy_MN, "rows", grad_format, gemms.values(dy_rows))
        if needs_dw:
            x_columns: Operand | None = tuple(kept)
            if wgrad == "bf16":
                gemms, x_columns = EMULATED, (kept[0].t(),)
            elif not gemms.keeps_quantized_input:
                _, x_columns = gemms.quantize(kept[0], E4M3, recipe.scale, rows=False, columns=True)
            dw_NK = _gemm(layer, gemms, "wgrad", wgrad, dy_columns, x_columns, GemmSize(n, k, m), w_NK.dtype)
        if needs_db:
            db_N = dy_MN.sum(0)
        return dx_MK, dw_NK, db_N, None, None


def _gemm(
    layer: Fp8Linear,
    gemms: Fp8Gemms,
    direction: Direction,
    precision: Precision,
    a: Operand | None,
    b: Operand | None,
    size: GemmSize,
    out_dtype: torch.dtype,
    bias_N: Tensor | None = None,
) -> Tensor:
    """The one place where a GEMM of a linear layer is executed and counted."""
    assert a is not None and b is not None
    d_MN = gemms.gemm(direction, a, b, size, out_dtype, bias_N)
    layer.counter.add(direction, precision, m=size.m, n=size.n, k=size.k)
    layer.counter.padding_flops += gemms.padding_flops(size)
    return d_MN


def _report(layer: Fp8Linear, role: str, x_RC: Tensor, along: Along, fmt: Fp8Format, values_RC: Tensor | None) -> None:
    """Hands statistics to the sink, if there is one. `values` is x itself where the GEMM takes it unrounded, and None
    where the backend has no tensor of them.
    """
    if layer.stats_sink is None:
        return
    scale_kind = layer.recipe.scale
    if values_RC is None or values_RC is x_RC:
        values_RC = quantize_dequantize(x_RC, along, fmt, scale_kind)
    layer.stats_sink(role, quant_stats(x_RC, values_RC, along, fmt, scale_kind))
