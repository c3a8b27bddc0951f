"""SwiGLU fused with the quantisation of what it makes (Triton), and the same without quantisation for BF16 arms.

gate and up come as one packed matrix gu = [gate up], [T, 2F]. Everything is computed in FP32 and rounded to BF16 once, and it
is the BF16 values that are quantised, so the codes are those of `kernels.quantize_tile*` of what `swiglu_bf16` and
`swiglu_backward_bf16` return, to the bit. Formulas: `reference.swiglu`, `reference.swiglu_backward`; the rules of
quantisation, those for inf and NaN included: `reference.py`.

How it comes near the memory's speed: a program of the backward pass reads a square of 128 tokens x 128 columns as
[32, 4, 128], token 4i + j at [i, j]. A thread then holds four neighbouring tokens of a column, whose codes it packs into one
word, and the transposed codes are moved and stored word by word. Whether a square holds inf or NaN is decided once for the
whole square; only then values are looked at one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8ctl.fp8.formats import E4M3, TILE, Fp8Format, ScaleKind
from fp8ctl.fp8.kernels import _scales
from fp8ctl.fp8.reference import Quantized, num_tiles

# A constexpr, since kernels can't see other globals
_SIDE = tl.constexpr(TILE)
_FORWARD_ROWS = 32
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
    t, f = _sizes(gu_TF)
    padded_t = _pad(t, pad_to)
    codes = gu_TF.new_empty(padded_t, f, dtype=fmt.dtype)
    scale_inv = gu_TF.new_empty(num_tiles(f), padded_t, dtype=torch.float32)
    if padded_t > 0:
        _forward[(triton.cdiv(padded_t, _FORWARD_ROWS) * num_tiles(f),)](
            gu_TF,
            codes.view(torch.uint8),
            scale_inv,
            t,
            padded_t,
            f,
            ROWS=_FORWARD_ROWS,
            EVEN_T=t % _FORWARD_ROWS == 0,
            EVEN_F=f % TILE == 0,
            **_constants(fmt, scale_kind),
            num_warps=4,
        )
    return Quantized(codes, scale_inv.t())


def swiglu_backward_quantize(
    gu_TF: Tensor, d_act_TF: Tensor, grad_fmt: Fp8Format = E4M3, scale_kind: ScaleKind = "pow2", *, pad_to: int = 1
) -> tuple[Quantized, Quantized, Quantized]:
    """The backward pass of SwiGLU, quantised in both directions as it is made, from one read of gu and d_act.

    Args:
        gu_TF: contiguous BF16 [T, 2F] on a GPU, F a multiple of 128: no tile may hold both d_gate and d_up.
        d_act_TF: contiguous BF16 [T, F].
        pad_to: T is padded to a multiple of it (code 0, scale_inv 1).

    Returns:
        d_gu = [d_gate d_up] by tiles along its rows, codes [T, 2F]; d_gu by tiles along the tokens, codes [2F, T]; act by
        tiles along the tokens, codes [F, T], always E4M3.

    Raises:
        ValueError: gu or d_act is something else.
    """
    t, f = _sizes(gu_TF, d_act_TF)
    if f % TILE != 0:
        raise ValueError(f"expected gate and up of a multiple of {TILE} columns each, got {f}")
    padded_t = _pad(t, pad_to)
    new = gu_TF.new_empty
    row_codes, row_scale_inv = (
        new(padded_t, 2 * f, dtype=grad_fmt.dtype),
        new(num_tiles(2 * f), padded_t, dtype=torch.float32),
    )
    codes, scale_inv = new(2 * f, padded_t, dtype=grad_fmt.dtype), new(num_tiles(t), 2 * f, dtype=torch.float32)
    act_codes, act_scale_inv = new(f, padded_t, dtype=E4M3.dtype), new(num_tiles(t), f, dtype=torch.float32)
    if padded_t > 0:
        _backward[(num_tiles(t) * num_tiles(f),)](
            gu_TF,
            d_act_TF,
            row_codes.view(torch.uint8),
            row_scale_inv,
            codes.view(torch.uint8),
            scale_inv,
            act_codes.view(torch.uint8),
            act_scale_inv,
            t,
            padded_t,
            f,
            IS_EVEN=t % TILE == 0,
            IS_IN_WORDS=padded_t % 4 == 0,
            **_constants(grad_fmt, scale_kind),
            num_warps=8,
        )
    return (
        Quantized(row_codes, row_scale_inv.t()),
        Quantized(codes, scale_inv.t()),
        Quantized(act_codes, act_scale_inv.t()),
    )


def swiglu_bf16(gu_TF: Tensor) -> Tensor:
    """`reference.swiglu` of contiguous BF16 [T, 2F] on a GPU, F a multiple of 16: act [T, F]."""
    t, f = _sizes(gu_TF)
    act_TF = gu_TF.new_empty(t, f)
    if t > 0:
        _forward_bf16[(triton.cdiv(t, _FORWARD_ROWS) * num_tiles(f),)](
            gu_TF, act_TF, t, f, ROWS=_FORWARD_ROWS, num_warps=4
        )
    return act_TF


def swiglu_backward_bf16(gu_TF: Tensor, d_act_TF: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.swiglu_backward` of contiguous BF16 [T, 2F] and [T, F] on a GPU: (d_gu [T, 2F], act [T, F])."""
    t, f = _sizes(gu_TF, d_act_TF)
    d_gu_TF, act_TF = torch.empty_like(gu_TF), torch.empty_like(d_act_TF)
    if t > 0:
        _backward_bf16[(triton.cdiv(t, _FORWARD_ROWS) * num_tiles(f),)](
            gu_TF, d_act_TF, d_gu_TF, act_TF, t, f, ROWS=_FORWARD_ROWS, num_warps=8
        )
    return d_gu_TF, act_TF


