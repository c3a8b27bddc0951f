"""Fused SwiGLU on a GPU: to the bit what quantising the BF16 kernels' results gives, and those are the formula's."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from fp8ctl.fp8 import reference
from fp8ctl.fp8.formats import E4M3, E5M2, Fp8Format

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
]
# even, ragged tokens, padding that ends within 16 bytes, one token
SIZES = [((1024, 1152), 16), ((1000, 8960), 16), ((130, 256), 4), ((1, 128), 16)]
CASES = (
    [(E4M3, "pow2", *s) for s in SIZES] + [(E4M3, "fp32", *s) for s in SIZES] + [(E5M2, "pow2", *s) for s in SIZES[1:2]]
)


def inputs(t: int, f: int) -> tuple[torch.Tensor, torch.Tensor]:
    """gate|up and d_act with zeros of both signs, inf, NaN, subnormal and huge values, whole tiles of some."""
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
    return gu.bfloat16().cuda(), d_act.bfloat16().cuda()


def same(got: reference.Quantized, wanted: reference.Quantized) -> bool:
    return got.codes.dtype == wanted.codes.dtype and all(
        a.shape == b.shape and torch.equal(a.contiguous().view(as_bits), b.contiguous().view(as_bits))
        for a, b, as_bits in zip(got, wanted, (torch.uint8, torch.int32), strict=True)
    )


def padded(x: torch.Tensor, pad_to: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % pad_to))


@pytest.mark.parametrize("size", [(2048, 8960), (130, 144), (1, 16), (5, 27)], ids=str)
def test_bf16_kernels_compute_the_formula(size: tuple[int, int]) -> None:
    from fp8ctl.fp8.swiglu import swiglu_backward_bf16, swiglu_bf16

    gu, d_act = inputs(*size)
    gate, up = gu.chunk(2, dim=1)
    d_gate, d_up, act = reference.swiglu_backward(gate, up, d_act)
    of_d_gate = d_act.float() * up.float() * torch.sigmoid(gate.float())
    got_d_gu, got_act = swiglu_backward_bf16(gu, d_act)
    assert torch.equal(swiglu_bf16(gu).nan_to_num(7.0), got_act.nan_to_num(7.0))
    # One unit of the last place of BF16; where gate is near -1.28 d_gate is a small difference of larger numbers
    for got, wanted, size_of in (
        (got_act, act, act),
        (got_d_gu[:, size[1] :], d_up, d_up),
        (got_d_gu[:, : size[1]], d_gate, of_d_gate),
    ):
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
        off = (got.float() - wanted.float()).abs()
        is_close = off <= 2.0**-7 * wanted.float().abs() + 2.0**-20 * size_of.float().abs() + 1e-30
        assert (is_close | ~wanted.isfinite()).all()
        assert (off > 0).float().mean() < 0.01


@pytest.mark.parametrize("kind", ["pow2", "fp32"])
@pytest.mark.parametrize(("size", "pad_to"), [*SIZES, ((1000, 144), 16)], ids=str)
def test_forward_equals_unfused(kind: str, size: tuple[int, int], pad_to: int) -> None:
    from fp8ctl.fp8.swiglu import swiglu_bf16, swiglu_quantize

    gu, _ = inputs(*size)
    wanted = reference.quantize_tile(padded(swiglu_bf16(gu), pad_to), E4M3, kind)  # type: ignore[arg-type]
    assert same(swiglu_quantize(gu, E4M3, kind, pad_to=pad_to), wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fmt", "kind", "size", "pad_to"), CASES, ids=lambda v: getattr(v, "name", str(v)))
def test_backward_equals_unfused(fmt: Fp8Format, kind: str, size: tuple[int, int], pad_to: int) -> None:
    from fp8ctl.fp8.swiglu import swiglu_backward_bf16, swiglu_backward_quantize

    gu, d_act = inputs(*size)
    d_gu, act = (padded(x, pad_to) for x in swiglu_backward_bf16(gu, d_act))
    rows, columns, act_columns = swiglu_backward_quantize(gu, d_act, fmt, kind, pad_to=pad_to)  # type: ignore[arg-type]
    assert same(rows, reference.quantize_tile(d_gu, fmt, kind))  # type: ignore[arg-type]
    assert same(columns, reference.quantize_tile(d_gu.t(), fmt, kind))  # type: ignore[arg-type]
    assert same(act_columns, reference.quantize_tile(act.t(), E4M3, kind))  # type: ignore[arg-type]


def test_matrices_beyond_two_billion_values() -> None:
    """Offsets need 64 bits: 2^31 values of gate|up, and as many codes."""
    from fp8ctl.fp8.swiglu import swiglu_backward_quantize, swiglu_quantize

    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB of GPU memory")
    t, f = 131072 + 128, 8192
    gu = torch.zeros(t, 2 * f, dtype=torch.bfloat16, device="cuda")
    d_act = torch.zeros(t, f, dtype=torch.bfloat16, device="cuda")
    some_gu, some_d_act = inputs(128, f)
    gu[-128:], d_act[-128:] = some_gu, some_d_act
    got, wanted = swiglu_quantize(gu, pad_to=16), swiglu_quantize(some_gu, pad_to=16)
    assert same(reference.Quantized(got.codes[-128:], got.scale_inv[-128:]), wanted)
    del got
    got_all = swiglu_backward_quantize(gu, d_act, pad_to=16)
    rows, columns, act_columns = swiglu_backward_quantize(some_gu, some_d_act, pad_to=16)
    assert same(reference.Quantized(got_all[0].codes[-128:], got_all[0].scale_inv[-128:]), rows)
    assert same(reference.Quantized(got_all[1].codes[:, -128:], got_all[1].scale_inv[:, -1:]), columns)
    assert same(reference.Quantized(got_all[2].codes[:, -128:], got_all[2].scale_inv[:, -1:]), act_columns)


def test_no_tokens() -> None:
    from fp8ctl.fp8 import swiglu

    gu, d_act = (torch.empty(0, n, dtype=torch.bfloat16, device="cuda") for n in (256, 128))
    assert swiglu.swiglu_bf16(gu).shape == (0, 128) and swiglu.swiglu_backward_bf16(gu, d_act)[0].shape == (0, 256)
    assert swiglu.swiglu_quantize(gu, pad_to=16).codes.shape == (0, 128)
    assert [q.codes.shape for q in swiglu.swiglu_backward_quantize(gu, d_act)] == [(0, 256), (256, 0), (128, 0)]
