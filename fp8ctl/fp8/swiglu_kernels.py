"""The kernels of `swiglu.py`.

How they come near the memory's speed, which leaves the backward pass some 80 instructions for a value:

- Values stay in pairs, two BF16 columns to a word, from loading to rounding; maxima are taken of pairs.
- A program of the backward pass reads a square of 128 tokens x 128 columns as [32, 4, 64] words, token 4i + j at [i, j]. A
  thread then holds four neighbouring tokens of a column, whose codes it packs into one word, and the transposed codes are
  moved and stored word by word.
- It fills a multiprocessor's registers alone, so nothing hides its waiting for memory. Therefore it has what the next program
  there will load brought into the L2 cache while it computes.
- No masks for inf and NaN: x + 0 x turns inf into NaN, maxima ignore NaN, the hardware's casts saturate and give NaN its code.

Instructions that Triton has no name for are written as PTX; its interpreter takes the plain lines beside them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8ctl.fp8.formats import E4M3, E5M2, TILE
from fp8ctl.fp8.generic_kernels import _scales

# Of constexpr, since kernels can't see other globals
_SIDE = tl.constexpr(TILE)
_WORDS = tl.constexpr(TILE // 2)
_E4M3_EXPONENT = tl.constexpr(E4M3.max_exponent)
_E5M2_EXPONENT = tl.constexpr(E5M2.max_exponent)
_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _sigmoid(gate):
    """By the hardware's own exponential and reciprocal: the checked ones cost 15 instructions more."""
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
    return sigmoid


@triton.jit
def _gradients(gate, up, d_act):
    """(d_gate, d_up, act) in FP32; d silu / d gate = s + g s (1 - s). Its fma is spelled out so that every kernel rounds alike."""
    sigmoid = _sigmoid(gate)
    silu = gate * sigmoid
    slope = tl.fma(silu, 1.0 - sigmoid, sigmoid)
    return d_act * up * slope, d_act * silu, silu * up


