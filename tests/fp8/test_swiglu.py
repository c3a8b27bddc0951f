"""Fused SwiGLU equals quantising what the BF16 kernels return, bit for bit, and those equal the formula.

On a CPU this runs in Triton's interpreter (TRITON_INTERPRET=1), where PyTorch's casts take the place of the hardware's:
saturating, NaN with code 0x7F. The same on a GPU, larger and with nothing replaced: `tests/gpu/test_swiglu_gpu.py`.
"""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch

from fp8ctl.fp8 import reference
from fp8ctl.fp8.formats import E4M3, E5M2, Fp8Format

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
]
KINDS = pytest.mark.parametrize("kind", ["pow2", "fp32"])


@pytest.fixture(autouse=True)
def exact_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def cast(data: object, source: object, target: object, rounding: object) -> object:
        fmt = {"fp8e4nv": E4M3, "fp8e5": E5M2}.get(str(target))
        if fmt is not None:
            x = torch.from_numpy(data)  # type: ignore[arg-type]
            codes = x.clamp(-fmt.largest, fmt.largest).to(fmt.dtype).view(torch.uint8)
            return torch.where(x.isnan(), 0x7F, codes).numpy()
        if (str(source), str(target)) == ("bf16", "fp32"):
            return (data.astype("uint32") << 16).view("float32")  # type: ignore[attr-defined]
        if (str(source), str(target)) == ("fp32", "bf16"):
            return torch.from_numpy(data).bfloat16().view(torch.uint16).numpy()  # type: ignore[arg-type]
        return convert(data, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", cast)


def inputs(t: int, f: int) -> tuple[torch.Tensor, torch.Tensor]:
    """gate|up and d_act with zeros, inf, NaN, subnormal and huge values, whole tiles of some."""
    generator = torch.Generator().manual_seed(t * 1000 + f)
    gu = torch.randn(t, 2 * f, generator=generator)
    d_act = torch.randn(t, f, generator=generator) * 1e-3
    if t > 100:
        gu[3], d_act[5], gu[:, 6] = 0.0, 0.0, -0.0
        gu[7, 9], gu[20, f + 30], d_act[40, 77], d_act[41, 78] = math.inf, math.nan, -math.inf, -math.nan
        gu[60] *= 1e30
        gu[61, :f], gu[62, :f], gu[63, f:] = -120.0, 3e38, 3e38
        gu[64:80], d_act[64:80] = gu[64:80] * 2.0**-70, d_act[64:80] * 2.0**-70
        gu[90], d_act[91], gu[:, 12] = math.nan, -math.inf, math.inf
    return gu.bfloat16(), d_act.bfloat16()


def same(got: reference.Quantized, wanted: reference.Quantized) -> bool:
    return got.codes.dtype == wanted.codes.dtype and all(
        a.shape == b.shape and torch.equal(a.contiguous().view(as_bits), b.contiguous().view(as_bits))
        for a, b, as_bits in zip(got, wanted, (torch.uint8, torch.int32), strict=True)
    )


def padded(x: torch.Tensor, pad_to: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % pad_to))


@pytest.mark.parametrize("size", [(130, 144), (1, 16), (5, 27)], ids=str)
def test_bf16_kernels_compute_the_formula(size: tuple[int, int]) -> None:
    from fp8ctl.fp8.swiglu import swiglu_backward_bf16, swiglu_bf16

    gu, d_act = inputs(*size)
    gate, up = gu.chunk(2, dim=1)
    d_gate, d_up, act = reference.swiglu_backward(gate, up, d_act)
    got_d_gu, got_act = swiglu_backward_bf16(gu, d_act)
    assert torch.equal(swiglu_bf16(gu).nan_to_num(7.0), got_act.nan_to_num(7.0))
    for got, wanted in ((got_act, act), (got_d_gu, torch.cat([d_gate, d_up], dim=1))):
        torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=1e-30, equal_nan=True)


