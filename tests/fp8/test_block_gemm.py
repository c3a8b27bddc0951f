"""The Triton GEMM against the reference, in Triton's interpreter; on a GPU: `tests/gpu/test_block_gemm_gpu.py`."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from fp8ctl.fp8.formats import E4M3, E5M2, Fp8Format
from fp8ctl.fp8.reference import Quantized, gemm_nt, quantize_block, quantize_tile

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def loops_over_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's scalars are arrays of one value, which recent versions of NumPy don't take as a loop's end."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor: object, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))  # type: ignore[attr-defined]

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_and_index)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "formats", [(E4M3, E4M3), (E5M2, E4M3), (E5M2, E5M2)], ids=lambda f: f"{f[0].name}-{f[1].name}"
)
@pytest.mark.parametrize("b_by", ["block", "tile"])
@pytest.mark.parametrize("size", [(64, 64, 128), (130, 20, 36), (17, 200, 300), (1, 144, 130), (100, 1, 256)], ids=str)
def test_equals_the_reference(formats: tuple[Fp8Format, Fp8Format], b_by: str, size: tuple[int, int, int]) -> None:
    from fp8ctl.fp8.block_gemm import block_gemm

    m, n, k = size
    a = quantize_tile(normal(m, k, seed=1), formats[0], "fp32")
    b = (quantize_block if b_by == "block" else quantize_tile)(normal(n, k, seed=2), formats[1])
    for out_dtype, bias in (
        (torch.float32, None),
        (torch.float32, normal(n, seed=3)),
        (torch.float16, normal(n, seed=3).half()),
    ):
        got, wanted = block_gemm(a, b, out_dtype, bias), gemm_nt(a, b, out_dtype, bias)
        assert got.dtype == out_dtype
        torch.testing.assert_close(got, wanted, rtol=2e-3 if out_dtype == torch.float16 else 1e-5, atol=1e-4)


def test_layouts_that_quantisers_write() -> None:
    from fp8ctl.fp8.block_gemm import block_gemm

    a, b = quantize_tile(normal(40, 200, seed=1)), quantize_block(normal(150, 200, seed=2))
    wanted = block_gemm(a, b, torch.float32)
    wide = torch.zeros(40, 256, dtype=torch.uint8)
    wide[:, :200] = a.codes.view(torch.uint8)
    apart = Quantized(wide.view(E4M3.dtype)[:, :200], a.scale_inv.t().contiguous().t())
    spread = Quantized(b.codes, torch.nn.functional.pad(b.scale_inv, (0, 2))[:, :2])
    assert torch.equal(block_gemm(apart, spread, torch.float32), wanted)


def test_nothing_to_do() -> None:
    from fp8ctl.fp8.block_gemm import block_gemm

    some, none = quantize_tile(normal(20, 128, seed=1)), quantize_tile(normal(0, 128, seed=1))
    assert block_gemm(none, some, torch.bfloat16).shape == (0, 20)
    assert block_gemm(some, none, torch.bfloat16).shape == (20, 0)
    empty = quantize_tile(normal(20, 0, seed=1))
    assert torch.equal(block_gemm(empty, empty, torch.float32, torch.arange(20.0)), torch.arange(20.0).expand(20, 20))


def test_what_is_refused() -> None:
    from fp8ctl.fp8.block_gemm import block_gemm

    a, b = quantize_tile(normal(200, 256, seed=1)), quantize_block(normal(200, 256, seed=2))
    with pytest.raises(ValueError, match="the first matrix must be quantised by tiles"):
        block_gemm(b, b, torch.bfloat16)
    with pytest.raises(ValueError, match="the second matrix must be quantised by blocks or tiles"):
        block_gemm(a, Quantized(b.codes, b.scale_inv[:1]), torch.bfloat16)
    with pytest.raises(ValueError, match="contractions of 256 and 128 don't fit each other"):
        block_gemm(a, quantize_tile(normal(200, 128, seed=1)), torch.bfloat16)
    with pytest.raises(ValueError, match=r"the result is bfloat16, float32 or float16, not torch.float64"):
        block_gemm(a, b, torch.float64)
    with pytest.raises(ValueError, match="rows of codes must be contiguous"):
        block_gemm(a, Quantized(b.codes.t().contiguous().t(), b.scale_inv), torch.bfloat16)
