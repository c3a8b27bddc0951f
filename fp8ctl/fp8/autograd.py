"""Joins a call to PyTorch: an autograd function in eager mode, a registered operator under torch.compile.

A call (`LinearCall`, `MlpCall`) knows how to run forward and backward. The operator is opaque: Python runs inside it whenever the
compiled code runs, so counters count what was executed, and the call is made from what its layers run in at that moment. Which
layers those are comes in as tensors (`Fp8Linear.handle`), so that one graph serves all blocks of a model.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8ctl.fp8.calls import LinearCall, Parameters
from fp8ctl.fp8.formats import E4M3

if TYPE_CHECKING:
    from fp8ctl.fp8.linear import Fp8Linear

Unit = Literal["linears", "mlp"]
Keeps = Literal["nothing", "input", "tile", "block", "row", "tensor"]
"""What backward gets of X: nothing, X itself, or X^T quantised."""


class Call(Protocol):
    """What `run` runs. `parameters`: weights of all linears in order, then their biases."""

    @property
    def layers(self) -> tuple[Fp8Linear, ...]:
        """Linears whose parameters it takes."""
        ...

    @property
    def keeps_input(self) -> bool:
        """Whether backward gets x."""
        ...

    @property
    def out_sizes(self) -> list[int]:
        """Width of each output; outputs that come joined are split into them."""
        ...

    def forward(self, x_MK: Tensor, parameters: Parameters) -> tuple[list[Tensor], list[Tensor]]:
        """(Outputs, what backward needs besides x and parameters)."""
        ...

    def backward(
        self,
        dys: Sequence[Tensor],
        x_MK: Tensor | None,
        kept: Sequence[Tensor],
        parameters: Parameters,
        needs: Sequence[bool],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gradients of x and of the parameters; `needs` says which are asked for."""
        ...


def run(call: Call, x_MK: Tensor) -> tuple[Tensor, ...]:
    """Outputs [M, size] of the call, differentiable in x and in the layers' weights and biases."""
    return _Eager.apply(call, x_MK, *parameters_of(call.layers))


