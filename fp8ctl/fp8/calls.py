"""One call of linears that share an input: its GEMMs, what is kept for backward, and who counts.

    fprop  Y_MN  = X_MK  W_NK^T     X by 1x128 tiles along K,        W by 128x128 blocks
    dgrad  dX_MK = dY_MN W_NK       dY by 1x128 tiles along N,       the same blocks of W, read transposed
    wgrad  dW_NK = dY_MN^T X_MK     dY^T and X^T by 1x128 tiles along the tokens M, each from its high-precision tensor

(Granularity `block`, the InfiR2 recipe; `row` and `tensor` have coarser scales.) No tensor is quantised twice over: wgrad
does not start from fprop's codes. X is quantised once for all linears of a call.

A call is made anew for each forward pass and remembers what it ran in, so that backward agrees with it whatever is switched
between the two. Weight, input and output share one dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.fp8.counter import Direction
from fp8ctl.fp8.emulate import Along, quantize_dequantize
from fp8ctl.fp8.formats import E4M3, FORMATS, Fp8Format
from fp8ctl.fp8.gemms import PLAIN, Gemms, GemmSize, Operand
from fp8ctl.fp8.stats import quant_stats

if TYPE_CHECKING:
    from fp8ctl.fp8.linear import Fp8Linear

Parameters = Sequence[Tensor | None]
"""Weights [Ni, K] of all linears in order, then their biases (None where there is none)."""


@dataclass(frozen=True)
class LinearCall:
    """What the linears of one call run in. Joined linears (see `gemms.py`) are one part, others a part each."""

    layers: tuple[Fp8Linear, ...]
    gemms: Gemms
    recipe: RecipeConfig
    is_training: bool
    join: bool

    @classmethod
    def of(cls, layers: Sequence[Fp8Linear], *, is_training: bool) -> LinearCall:
        """A call of linears that agree in precision, recipe and backend (`Fp8Linear.agrees_with`)."""
        gemms, recipe = layers[0].gemms, layers[0].recipe
        join = len(layers) > 1 and gemms.joins([layer.weight for layer in layers], recipe)
        return cls(tuple(layers), gemms, recipe, is_training, join)

    @property
    def parts(self) -> tuple[tuple[Fp8Linear, ...], ...]:
        """Linears that run as one matrix."""
        return (self.layers,) if self.join else tuple((layer,) for layer in self.layers)

    @property
    def out_sizes(self) -> list[int]:
        """N of each linear."""
        return [layer.out_features for layer in self.layers]

    @property
    def wgrad_gemms(self) -> Gemms:
        """What multiplies wgrad: the call's own, unless the recipe leaves wgrad in BF16."""
        return PLAIN if self.recipe.wgrad == "bf16" else self.gemms

    @property
    def keeps_input(self) -> bool:
        """Whether backward gets X itself; else X^T quantised, or nothing if no weight is trained."""
        return self.is_training and not self.wgrad_gemms.keeps_quantized_input

    def forward(self, x_MK: Tensor, parameters: Parameters) -> tuple[list[Tensor], list[Tensor]]:
        """(Y of each part, what backward needs besides parameters and X)."""
        weights, biases = self._split(parameters)
        a, x_columns = self.gemms.input(x_MK, self.recipe, rows=True, columns=self.is_training and not self.keeps_input)
        assert a is not None
        operands = self.weights(weights, transposed=False)
        ys = self.fprop(a, operands, biases, x_MK)
        for i, layer in enumerate(self.layers):
            report(layer, "input", x_MK, "rows", E4M3, self.gemms.values(a))
            values_NK = None if self.join else self.gemms.values(operands[i])
            report(layer, "weight", weights[i], "block", E4M3, values_NK)
        return ys, list(x_columns or ())

    def backward(
        self,
        dys: Sequence[Tensor],
        x_MK: Tensor | None,
        kept: Sequence[Tensor],
        parameters: Parameters,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """(dX, gradients of the parameters) from dY of each linear, or of each part; needs: of X, then of the parameters."""
        weights, biases = self._split(parameters)
        needs_dx, needs_dw, needs_db = needs[0], any(needs[1 : 1 + len(weights)]), needs[1 + len(weights) :]
        rows, columns = self.gradients(dys, rows=needs_dx, columns=needs_dw)
        dx_MK = self.dgrad(rows, self.weights(weights, transposed=True), dys[0]) if needs_dx else None
        members = self._of_each_layer(dys)
        for i, (layer, dy_MN) in enumerate(zip(self.layers, members, strict=True)):
            values_MN = None if self.join or not rows else self.gemms.values(rows[i])
            report(layer, "grad_output", dy_MN, "rows", FORMATS[self.recipe.grad_format], values_MN)
        dws: list[Tensor | None] = [None] * len(weights)
        if needs_dw:
            x_columns: Operand | None = tuple(kept)
            if x_MK is not None:
                _, x_columns = self.wgrad_gemms.input(x_MK, self.recipe, rows=False, columns=True)
            assert x_columns is not None
            dws = list(self.wgrad(columns, x_columns, dys[0]))
        dbs = [dy.sum(0) if needed else None for dy, needed in zip(members, needs_db, strict=True)]
        return dx_MK, [*dws, *dbs]

    # ------------------------------------------------------------ operands

    def weights(self, weights: Sequence[Tensor], *, transposed: bool) -> list[Operand]:
        """The weights of each part; as fprop reads them kept from one use to the next if somebody vouches for all of them."""
        first, fresh = self.layers[0], {"recipe": self.recipe, "join": self.join}
        detached = [w.detach() for w in weights]
        if not all(layer.weight_is_frozen or layer.weight_is_kept for layer in self.layers):
            first.weight_changed()
            return self.gemms.weights(detached, transposed=transposed, **fresh)  # type: ignore[arg-type]
        if transposed:
            # Never stored: to turn the bytes of the stored copy around took longer on an H200 than to quantise anew (0.128 against
            # 0.114 ms for 147M weights), and a second copy would cost another byte a parameter for 1 % of a 7B step
            return self.gemms.weights(detached, transposed=True, **fresh)  # type: ignore[arg-type]
        # The versions catch what PyTorch itself can see, should the promise be broken
        versions = tuple((None if w.is_inference() else w._version, w.data_ptr()) for w in weights)
        key = (self.gemms, self.recipe, len(weights), versions)
        if first.kept_weights is None or first.kept_weights[0] != key:
            first.kept_weights = (key, self.gemms.weights(detached, transposed=False, **fresh))  # type: ignore[arg-type]
        return first.kept_weights[1]

    def gradients(self, dys: Sequence[Tensor], *, rows: bool, columns: bool) -> tuple[list[Operand], list[Operand]]:
        """dY of each part as dgrad reads it, and as wgrad does."""
        in_fp8 = self.wgrad_gemms is self.gemms
        along_rows, along_columns = self.gemms.gradients(
            dys, self.recipe, rows=rows, columns=columns and in_fp8, join=self.join
        )
        if columns and not in_fp8:
            _, along_columns = PLAIN.gradients(
                self._of_each_layer(dys), self.recipe, rows=False, columns=True, join=False
            )
        return along_rows, along_columns

    # ------------------------------------------------------------ GEMMs

    def fprop(
        self, a: Operand, weights: Sequence[Operand], biases: Parameters, like: Tensor, out: Tensor | None = None
    ) -> list[Tensor]:
        """Y of each part. `out`: a matrix to write all of them into side by side."""
        ys: list[Tensor] = []
        begin = 0
        for part, b in zip(self.parts, weights, strict=True):
            n = sum(layer.out_features for layer in part)
            bias_N = _join_biases(biases[len(ys) : len(ys) + len(part)], part, like.dtype)
            into = None if out is None else out[:, begin : begin + n]
            size = GemmSize(like.shape[0], n, part[0].in_features)
            ys.append(self._run(self.gemms, "fprop", part, a, b, size, like.dtype, bias_N=bias_N, out=into))
            begin += n
        return ys

    def dgrad(self, dys: Sequence[Operand], weights: Sequence[Operand], like: Tensor) -> Tensor:
        """dX, summed over the parts."""
        dx_MK: Tensor | None = None
        for part, a, b in zip(self.parts, dys, weights, strict=True):
            size = GemmSize(like.shape[0], part[0].in_features, sum(layer.out_features for layer in part))
            dx_MK = self._run(self.gemms, "dgrad", part, a, b, size, like.dtype, add_to=dx_MK)
        assert dx_MK is not None
        return dx_MK

    def wgrad(self, dys: Sequence[Operand], x_columns: Operand, like: Tensor) -> list[Tensor]:
        """dW of each linear; of joined ones as views of one matrix."""
        gemms = self.wgrad_gemms
        dws: list[Tensor] = []
        parts = self.parts if gemms is self.gemms else tuple((layer,) for layer in self.layers)
        for part, a in zip(parts, dys, strict=True):
            sizes = [layer.out_features for layer in part]
            size = GemmSize(sum(sizes), part[0].in_features, like.shape[0])
            dws += self._run(gemms, "wgrad", part, a, x_columns, size, like.dtype).split(sizes)
        return dws

    def _run(
        self,
        gemms: Gemms,
        direction: Direction,
        part: Sequence[Fp8Linear],
        a: Operand,
        b: Operand,
        size: GemmSize,
        dtype: torch.dtype,
        **how: Tensor | None,
    ) -> Tensor:
        """The one place where a GEMM of linear layers is executed and counted."""
        d_MN = gemms.gemm(direction, self.recipe, a, b, size, dtype, **how)
        for layer in part:
            m, n, k = size
            m, n, k = {
                "fprop": (m, layer.out_features, k),
                "dgrad": (m, n, layer.out_features),
                "wgrad": (layer.out_features, n, k),
            }[direction]
            layer.counter.add(direction, gemms.precision, m=m, n=n, k=k)
        part[0].counter.padding_flops += gemms.padding_flops(size)
        return d_MN

    # ------------------------------------------------------------ small things

    def _split(self, parameters: Parameters) -> tuple[list[Tensor], Parameters]:
        weights = [w for w in parameters[: len(self.layers)] if w is not None]
        return weights, parameters[len(self.layers) :]

    def _of_each_layer(self, dys: Sequence[Tensor]) -> Sequence[Tensor]:
        if len(dys) == len(self.layers):
            return dys
        return dys[0].split([layer.out_features for layer in self.layers], dim=1)


def report(
    layer: Fp8Linear, role: str, x_RC: Tensor, along: Along, fmt: Fp8Format, values_RC: Tensor | None = None
) -> None:
    """Hands statistics to the layer's sink, if it has one. `values`: x after its round trip, where they lie there anyway."""
    if layer.stats_sink is None:
        return
    recipe = layer.recipe
    if values_RC is None:
        values_RC = quantize_dequantize(x_RC, along, fmt, recipe.scale, granularity=recipe.granularity)
    stats = quant_stats(x_RC, values_RC, along, fmt, recipe.scale, granularity=recipe.granularity)
    layer.stats_sink(role, stats)


def _join_biases(biases: Parameters, part: Sequence[Fp8Linear], dtype: torch.dtype) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    if len(biases) == 1:
        return biases[0]
    weight = part[0].weight
    whole = [
        weight.new_zeros(n.out_features, dtype=dtype) if b is None else b for b, n in zip(biases, part, strict=True)
    ]
    return torch.cat(whole)
