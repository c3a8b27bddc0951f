"""The feed-forward as one call on a GPU: SwiGLU and the quantisation of what it makes are one kernel in each direction.

    forward     gate|up = X [Wg; Wu]^T              one GEMM, one packed matrix [T, 2F], kept in BF16
                act = silu(gate) * up               quantised as it is made, never stored in BF16
                Y = act Wd^T
    backward    d_act = dY Wd
                d_gate|d_up and act once more       from gate|up and d_act, quantised in both directions as they are made
                dWd, dX, d[Wg; Wu]

In BF16 the same call runs with the same kernels without quantisation, so that it keeps and recomputes the same and a comparison
of the two is one of precisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp8ctl.fp8.autograd import run, run_compiled
from fp8ctl.fp8.calls import LinearCall, Parameters
from fp8ctl.fp8.formats import E4M3, FORMATS
from fp8ctl.fp8.gemms import PLAIN, Operand
from fp8ctl.fp8.linear import Fp8Linear


class Fp8Mlp(nn.Module):
    """A SwiGLU feed-forward with children gate_proj, up_proj and down_proj, all `Fp8Linear`; x [T, D] -> [T, D].

    `plain` computes the same from the children one by one. It runs where the one call can't: on a CPU, when the three don't
    run in just the same way, when they are not to be joined, and when one of them reports statistics.
    """

    runs_linears_together = True
    """For ZeRO-3: the weights of the children are used outside their own forward."""

    def __init__(self, gate: Fp8Linear, up: Fp8Linear, down: Fp8Linear, plain: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate, up, down
        self._plain = type(plain).forward

    def forward(self, x_TD: Tensor) -> Tensor:
        """See the class."""
        layers = (self.gate_proj, self.up_proj, self.down_proj)
        if not self._runs_as_one(x_TD, layers):
            return self._plain(self, x_TD)  # type: ignore[no-any-return]
        x_MD = x_TD.reshape(-1, x_TD.shape[-1])
        is_training = torch.is_grad_enabled() and any(layer.weight.requires_grad for layer in layers)
        if torch.compiler.is_compiling():
            gate, up = self.gate_proj, self.up_proj
            join = gate.gemms.joins([gate.weight, up.weight], gate.recipe)
            keeps = gate.keeps(is_training)
            (y_MD,) = run_compiled("mlp", layers, x_MD, is_training=is_training, join=join, keeps=keeps)
        else:
            (y_MD,) = run(MlpCall.of(*layers, is_training=is_training), x_MD)
        return y_MD.view(x_TD.shape)

    def _runs_as_one(self, x_TD: Tensor, layers: Sequence[Fp8Linear]) -> bool:
        gate, up, down = layers
        if not x_TD.is_cuda or not (x_TD.dtype == gate.weight.dtype == torch.bfloat16) or x_TD.numel() == 0:
            return False
        if torch.is_grad_enabled() and not any(layer.weight.requires_grad for layer in layers):
            return False  # the call keeps nothing for backward when no weight is trained
        if any(layer.stats_sink is not None or layer.bias is not None for layer in layers):
            return False
        if not (gate.agrees_with(up) and gate.agrees_with(down)):
            return False
        if gate.precision == "bf16":
            return True
        return gate.backend == "native" and gate.gemms.joins([gate.weight, up.weight], gate.recipe)


@dataclass(frozen=True)
class MlpCall:
    """See the module's text; a `Call` of `autograd.py`. M tokens."""

    pair: LinearCall
    down: LinearCall

    @classmethod
    def of(cls, gate: Fp8Linear, up: Fp8Linear, down: Fp8Linear, *, is_training: bool) -> MlpCall:
        """A call of three linears that agree."""
        pair = LinearCall.of((gate, up), is_training=is_training)
        return cls(pair, LinearCall.of((down,), is_training=is_training))

    @property
    def layers(self) -> tuple[Fp8Linear, ...]:
        """gate, up, down."""
        return (*self.pair.layers, *self.down.layers)

    @property
    def out_sizes(self) -> list[int]:
        """Y only."""
        return self.down.out_sizes

    @property
    def keeps_input(self) -> bool:
        """As the linears at its entrance."""
        return self.pair.keeps_input

    def forward(self, x_MD: Tensor, parameters: Parameters) -> tuple[list[Tensor], list[Tensor]]:
        """([Y], [gate|up and, if X itself is not kept, X^T quantised])."""
        pair, (w_gate, w_up, w_down) = self.pair, _weights(parameters)
        a, x_columns = pair.gemms.input(x_MD, pair.recipe, rows=True, columns=pair.is_training and not pair.keeps_input)
        assert a is not None
        gu_MF = x_MD.new_empty(x_MD.shape[0], 2 * w_gate.shape[0]) if not pair.join else None
        ys = pair.fprop(a, pair.weights([w_gate, w_up], transposed=False), [None, None], x_MD, out=gu_MF)
        gu_MF = ys[0] if gu_MF is None else gu_MF
        act = self._act(gu_MF)
        (y_MD,) = self.down.fprop(act, self.down.weights([w_down], transposed=False), [None], x_MD)
        return [y_MD], [gu_MF, *(x_columns or ())] if pair.is_training else []

    def backward(
        self,
        dys: Sequence[Tensor],
        x_MD: Tensor | None,
        kept: Sequence[Tensor],
        parameters: Parameters,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """(dX, gradients of gate, up and down)."""
        pair, down, (w_gate, w_up, w_down) = self.pair, self.down, _weights(parameters)
        (dy_MD,), (gu_MF, *x_kept) = dys, kept
        dy_rows, dy_columns = down.gradients([dy_MD], rows=True, columns=True)
        d_act_MF = down.dgrad(dy_rows, down.weights([w_down], transposed=True), dy_MD)
        dgu_rows, dgu_columns, act_columns = self._act_backward(gu_MF, d_act_MF)
        (dw_down,) = down.wgrad(dy_columns, act_columns, dy_MD)
        del d_act_MF, dy_rows, dy_columns, act_columns
        dx_MD = None
        if needs[0]:
            dx_MD = pair.dgrad(dgu_rows, pair.weights([w_gate, w_up], transposed=True), dy_MD)
        x_columns: Operand | None = tuple(x_kept)
        if x_MD is not None:
            _, x_columns = pair.wgrad_gemms.input(x_MD, pair.recipe, rows=False, columns=True)
        assert x_columns is not None
        dw_gate, dw_up = pair.wgrad(dgu_columns, x_columns, dy_MD)
        return dx_MD, [dw_gate, dw_up, dw_down, None, None, None]

    def _act(self, gu_MF: Tensor) -> Operand:
        """silu(gate) * up as fprop of down_proj reads it."""
        from fp8ctl.fp8 import swiglu
        from fp8ctl.fp8.native import PAD_TO

        gemms, recipe = self.down.gemms, self.down.recipe
        if gemms is not PLAIN and recipe.granularity == "block":
            return swiglu.swiglu_quantize(gu_MF, E4M3, recipe.scale, pad_to=PAD_TO)
        act, _ = gemms.input(swiglu.swiglu_bf16(gu_MF), recipe, rows=True, columns=False)
        assert act is not None
        return act

    def _act_backward(self, gu_MF: Tensor, d_act_MF: Tensor) -> tuple[list[Operand], list[Operand], Operand]:
        """d_gate|d_up as dgrad and as wgrad of the pair read it, and act as wgrad of down_proj reads it."""
        from fp8ctl.fp8 import swiglu
        from fp8ctl.fp8.native import PAD_TO

        pair, recipe = self.pair, self.pair.recipe
        if pair.gemms is not PLAIN and recipe.granularity == "block" and recipe.wgrad == "fp8":
            fmt = FORMATS[recipe.grad_format]
            rows, columns, act_columns = swiglu.swiglu_backward_quantize(
                gu_MF, d_act_MF, fmt, recipe.scale, pad_to=PAD_TO
            )
            return [rows], [columns], act_columns
        dgu_MF, act_MF = swiglu.swiglu_backward_bf16(gu_MF, d_act_MF)
        dgus = [dgu_MF] if pair.join else list(dgu_MF.chunk(2, dim=1))
        dgu_rows, dgu_columns = pair.gradients(dgus, rows=True, columns=True)
        _, act = self.down.wgrad_gemms.input(act_MF, recipe, rows=False, columns=True)
        assert act is not None
        return dgu_rows, dgu_columns, act


def _weights(parameters: Parameters) -> list[Tensor]:
    return [w for w in parameters[:3] if w is not None]