@triton.jit
def _unpack(pair):
    """(even columns, odd columns) in FP32 of words of two BF16."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _pack(even, odd):
    """Both rounded to BF16, then inf turned into NaN, in one word."""
    if _IS_INTERPRETED:
        even, odd = even.to(tl.bfloat16).to(tl.float32), odd.to(tl.bfloat16).to(tl.float32)
        even = tl.fma(even, 0.0, even).to(tl.int32, bitcast=True)
        odd = tl.fma(odd, 0.0, odd).to(tl.int32, bitcast=True)
        pair = ((even >> 16) & 0xFFFF) | (odd & -0x10000)
    else:
        pair = tl.inline_asm_elementwise(
            "{ .reg .b32 x, zero; mov.b32 zero, 0; cvt.rn.bf16x2.f32 x, $2, $1; fma.rn.bf16x2 $0, x, zero, x; }",
            "=r,f,f",
            [even, odd],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return pair


@triton.jit
def _larger(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _amax(pair, axis: tl.constexpr):
    """Largest magnitudes along an axis, in pairs as well; NaN where there is nothing else."""
    magnitude = pair & 0x7FFF7FFF
    if _IS_INTERPRETED:
        even, odd = _unpack(magnitude)
        amax = _pack(tl.max(even, axis), tl.max(odd, axis))
    else:
        amax = tl.reduce(magnitude, axis, _larger)
    return amax


@triton.jit
def _scales_or_one(amax, IS_E4M3: tl.constexpr, IS_POW2: tl.constexpr):
    """`formats.scales`; 1 and 1 if amax is NaN. Powers of two in fewer steps than `_scales`: all threads of a column do this."""
    max_exponent: tl.constexpr = _E4M3_EXPONENT if IS_E4M3 else _E5M2_EXPONENT
    bits = amax.to(tl.int32, bitcast=True)
    # one comparison finds 0, which wraps around, and NaN
    has_some = (bits - 1).to(tl.uint32, bitcast=True) < 0x7F7FFFFF
    if IS_POW2:
        scale_inv = tl.maximum(((bits + 0x1FFFFF) & 0x7F800000) - (max_exponent << 23), 0x00800000)
        scale_inv = tl.where(has_some, scale_inv, 0x3F800000)
        # the exponents of the two add up to that of 1, twice
        scale = (2 * 0x3F800000 - scale_inv).to(tl.float32, bitcast=True)
        scale_inv = scale_inv.to(tl.float32, bitcast=True)
    else:
        scale, scale_inv = _scales(tl.where(has_some, bits, 0), False, 1.75 * 2.0**max_exponent, max_exponent)
    return scale, scale_inv


@triton.jit
def _two_codes(low, high, IS_E4M3: tl.constexpr):
    """Codes of low and high in the bytes of an int16. The casts saturate."""
    if _IS_INTERPRETED:
        dtype: tl.constexpr = tl.float8e4nv if IS_E4M3 else tl.float8e5
        low, high = low.to(dtype).to(tl.uint8, bitcast=True), high.to(dtype).to(tl.uint8, bitcast=True)
        codes = (low.to(tl.int32) | (high.to(tl.int32) << 8)).to(tl.int16)
    else:
        asm: tl.constexpr = "cvt.rn.satfinite." + ("e4m3" if IS_E4M3 else "e5m2") + "x2.f32 $0, $2, $1;"
        codes = tl.inline_asm_elementwise(asm, "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1)
    return codes


@triton.jit
def _four_codes(x, IS_E4M3: tl.constexpr):
    """[32, 4, 64] -> [32, 64], the codes of four tokens in a word."""
    tokens_02, tokens_13 = tl.split(tl.reshape(tl.permute(x, (0, 2, 1)), (32, _WORDS, 2, 2)))
    x0, x2 = tl.split(tokens_02)
    x1, x3 = tl.split(tokens_13)
    if _IS_INTERPRETED:
        low, high = _two_codes(x0, x1, IS_E4M3), _two_codes(x2, x3, IS_E4M3)
        codes = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        cvt: tl.constexpr = "cvt.rn.satfinite." + ("e4m3" if IS_E4M3 else "e5m2") + "x2.f32"
        asm: tl.constexpr = "{ .reg .b16 a, b; " + cvt + " a, $2, $1; " + cvt + " b, $4, $3; mov.b32 $0, {a, b}; }"
        codes = tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1)
    return codes


@triton.jit
def _store_tokens(ptr, words, stride, tokens, IS_EVEN: tl.constexpr):
    """Words of four tokens [32, 64], as every other row of a matrix whose columns are tokens and of which `tokens` are left."""
    row, i = 2 * tl.arange(0, _WORDS)[:, None], tl.arange(0, 32)[None, :]
    at = ptr.to(tl.pointer_type(tl.int32)) + row * (stride // 4) + i
    if IS_EVEN:
        tl.store(at, tl.trans(words))
    else:
        tl.store(at, tl.trans(words), mask=4 * i < tokens)


@triton.jit
def _quantize_columns(
    pair,
    codes_ptr,
    stride,
    scale_inv_ptr,
    tokens,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
):
    """A square by tiles along the tokens, transposed."""
    even_amax, odd_amax = _unpack(_amax(_amax(pair, 1), 0))
    even_scale, even_scale_inv = _scales_or_one(even_amax, IS_E4M3, IS_POW2)
    odd_scale, odd_scale_inv = _scales_or_one(odd_amax, IS_E4M3, IS_POW2)
    even, odd = _unpack(pair)
    even = _four_codes(even * even_scale[None, None, :], IS_E4M3)
    odd = _four_codes(odd * odd_scale[None, None, :], IS_E4M3)
    _store_tokens(codes_ptr, even, stride, tokens, IS_EVEN)
    _store_tokens(codes_ptr + stride, odd, stride, tokens, IS_EVEN)
    at = scale_inv_ptr + 2 * tl.arange(0, _WORDS)
    tl.store(at, even_scale_inv)
    tl.store(at + 1, odd_scale_inv)


@triton.jit
def _quantize_rows(
    pair,
    codes_ptr,
    stride,
    scale_inv_ptr,
    token,
    tokens,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
):
    """A square by tiles along its rows."""
    even_amax, odd_amax = _unpack(_amax(pair, 2))
    scale, scale_inv = _scales_or_one(tl.maximum(even_amax, odd_amax), IS_E4M3, IS_POW2)
    even, odd = _unpack(pair)
    codes = _two_codes(even * scale[:, :, None], odd * scale[:, :, None], IS_E4M3)
    at = (
        codes_ptr.to(tl.pointer_type(tl.int16))
        + token[:, :, None] * (stride // 2)
        + tl.arange(0, _WORDS)[None, None, :]
    )
    if IS_EVEN:
        tl.store(at, codes)
        tl.store(scale_inv_ptr + token, scale_inv)
    else:
        tl.store(at, codes, mask=token[:, :, None] < tokens)
        tl.store(scale_inv_ptr + token, scale_inv, mask=token < tokens)


@triton.jit
def _fetch(ptr):
    """Has the 128 bytes around each address brought into the L2 cache."""
    if not _IS_INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _fetch_square(gu_ptr, d_act_ptr, square, T, F):
    """What a later program will load. A square's row of one matrix is 256 bytes."""
    t = (square // (F // _SIDE)).to(tl.int64) * _SIDE
    f = (square % (F // _SIDE)).to(tl.int64) * _SIDE
    line = tl.arange(0, 2 * _SIDE)
    token = tl.minimum(line // 2, T - 1 - t).to(tl.int32)
    word = line % 2 * (_WORDS // 2)
    at = gu_ptr + t * F + f // 2 + token * F + word
    _fetch(at)
    _fetch(at + F // 2)
    _fetch(d_act_ptr + t * (F // 2) + f // 2 + token * (F // 2) + word)


@triton.jit
def backward(
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
    AHEAD: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
):
    squares = F // _SIDE
    t = (tl.program_id(0) // squares).to(tl.int64) * _SIDE
    f = (tl.program_id(0) % squares).to(tl.int64) * _SIDE
    token = 4 * tl.arange(0, 32)[:, None] + tl.arange(0, 4)[None, :]
    word = tl.arange(0, _WORDS)[None, None, :]
    at = gu_ptr + t * F + f // 2 + token[:, :, None] * F + word
    d_act_at = d_act_ptr + t * (F // 2) + f // 2 + token[:, :, None] * (F // 2) + word
    if IS_EVEN:
        gate, up, d_act = tl.load(at), tl.load(at + F // 2), tl.load(d_act_at)
    else:
        mask = token[:, :, None] < T - t
        gate = tl.load(at, mask=mask, other=0)
        up = tl.load(at + F // 2, mask=mask, other=0)
        d_act = tl.load(d_act_at, mask=mask, other=0)
    if tl.program_id(0) + AHEAD < squares * tl.cdiv(T, _SIDE):
        _fetch_square(gu_ptr, d_act_ptr, tl.program_id(0) + AHEAD, T, F)
    even_gate, odd_gate = _unpack(gate)
    even_up, odd_up = _unpack(up)
    even_d_act, odd_d_act = _unpack(d_act)
    even_d_gate, even_d_up, even_act = _gradients(even_gate, even_up, even_d_act)
    odd_d_gate, odd_d_up, odd_act = _gradients(odd_gate, odd_up, odd_d_act)
    act, d_gate, d_up = _pack(even_act, odd_act), _pack(even_d_gate, odd_d_gate), _pack(even_d_up, odd_d_up)
    tokens = padded_T - t
    _quantize_columns(
        act, act_codes_ptr + f * padded_T + t, padded_T, act_scale_inv_ptr + t // _SIDE * F + f,
        tokens, IS_EVEN, True, IS_POW2,
    )  # fmt: skip
    for half in tl.static_range(2):
        if half == 0:
            pair = d_gate
        else:
            pair = d_up
        column = f + half * F
        _quantize_rows(
            pair, row_codes_ptr + t * 2 * F + column, 2 * F, row_scale_inv_ptr + column // _SIDE * padded_T + t,
            token, tokens, IS_EVEN, IS_E4M3, IS_POW2,
        )  # fmt: skip
        _quantize_columns(
            pair, codes_ptr + column * padded_T + t, padded_T, scale_inv_ptr + t // _SIDE * 2 * F + column,
            tokens, IS_EVEN, IS_E4M3, IS_POW2,
        )  # fmt: skip


@triton.jit
def forward(
    gu_ptr,
    codes_ptr,
    scale_inv_ptr,
    T,
    padded_T,
    F,
    ROWS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_E4M3: tl.constexpr,
    IS_POW2: tl.constexpr,
):
    tiles = tl.cdiv(F, _SIDE)
    t = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    tile = (tl.program_id(0) % tiles).to(tl.int64)
    row = tl.arange(0, ROWS)
    word = tl.arange(0, _WORDS)[None, :]
    at = gu_ptr + t * F + tile * _WORDS + row[:, None] * F + word
    if IS_EVEN:
        gate, up = tl.load(at), tl.load(at + F // 2)
    else:
        mask = (row[:, None] < T - t) & (word < F // 2 - tile * _WORDS)
        gate, up = tl.load(at, mask=mask, other=0), tl.load(at + F // 2, mask=mask, other=0)
    even_gate, odd_gate = _unpack(gate)
    even_up, odd_up = _unpack(up)
    pair = _pack(even_gate * _sigmoid(even_gate) * even_up, odd_gate * _sigmoid(odd_gate) * odd_up)
    even_amax, odd_amax = _unpack(_amax(pair, 1))
    scale, scale_inv = _scales_or_one(tl.maximum(even_amax, odd_amax), IS_E4M3, IS_POW2)
    even, odd = _unpack(pair)
    codes = _two_codes(even * scale[:, None], odd * scale[:, None], IS_E4M3)
    at = codes_ptr.to(tl.pointer_type(tl.int16)) + t * (F // 2) + tile * _WORDS + row[:, None] * (F // 2) + word
    scale_inv_at = scale_inv_ptr + tile * padded_T + t + row
    if IS_EVEN:
        tl.store(at, codes)
        tl.store(scale_inv_at, scale_inv)
    else:
        tl.store(at, codes, mask=(row[:, None] < padded_T - t) & (word < F // 2 - tile * _WORDS))
        tl.store(scale_inv_at, scale_inv, mask=row < padded_T - t)


@triton.jit
def forward_bf16(gu_ptr, act_ptr, T, F, ROWS: tl.constexpr):
    tiles = tl.cdiv(F, _SIDE)
    t = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    f = (tl.program_id(0) % tiles).to(tl.int64) * _SIDE
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, _SIDE)[None, :]
    mask = (row < T - t) & (column < F - f)
    at = gu_ptr + t * 2 * F + f + row * (2 * F) + column
    gate, up = tl.load(at, mask=mask).to(tl.float32), tl.load(at + F, mask=mask).to(tl.float32)
    act = (gate * _sigmoid(gate) * up).to(tl.bfloat16)
    tl.store(act_ptr + t * F + f + row * F + column, act, mask=mask)


@triton.jit
def backward_bf16(gu_ptr, d_act_ptr, d_gu_ptr, act_ptr, T, F, ROWS: tl.constexpr):
    tiles = tl.cdiv(F, _SIDE)
    t = (tl.program_id(0) // tiles).to(tl.int64) * ROWS
    f = (tl.program_id(0) % tiles).to(tl.int64) * _SIDE
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, _SIDE)[None, :]
    mask = (row < T - t) & (column < F - f)
    wide, narrow = t * 2 * F + f + row * (2 * F) + column, t * F + f + row * F + column
    gate = tl.load(gu_ptr + wide, mask=mask).to(tl.float32)
    up = tl.load(gu_ptr + F + wide, mask=mask).to(tl.float32)
    d_gate, d_up, act = _gradients(gate, up, tl.load(d_act_ptr + narrow, mask=mask).to(tl.float32))
    tl.store(d_gu_ptr + wide, d_gate.to(tl.bfloat16), mask=mask)
    tl.store(d_gu_ptr + F + wide, d_up.to(tl.bfloat16), mask=mask)
    tl.store(act_ptr + narrow, act.to(tl.bfloat16), mask=mask)