@KINDS
@pytest.mark.parametrize("pad_to", [1, 16])
@pytest.mark.parametrize("size", [(130, 144), (32, 128), (1, 16)], ids=str)
def test_forward_equals_unfused(kind: str, pad_to: int, size: tuple[int, int]) -> None:
    from fp8ctl.fp8.swiglu import swiglu_bf16, swiglu_quantize

    gu, _ = inputs(*size)
    act = padded(swiglu_bf16(gu), pad_to)
    got = swiglu_quantize(gu, E4M3, kind, pad_to=pad_to)  # type: ignore[arg-type]
    assert same(got, reference.quantize_tile(act, E4M3, kind))  # type: ignore[arg-type]
    assert got.codes.is_contiguous() and got.scale_inv.t().is_contiguous()


@KINDS
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("size", "pad_to"), [((130, 256), 16), ((130, 128), 4), ((128, 128), 4), ((1, 128), 16)], ids=str
)
def test_backward_equals_unfused(kind: str, fmt: Fp8Format, size: tuple[int, int], pad_to: int) -> None:
    from fp8ctl.fp8.swiglu import swiglu_backward_bf16, swiglu_backward_quantize

    gu, d_act = inputs(*size)
    d_gu, act = (padded(x, pad_to) for x in swiglu_backward_bf16(gu, d_act))
    rows, columns, act_columns = swiglu_backward_quantize(gu, d_act, fmt, kind, pad_to=pad_to)  # type: ignore[arg-type]
    assert same(rows, reference.quantize_tile(d_gu, fmt, kind))  # type: ignore[arg-type]
    assert same(columns, reference.quantize_tile(d_gu.t(), fmt, kind))  # type: ignore[arg-type]
    assert same(act_columns, reference.quantize_tile(act.t(), E4M3, kind))  # type: ignore[arg-type]
    for q in (rows, columns, act_columns):
        assert q.codes.is_contiguous() and q.scale_inv.t().is_contiguous()


def test_no_tokens() -> None:
    from fp8ctl.fp8 import swiglu

    gu, d_act = torch.empty(0, 256, dtype=torch.bfloat16), torch.empty(0, 128, dtype=torch.bfloat16)
    assert swiglu.swiglu_bf16(gu).shape == (0, 128) and swiglu.swiglu_backward_bf16(gu, d_act)[0].shape == (0, 256)
    assert [x.shape for x in swiglu.swiglu_quantize(gu, pad_to=16)] == [(0, 128), (0, 1)]
    rows, columns, act_columns = swiglu.swiglu_backward_quantize(gu, d_act, pad_to=16)
    assert [x.shape for x in (*rows, *columns, *act_columns)] == [
        (0, 256),
        (0, 2),
        (256, 0),
        (256, 0),
        (128, 0),
        (128, 0),
    ]


def test_what_is_refused() -> None:
    from fp8ctl.fp8 import swiglu

    gu, d_act = torch.zeros(4, 288, dtype=torch.bfloat16), torch.zeros(4, 144, dtype=torch.bfloat16)
    for wrong in (gu.float(), gu[:, :272], gu[0], gu.t().contiguous().t(), gu[:, :255].contiguous()):
        with pytest.raises(ValueError, match="expected gate and up as one contiguous bfloat16 matrix"):
            swiglu.swiglu_quantize(wrong)
    with pytest.raises(ValueError, match="expected gate and up of a multiple of 16 columns each, got 136"):
        swiglu.swiglu_quantize(gu[:, :272].contiguous())
    with pytest.raises(ValueError, match=r"expected the gradient as a contiguous bfloat16 matrix \(4, 144\)"):
        swiglu.swiglu_backward_bf16(gu, d_act[:, :128])
    with pytest.raises(ValueError, match="expected gate and up of a multiple of 128 columns each, got 144"):
        swiglu.swiglu_backward_quantize(gu, d_act)
