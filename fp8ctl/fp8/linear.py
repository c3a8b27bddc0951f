"""A linear layer whose three GEMMs run in FP8 or in BF16, switchable between steps, and counted where they run.

What is multiplied when is in `calls.py`; what executes it is a backend (`gemms.py`): `reference` emulates FP8 anywhere,
`native` runs it on tensor cores. Both see the same bits of operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.fp8.autograd import Keeps, handle_for, run, run_compiled, split
from fp8ctl.fp8.calls import LinearCall
from fp8ctl.fp8.counter import GemmCounter, Precision
from fp8ctl.fp8.gemms import PLAIN, BackendName, GemmKernel, Gemms, Operand, gemms_of
from fp8ctl.fp8.stats import QuantStats

StatsSink = Callable[[str, QuantStats], None]


class Fp8Linear(nn.Linear):
    """nn.Linear with a `precision`. Parameters, their names and the checkpoint are those of nn.Linear.

    `precision` may change between steps; forward captures it, so a backward pass always agrees with its own forward.
    `backend` (and for native its GEMM `kernel`) executes what is FP8. Shapes: x [..., K] -> [..., N], any leading
    dimensions. Weight and input share one dtype, BF16 or FP32; the output has it too.

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
        kernel: GemmKernel = "cublas",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.precision: Precision = precision
        self.recipe = recipe or RecipeConfig()
        self.backend: BackendName = backend
        self.kernel: GemmKernel = kernel
        self.counter = GemmCounter()
        self.stats_sink: StatsSink | None = None
        self.weight_is_frozen = False
        self.weight_is_kept = False
        self.te_executor: tuple[RecipeConfig, Any, Any] | None = None
        """With backend te: what runs its GEMMs (see `te.py`)."""
        self.handle = handle_for(self)
        self.kept_weights: tuple[object, list[Operand]] | None = None
        """Quantised weights of the call whose first linear this is, and what they were made from."""

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        precision: Precision,
        recipe: RecipeConfig,
        backend: BackendName = "reference",
        kernel: GemmKernel = "cublas",
    ) -> Fp8Linear:
        """The same layer with the very same parameter objects."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            precision=precision,
            recipe=recipe,
            backend=backend,
            kernel=kernel,
            device="meta",
            dtype=linear.weight.dtype,
        )
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.handle = handle_for(self)  # a copy is another layer

    @property
    def gemms(self) -> Gemms:
        """What quantises and multiplies at the moment. With backend te only what it leaves to BF16."""
        if self.backend == "te":
            return PLAIN
        return gemms_of(self.precision, self.backend, self.kernel)

    def forward(self, input: Tensor) -> Tensor:
        """x [..., K] -> y [..., N]."""
        return self.forward_together(input, (self,))[0]

    def forward_together(self, input: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """Outputs of linears that share an input, this one first: quantised once, and one GEMM where they can be joined.

        Whoever calls it must have the parameters of all of them at hand (ZeRO-3 gathers them module by module).
        """
        linears = [layer for layer in layers if self.agrees_with(layer)]
        if len(linears) < len(layers):
            return tuple(layer(input) for layer in layers)
        x_MK = input.reshape(-1, self.in_features)
        if self.backend == "te" and self.precision == "fp8" and self._te_can_quantize(linears):
            from fp8ctl.fp8.te import te_forward

            return tuple(te_forward(layer, x_MK).view(*input.shape[:-1], layer.out_features) for layer in linears)
        is_training = self._is_trained(linears)
        ys: Sequence[Tensor]
        if torch.compiler.is_compiling():
            join = len(linears) > 1 and self.gemms.joins([layer.weight for layer in linears], self.recipe)
            keeps = self.keeps(is_training)
            parts = run_compiled("linears", linears, x_MK, is_training=is_training, join=join, keeps=keeps)
            ys = split(parts, [layer.out_features for layer in linears])
        else:
            ys = run(LinearCall.of(linears, is_training=is_training), x_MK)
        return tuple(y_MN.view(*input.shape[:-1], y_MN.shape[1]) for y_MN in ys)

    def keeps(self, is_training: bool) -> Keeps:
        """What a call keeps of its input for backward."""
        if not is_training:
            return "nothing"
        if self.precision == "bf16" or self.backend != "native" or self.recipe.wgrad == "bf16":
            return "input"
        if self.recipe.granularity in ("row", "tensor"):
            return self.recipe.granularity  # type: ignore[return-value]
        return "block" if self.recipe.wgrad == "x_block" else "tile"

    def agrees_with(self, other: nn.Module) -> TypeGuard[Fp8Linear]:
        """Whether the other linear runs in just the same way at the moment."""
        return other is self or (
            isinstance(other, Fp8Linear)
            and (self.precision, self.backend, self.kernel) == (other.precision, other.backend, other.kernel)
            # identity first: torch.compile can't follow the comparison of two settings
            and (self.recipe is other.recipe or self.recipe == other.recipe)
        )

    def extra_repr(self) -> str:
        """What nn.Linear prints, and the precision."""
        return f"{super().extra_repr()}, precision={self.precision}"

    def quantized_weight(self, *, transposed: bool = False) -> Operand:
        """The weight as fprop multiplies it, or as dgrad does (`transposed`); kept if somebody vouches for the weight."""
        return LinearCall.of((self,), is_training=False).weights([self.weight], transposed=transposed)[0]

    def weight_changed(self) -> None:
        """Forgets the quantised weight."""
        self.kept_weights = None

    @staticmethod
    def _te_can_quantize(layers: Sequence[Fp8Linear]) -> bool:
        from fp8ctl.fp8.te import can_quantize

        return all(can_quantize(layer) for layer in layers)

    @staticmethod
    def _is_trained(layers: Sequence[Fp8Linear]) -> bool:
        is_trained = torch.is_grad_enabled() and any(layer.weight.requires_grad for layer in layers)
        assert not (is_trained and any(layer.weight_is_frozen for layer in layers)), (
            "a frozen weight can't be trained: its FP8 form would go stale"
        )
        return is_trained