def parameters_of(layers: Sequence[Fp8Linear]) -> list[Tensor | None]:
    """Weights, then biases."""
    return [*(layer.weight for layer in layers), *(layer.bias for layer in layers)]


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, x_MK: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        outputs, kept = call.forward(x_MK, parameters)
        ctx.call, ctx.num_parameters = call, len(parameters)
        # The parameters themselves are saved, never copies: under ZeRO-3 their data is freed after forward and gathered
        # again in place for backward, and only the parameter sees that
        ctx.save_for_backward(x_MK if call.keeps_input else None, *parameters, *kept)
        return split(outputs, call.out_sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, *saved = ctx.saved_tensors
        parameters, kept = saved[: ctx.num_parameters], saved[ctx.num_parameters :]
        dx_MK, gradients = ctx.call.backward(dys, x_MK, kept, parameters, ctx.needs_input_grad[1:])
        return (None, dx_MK, *gradients)


def split(outputs: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """One output for each size; joined ones as views of their matrix."""
    return tuple(outputs) if len(outputs) == len(sizes) else outputs[0].split(list(sizes), dim=1)


# ---------------------------------------------------------------- under torch.compile

_LAYERS: weakref.WeakValueDictionary[int, Fp8Linear] = weakref.WeakValueDictionary()
_next_number = itertools.count()


def handle_for(layer: Fp8Linear) -> Tensor:
    """A tensor on the CPU by which the operator finds the layer while it lives."""
    number = next(_next_number)
    _LAYERS[number] = layer
    return torch.tensor(number)


def run_compiled(
    unit: Unit, layers: Sequence[Fp8Linear], x_MK: Tensor, *, is_training: bool, join: bool, keeps: Keeps
) -> list[Tensor]:
    """`run` for code that torch.compile traces. Joined outputs come as one matrix: an operator's outputs must not overlap."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers if layer.bias is not None]
    handles = [layer.handle for layer in layers]
    outputs = torch.ops.fp8ctl.call(x_MK, weights, biases, handles, unit, is_training, join, keeps)
    return outputs[: 1 if unit == "mlp" or join else len(layers)]  # type: ignore[no-any-return]


def _call(unit: str, handles: Sequence[Tensor], is_training: bool) -> Call:
    from fp8ctl.fp8.mlp import MlpCall

    layers = [_LAYERS[int(handle)] for handle in handles]
    if unit == "mlp":
        gate, up, down = layers
        return MlpCall.of(gate, up, down, is_training=is_training)
    return LinearCall.of(layers, is_training=is_training)


def _with_gaps(call: Call, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor | None]:
    given = iter(biases)
    return [*weights, *(None if layer.bias is None else next(given) for layer in call.layers)]


@torch.library.custom_op("fp8ctl::call", mutates_args=())
def _forward_op(
    x_MK: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    handles: list[Tensor],
    unit: str,
    is_training: bool,
    join: bool,
    keeps: str,
) -> list[Tensor]:
    call = _call(unit, handles, is_training)
    outputs, kept = call.forward(x_MK, _with_gaps(call, weights, biases))
    return [*outputs, *kept]


@_forward_op.register_fake
def _(
    x_MK: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    handles: list[Tensor],
    unit: str,
    is_training: bool,
    join: bool,
    keeps: str,
) -> list[Tensor]:
    m, k = x_MK.shape
    widths = [w.shape[0] for w in weights]
    if unit == "mlp":
        ys = [x_MK.new_empty(m, widths[2])]
        ys += [x_MK.new_empty(m, widths[0] + widths[1])] if is_training else []
    else:
        ys = [x_MK.new_empty(m, n) for n in ([sum(widths)] if join else widths)]
    if keeps in ("nothing", "input"):
        return ys
    from fp8ctl.fp8 import kernels, native

    if keeps == "tile":
        return [*ys, *kernels.empty_tiles(x_MK, k, m, E4M3, native.PAD_TO)]
    if keeps == "block":
        return [*ys, *kernels.empty_blocks(x_MK, k, m, E4M3, native.PAD_TO)]
    codes = x_MK.new_empty(native.pad(k), native.pad(m), dtype=E4M3.dtype)
    return [*ys, codes, x_MK.new_empty(native.pad(k) if keeps == "row" else 1, 1, dtype=torch.float32)]


@torch.library.custom_op("fp8ctl::call_backward", mutates_args=())
def _backward_op(
    dys: list[Tensor],
    x_MK: list[Tensor],
    kept: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    handles: list[Tensor],
    unit: str,
) -> list[Tensor]:
    call = _call(unit, handles, True)
    parameters = _with_gaps(call, weights, biases)
    needs = [True, *(p is not None for p in parameters)]
    dx_MK, gradients = call.backward(dys, x_MK[0] if x_MK else None, kept, parameters, needs)
    assert dx_MK is not None
    # views of one matrix would overlap in the eyes of the compiler
    return [dx_MK, *(g if g._base is None else g.clone() for g in gradients if g is not None)]


@_backward_op.register_fake
def _(
    dys: list[Tensor],
    x_MK: list[Tensor],
    kept: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    handles: list[Tensor],
    unit: str,
) -> list[Tensor]:
    dx_MK = dys[0].new_empty(dys[0].shape[0], weights[0].shape[1])
    return [dx_MK, *(torch.empty_like(p, memory_format=torch.contiguous_format) for p in (*weights, *biases))]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x_MK, weights, biases, handles, ctx.unit, _, join, keeps = inputs
    num_outputs = 1 if ctx.unit == "mlp" or join else len(weights)
    ctx.counts = (1 if keeps == "input" else 0, len(weights), len(biases), len(handles), num_outputs)
    x = [x_MK] if keeps == "input" else []
    ctx.save_for_backward(*x, *weights, *biases, *handles, *output[num_outputs:])


def _backward_formula(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    num_x, num_weights, num_biases, num_handles, num_outputs = ctx.counts
    saved = list(ctx.saved_tensors)
    parts = []
    for count in (num_x, num_weights, num_biases, num_handles):
        parts.append(saved[:count])
        saved = saved[count:]
    x_MK, weights, biases, handles = parts
    dys = [dy.contiguous() for dy in dys[:num_outputs]]
    dx_MK, *gradients = torch.ops.fp8ctl.call_backward(dys, x_MK, saved, weights, biases, handles, ctx.unit)
    return dx_MK, gradients[:num_weights], gradients[num_weights:], [None] * num_handles, None, None, None, None


_forward_op.register_autograd(_backward_formula, setup_context=_setup_context)
