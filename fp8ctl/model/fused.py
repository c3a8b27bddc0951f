"""The work between GEMMs: norms, rotary embedding, SwiGLU. Computed in FP32 and rounded once, whatever the dtype.

Each is a plain function. While training on a GPU, and when asked for, it runs through torch.compile, which makes one
kernel of it in each direction instead of one for each operation; backward passes are made by autograd either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# torch.compile gives up on a function with more than 8 variants; beyond these a new shape runs as plain PyTorch
_MAX_VARIANTS = 8
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_variants: dict[Callable[..., Any], set[object]] = {}


def norm(x: Tensor, weight: Tensor, eps: float, *, compiled: bool = False) -> Tensor:
    """RMSNorm, x / sqrt(mean(x^2) + eps) * weight over the last dimension; shape and dtype of x."""
    if compiled and _may_compile(_norm, x, weight, eps):
        return _run(_norm, x, weight, eps)  # type: ignore[no-any-return]
    return _plain_norm(x, weight, eps)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, compiled: bool = False) -> tuple[Tensor, Tensor]:
    """(x + delta, RMSNorm of that), both in the dtype of x: the sum is rounded before its norm is taken."""
    if compiled and _may_compile(_add_norm, x, delta, weight, eps):
        return _run(_add_norm, x, delta, weight, eps)  # type: ignore[no-any-return]
    total = x + delta
    return total, _plain_norm(total, weight, eps)


def rotate(x_TNH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotary embedding in FP32, in the dtype of x again. Pair i is (x[i], x[i + H/2]); cos and sin are [T, H / 2]."""
    first, second = x_TNH.float().chunk(2, dim=-1)
    cos, sin = cos_TH[:, None], sin_TH[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_TNH.dtype)


def rotate_qk(
    q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor, *, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """`rotate` of queries and keys. They may be views into a wider buffer; the results are contiguous."""
    if compiled and _may_compile(_rotate_qk, q_TNH, k_TKH, cos_TH, sin_TH):
        return _run(_rotate_qk, q_TNH, k_TKH, cos_TH, sin_TH)  # type: ignore[no-any-return]
    return _rotate_qk(q_TNH, k_TKH, cos_TH, sin_TH)


def silu_mul(gate: Tensor, up: Tensor, *, compiled: bool = False) -> Tensor:
    """SwiGLU's product silu(gate) * up, rounded once. Only gate and up are kept for the backward pass."""
    if compiled and _may_compile(_silu_mul, gate, up):
        return _run(_silu_mul, gate, up)  # type: ignore[no-any-return]
    product: Tensor = _SiluMul.apply(gate, up)
    return product


def _plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # A view, so that the gradients of the norm's steps are summed before that of the residual stream joins them: the
    # same order, and the same bits, wherever x was made
    return functional.rms_norm(x.view_as(x), weight.shape, weight, eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + delta
    return total, _norm(total, weight, eps)


def _rotate_qk(q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q_TNH, cos_TH, sin_TH), rotate(k_TKH, cos_TH, sin_TH)


def _silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


class _SiluMul(torch.autograd.Function):
    """`_silu_mul` without FP32 copies that live until the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _silu_mul(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid, grad_wide = gate.float().sigmoid(), grad.float()
        silu = gate * sigmoid
        d_gate = grad_wide * up * (sigmoid + silu * (1 - sigmoid))
        return d_gate.to(gate.dtype), (grad_wide * silu).to(up.dtype)


def _may_compile(function: Callable[..., Any], *args: Tensor | float) -> bool:
    """Only in training on a GPU, where shapes repeat; what is compiled as part of something larger stays plain."""
    first = args[0]
    assert isinstance(first, Tensor)
    if not first.is_cuda or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    seen = _variants.setdefault(function, set())
    variant = tuple((a.shape, a.stride(), a.dtype, a.requires_grad) if isinstance(a, Tensor) else a for a in args)
    if variant not in seen and len(seen) >= _MAX_VARIANTS:
        return False
    seen.add(variant)
    return True


def _run(function: Callable[..., Any], *args: Any) -> Any:
    if function not in _compiled:
        _compiled[function] = torch.compile(function, dynamic=False)
    return _compiled[function](*args)