def _sizes(gu: Tensor, d_act: Tensor | None = None) -> tuple[int, int]:
    """(T, F)."""
    if gu.dim() != 2 or gu.dtype != torch.bfloat16 or gu.shape[1] % 32 != 0 or not gu.is_contiguous():
        found = f"{gu.dtype} of shape {tuple(gu.shape)}, strides {gu.stride()}"
        raise ValueError(
            f"expected gate and up as one contiguous bfloat16 matrix [T, 2F], F a multiple of 16, got {found}"
        )
    t, f = gu.shape[0], gu.shape[1] // 2
    if d_act is not None and (d_act.shape != (t, f) or d_act.dtype != gu.dtype or not d_act.is_contiguous()):
        found = f"{d_act.dtype} of shape {tuple(d_act.shape)}, strides {d_act.stride()}"
        raise ValueError(f"expected the gradient as a contiguous bfloat16 matrix {(t, f)}, got {found}")
    return t, f


def _pad(t: int, pad_to: int) -> int:
    assert TILE % pad_to == 0, "padding must end within the last tile"
    return -(-t // pad_to) * pad_to


def _constants(fmt: Fp8Format, scale_kind: ScaleKind) -> dict[str, object]:
    return {
        "IS_E4M3": fmt.name == "e4m3",
        "IS_POW2": scale_kind == "pow2",
        "LARGEST": fmt.largest,
        "MAX_EXPONENT": fmt.max_exponent,
    }


@triton.jit
def _silu(gate):
    """(sigmoid, silu) in FP32. The hardware's own exponential and reciprocal: the checked ones cost 15 instructions more."""
    if _IS_INTERPRETED:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    else:
        sigmoid = tl.inline_asm_elementwise(
            "{ ex2.approx.ftz.f32 $0, $1; add.ftz.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0; }",
            "=f,f",
            [gate * -1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return sigmoid, gate * sigmoid


@triton.jit
def _act(gate, up):
    """act rounded to BF16."""
    _, silu = _silu(gate.to(tl.float32))
    return (silu * up.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _gradients(gate, up, d_act):
    """(d_gate, d_up, act), each rounded to BF16. The fma is spelled out so that every kernel rounds alike."""
    gate, up, d_act = gate.to(tl.float32), up.to(tl.float32), d_act.to(tl.float32)
    sigmoid, silu = _silu(gate)
    slope = sigmoid * tl.fma(gate, 1.0 - sigmoid, 1.0)
    d_gate = d_act * up * slope
    return d_gate.to(tl.bfloat16), (d_act * silu).to(tl.bfloat16), (silu * up).to(tl.bfloat16)


@triton.jit
def _rank(x):
    """Bits of |x| such that, as integers, finite values order as they do and inf and NaN come below all of them."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) + 0x800000


@triton.jit
def _amax(rank):
    """Bits of the largest finite magnitude from the largest rank; 0 if all were inf or NaN."""
    return tl.maximum(rank, 0x800000) - 0x800000


@triton.jit
def _inf_to_nan(x):
    """Nothing else changes, the sign of zero included."""
    return tl.fma(x, 0.0, x)


@triton.jit
def _codes(x, scale, IS_E4M3: tl.constexpr, LARGEST: tl.constexpr):
    """Of x without inf. The hardware's casts saturate, and turn any NaN into the code 0x7F."""
    if IS_E4M3:
        codes = (x * scale).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = (x * scale).to(tl.float8e5).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def _store_words(ptr, codes, stride, tokens_left, IS_EVEN: tl.constexpr, IS_IN_WORDS: tl.constexpr):
    """Codes [32, 4, 128], token 4i + j at [i, j], as rows of a matrix whose columns are tokens."""
    shift = (8 * tl.arange(0, 4))[None, :, None]
    words = tl.trans(tl.sum(codes.to(tl.int32) << shift, axis=1))
    i = tl.arange(0, 32)[None, :]
    column = tl.arange(0, 128)[:, None]
    if IS_EVEN:
        tl.store(ptr.to(tl.pointer_type(tl.int32)) + column * (stride // 4) + i, words)
    elif IS_IN_WORDS:
        tl.store(ptr.to(tl.pointer_type(tl.int32)) + column * (stride // 4) + i, words, mask=4 * i < tokens_left)
    else:
        for j in tl.static_range(4):
            byte = ((words >> (8 * j)) & 0xFF).to(tl.uint8)
            tl.store(ptr + column * stride + 4 * i + j, byte, mask=4 * i + j < tokens_left)


@triton.jit
def _quantize_rows(
    x,
    rank,
    codes_ptr,
    stride,
    scale_inv_ptr,
    token,
    tokens_left,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
):
    scale, scale_inv = _scales(_amax(tl.max(rank, axis=2)), IS_POW2, LARGEST, MAX_EXPONENT)
    codes = _codes(x, scale[:, :, None], IS_E4M3, LARGEST)
    at = codes_ptr + token[:, :, None] * stride + tl.arange(0, 128)[None, None, :]
    if IS_EVEN:
        tl.store(at, codes)
        tl.store(scale_inv_ptr + token, scale_inv)
    else:
        tl.store(at, codes, mask=token[:, :, None] < tokens_left)
        tl.store(scale_inv_ptr + token, scale_inv, mask=token < tokens_left)


@triton.jit
def _quantize_columns(
    x,
    rank,
    codes_ptr,
    stride,
    scale_inv_ptr,
    tokens_left,
    IS_EVEN: tl.constexpr,
    IS_IN_WORDS: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
):
    scale, scale_inv = _scales(_amax(tl.max(tl.max(rank, axis=1), axis=0)), IS_POW2, LARGEST, MAX_EXPONENT)
    codes = _codes(x, scale[None, None, :], IS_E4M3, LARGEST)
    _store_words(codes_ptr, codes, stride, tokens_left, IS_EVEN, IS_IN_WORDS)
    tl.store(scale_inv_ptr + tl.arange(0, 128), scale_inv)


@triton.jit
def _backward(
    gu_ptr,
    d_act_ptr,
    row_codes_ptr,
    row_scale_inv_ptr,
    codes_ptr,
    scale_inv_ptr,
    act_codes_ptr,
    act_scale_inv_ptr,
    T,
    padded_T,
    F,
    IS_EVEN: tl.constexpr,
    IS_IN_WORDS: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
):
    squares = F // _SIDE
    t = (tl.program_id(0) // squares).to(tl.int64)
    f = (tl.program_id(0) % squares).to(tl.int64)
    token = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    column = tl.arange(0, 128)[None, None, :]
    at = gu_ptr + t * _SIDE * 2 * F + f * _SIDE + token[:, :, None] * (2 * F) + column
    d_act_at = d_act_ptr + t * _SIDE * F + f * _SIDE + token[:, :, None] * F + column
    if IS_EVEN:
        gate, up, d_act = tl.load(at), tl.load(at + F), tl.load(d_act_at)
    else:
        mask = token[:, :, None] < T - t * _SIDE
        gate = tl.load(at, mask=mask, other=0.0)
        up = tl.load(at + F, mask=mask, other=0.0)
        d_act = tl.load(d_act_at, mask=mask, other=0.0)
    d_gate, d_up, act = _gradients(gate, up, d_act)
    left = padded_T - t * _SIDE
    act = act.to(tl.float32)
    _quantize_columns(
        _inf_to_nan(act), _rank(act), act_codes_ptr + f * _SIDE * padded_T + t * _SIDE, padded_T, act_scale_inv_ptr + t * F + f * _SIDE,
        left, IS_EVEN, IS_IN_WORDS, True, IS_POW2, 448.0, 8,
    )  # fmt: skip
    for half in tl.static_range(2):
        if half == 0:
            x = d_gate.to(tl.float32)
        else:
            x = d_up.to(tl.float32)
        rank = _rank(x)
        x = _inf_to_nan(x)
        start = f * _SIDE + half * F
        _quantize_rows(
            x, rank, row_codes_ptr + t * _SIDE * 2 * F + start, 2 * F, row_scale_inv_ptr + start // _SIDE * padded_T + t * _SIDE,
            token, left, IS_EVEN, IS_E4M3, IS_POW2, LARGEST, MAX_EXPONENT,
        )  # fmt: skip
        _quantize_columns(
            x, rank, codes_ptr + start * padded_T + t * _SIDE, padded_T, scale_inv_ptr + t * 2 * F + start,
            left, IS_EVEN, IS_IN_WORDS, IS_E4M3, IS_POW2, LARGEST, MAX_EXPONENT,
        )  # fmt: skip


@triton.jit
def _forward(
    gu_ptr,
    codes_ptr,
    scale_inv_ptr,
    T,
    padded_T,
    F,
    ROWS: tl.constexpr,
    EVEN_T: tl.constexpr,
    EVEN_F: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
    LARGEST: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
):
    tiles = tl.cdiv(F, _SIDE)
    t = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    f = (tl.program_id(0) % tiles).to(tl.int64) * _SIDE
    row = tl.arange(0, ROWS)
    column = tl.arange(0, 128)[None, :]
    at = gu_ptr + t * 2 * F + f + row[:, None] * (2 * F) + column
    if EVEN_T and EVEN_F:
        gate, up = tl.load(at), tl.load(at + F)
    else:
        mask = (row[:, None] < T - t) & (column < F - f)
        gate, up = tl.load(at, mask=mask, other=0.0), tl.load(at + F, mask=mask, other=0.0)
    act = _act(gate, up).to(tl.float32)
    scale, scale_inv = _scales(_amax(tl.max(_rank(act), axis=1)), IS_POW2, LARGEST, MAX_EXPONENT)
    codes = _codes(_inf_to_nan(act), scale[:, None], IS_E4M3, LARGEST)
    at = codes_ptr + t * F + f + row[:, None] * F + column
    scale_inv_at = scale_inv_ptr + f // _SIDE * padded_T + t + row
    if EVEN_T and EVEN_F:
        tl.store(at, codes)
        tl.store(scale_inv_at, scale_inv)
    else:
        tl.store(at, codes, mask=(row[:, None] < padded_T - t) & (column < F - f))
        tl.store(scale_inv_at, scale_inv, mask=row < padded_T - t)


@triton.jit
def _forward_bf16(gu_ptr, act_ptr, T, F, ROWS: tl.constexpr):
    tiles = tl.cdiv(F, _SIDE)
    t = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    f = (tl.program_id(0) % tiles).to(tl.int64) * _SIDE
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 128)[None, :]
    mask = (row < T - t) & (column < F - f)
    at = gu_ptr + t * 2 * F + f + row * (2 * F) + column
    act = _act(tl.load(at, mask=mask), tl.load(at + F, mask=mask))
    tl.store(act_ptr + t * F + f + row * F + column, act, mask=mask)


@triton.jit
def _backward_bf16(gu_ptr, d_act_ptr, d_gu_ptr, act_ptr, T, F, ROWS: tl.constexpr):
    tiles = tl.cdiv(F, _SIDE)
    t = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    f = (tl.program_id(0) % tiles).to(tl.int64) * _SIDE
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 128)[None, :]
    mask = (row < T - t) & (column < F - f)
    wide, narrow = t * 2 * F + f + row * (2 * F) + column, t * F + f + row * F + column
    gate, up = tl.load(gu_ptr + wide, mask=mask), tl.load(gu_ptr + F + wide, mask=mask)
    d_gate, d_up, act = _gradients(gate, up, tl.load(d_act_ptr + narrow, mask=mask))
    tl.store(d_gu_ptr + wide, d_gate, mask=mask)
    tl.store(d_gu_ptr + F + wide, d_up, mask=mask)
    tl.store(act_ptr + narrow, act, mask=mask)
