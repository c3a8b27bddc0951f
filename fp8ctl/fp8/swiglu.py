"""SwiGLU fused with the quantisation of what it makes (Triton), and the same without quantisation for BF16 arms.

gate and up come as one packed matrix gu = [gate up], [T, 2F]. Everything is computed in FP32 and rounded to BF16 once, and it
is the BF16 values that are quantised, so the codes are those of `kernels.quantize_tile*` of what `swiglu_bf16` and
`swiglu_backward_bf16` return, to the bit. Formulas: `reference.swiglu`, `reference.swiglu_backward`; the rules of
quantisation, those for inf and NaN included: `reference.py`.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fp8ctl.fp8 import swiglu_kernels
from fp8ctl.fp8.formats import E4M3, TILE, Fp8Format, ScaleKind
from fp8ctl.fp8.launch import launch
from fp8ctl.fp8.reference import Quantized, num_tiles

_FORWARD_ROWS = 32


def swiglu_quantize(
    gu_TF: Tensor, fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1
) -> Quantized:
    """`kernels.quantize_tile(swiglu_bf16(gu))` in one pass: silu(gate) * up by 1x128 tiles.

    Args:
        gu_TF: contiguous BF16 [T, 2F] on a GPU, F a multiple of 16.
        pad_to: T is padded to a multiple of it (code 0, scale_inv 1).

    Raises:
        ValueError: gu is something else.
    """
    t, f = _sizes(gu_TF, multiple_of=16)
    padded_t = _pad(t, pad_to)
    codes = gu_TF.new_empty(padded_t, f, dtype=fmt.dtype)
    scale_inv = gu_TF.new_empty(num_tiles(f), padded_t, dtype=torch.float32)
    if padded_t > 0:
        is_even = t % _FORWARD_ROWS == 0 and f % TILE == 0
        launch(
            swiglu_kernels.forward,
            -(-padded_t // _FORWARD_ROWS) * num_tiles(f),
            *(gu_TF.view(torch.int32), codes.view(torch.uint8), scale_inv, t, padded_t, f),
            constants={"ROWS": _FORWARD_ROWS, "IS_EVEN": is_even, **_constants(fmt, scale_kind)},
            num_warps=4,
        )
    return Quantized(codes, scale_inv.t())


def swiglu_backward_quantize(
    gu_TF: Tensor, d_act_TF: Tensor, grad_fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 4
) -> tuple[Quantized, Quantized, Quantized]:
    """The backward pass of SwiGLU, quantised in both directions as it is made, from one read of gu and d_act.

    Args:
        gu_TF: contiguous BF16 [T, 2F] on a GPU, F a multiple of 128: no tile may hold both d_gate and d_up.
        d_act_TF: contiguous BF16 [T, F].
        pad_to: T is padded to a multiple of it (code 0, scale_inv 1); itself a multiple of 4.

    Returns:
        d_gu = [d_gate d_up] by tiles along its rows, codes [T, 2F]; d_gu by tiles along the tokens, codes [2F, T]; act by
        tiles along the tokens, codes [F, T], always E4M3.

    Raises:
        ValueError: gu or d_act is something else.
    """
    t, f = _sizes(gu_TF, d_act_TF, multiple_of=TILE)
    assert pad_to % 4 == 0, "codes of four tokens are stored at a time"
    padded_t = _pad(t, pad_to)
    new = gu_TF.new_empty
    row_codes, codes = new(padded_t, 2 * f, dtype=grad_fmt.dtype), new(2 * f, padded_t, dtype=grad_fmt.dtype)
    act_codes = new(f, padded_t, dtype=E4M3.dtype)
    row_scale_inv = new(num_tiles(2 * f), padded_t, dtype=torch.float32)
    scale_inv, act_scale_inv = (new(num_tiles(t), n, dtype=torch.float32) for n in (2 * f, f))
    if padded_t > 0:
        launch(
            swiglu_kernels.backward,
            num_tiles(t) * num_tiles(f),
            gu_TF.view(torch.int32),
            d_act_TF.view(torch.int32),
            row_codes.view(torch.uint8),
            row_scale_inv,
            codes.view(torch.uint8),
            scale_inv,
            act_codes.view(torch.uint8),
            act_scale_inv,
            t,
            padded_t,
            f,
            constants={
                "AHEAD": _multiprocessors(gu_TF.device),
                "IS_EVEN": t % TILE == 0,
                **_constants(grad_fmt, scale_kind),
            },
            num_warps=8,
        )
    return (
        Quantized(row_codes, row_scale_inv.t()),
        Quantized(codes, scale_inv.t()),
        Quantized(act_codes, act_scale_inv.t()),
    )


def swiglu_bf16(gu_TF: Tensor) -> Tensor:
    """`reference.swiglu` of contiguous BF16 [T, 2F] on a GPU: act [T, F]."""
    t, f = _sizes(gu_TF)
    act_TF = gu_TF.new_empty(t, f)
    if t > 0:
        num_programs = -(-t // _FORWARD_ROWS) * num_tiles(f)
        rows = {"ROWS": _FORWARD_ROWS}
        launch(swiglu_kernels.forward_bf16, num_programs, gu_TF, act_TF, t, f, constants=rows, num_warps=4)
    return act_TF


def swiglu_backward_bf16(gu_TF: Tensor, d_act_TF: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.swiglu_backward` of contiguous BF16 [T, 2F] and [T, F] on a GPU: (d_gu [T, 2F], act [T, F])."""
    t, f = _sizes(gu_TF, d_act_TF)
    d_gu_TF, act_TF = torch.empty_like(gu_TF), torch.empty_like(d_act_TF)
    if t > 0:
        num_programs = -(-t // _FORWARD_ROWS) * num_tiles(f)
        args, rows = (gu_TF, d_act_TF, d_gu_TF, act_TF, t, f), {"ROWS": _FORWARD_ROWS}
        launch(swiglu_kernels.backward_bf16, num_programs, *args, constants=rows, num_warps=8)
    return d_gu_TF, act_TF


def _sizes(gu: Tensor, d_act: Tensor | None = None, *, multiple_of: int = 1) -> tuple[int, int]:
    """(T, F)."""
    if gu.dim() != 2 or gu.dtype != torch.bfloat16 or gu.shape[1] % 2 != 0 or not gu.is_contiguous():
        found = f"{gu.dtype} of shape {tuple(gu.shape)}, strides {gu.stride()}"
        raise ValueError(f"expected gate and up as one contiguous bfloat16 matrix [T, 2F], got {found}")
    t, f = gu.shape[0], gu.shape[1] // 2
    if f % multiple_of != 0:
        raise ValueError(f"expected gate and up of a multiple of {multiple_of} columns each, got {f}")
    if d_act is not None and (d_act.shape != (t, f) or d_act.dtype != gu.dtype or not d_act.is_contiguous()):
        found = f"{d_act.dtype} of shape {tuple(d_act.shape)}, strides {d_act.stride()}"
        raise ValueError(f"expected the gradient as a contiguous bfloat16 matrix {(t, f)}, got {found}")
    return t, f


def _constants(fmt: Fp8Format, scale_kind: ScaleKind) -> dict[str, bool]:
    return {"IS_E4M3": fmt is E4M3, "IS_POW2": scale_kind == "pow2"}


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _pad(t: int, pad_to: int) -> int:
    assert TILE % pad_to == 0, "padding must end within the last tile"
    return -(-t // pad_to) * pad_to
