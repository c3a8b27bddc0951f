"""The native backend on a Hopper GPU: GEMMs within twice a BF16 GEMM's error, a layer against its emulation."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch

from fp8ctl.config.schema import PrecisionConfig, RecipeConfig
from fp8ctl.fp8.backend import choose_backend, native_obstacle
from fp8ctl.fp8.formats import E4M3
from fp8ctl.fp8.gemms import GemmSize
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.fp8.reference import Quantized, dequantize, quantize_block, quantize_row, quantize_tensor, quantize_tile

OBSTACLE = native_obstacle(RecipeConfig(), "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no native backend: {OBSTACLE}"),
]
# ragged: SmolLM2's 576, 192 and 1536, tokens that need padding, contractions whose scales need padding (8960: 70 tiles)
SIZES = [
    (256, 256, 256),
    (1024, 576, 576),
    (1000, 192, 576),
    (17, 1536, 576),
    (1, 576, 1536),
    (64, 1536, 8960),
    (130, 20, 36),
]
SCALES = pytest.mark.parametrize("kind", ["pow2", "fp32"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def assert_gemm(got: torch.Tensor, a: Quantized, b: Quantized, bias: torch.Tensor | None = None) -> None:
    """At most twice the error of a plain BF16 GEMM, both against FP64 of the same quantised operands.

    A BF16 GEMM that rounds its result has an error of 0.0017; for FP32 results it is one that rounds it too.
    """
    a_MK, b_NK = dequantize(*a).double(), dequantize(*b).double()
    shift = 0 if bias is None else bias.double()
    exact = a_MK @ b_NK.t() + shift
    plain = (a_MK.bfloat16() @ b_NK.bfloat16().t()).double() + shift
    assert got.shape == exact.shape
    assert (got.double() - exact).norm() <= 2 * (plain.bfloat16().double() - exact).norm()


@SCALES
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["to-bf16", "to-fp32"])
@pytest.mark.parametrize("b_by", ["block", "tile"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_gemm_nt(kind: str, size: tuple[int, int, int], out_dtype: torch.dtype, b_by: str, has_bias: bool) -> None:
    from fp8ctl.fp8.native import gemm_nt

    m, n, k = size
    a = quantize_tile(normal(m, k, seed=1), E4M3, kind)  # type: ignore[arg-type]
    b = (quantize_block if b_by == "block" else quantize_tile)(normal(n, k, seed=2), E4M3, kind)  # type: ignore[arg-type]
    bias = normal(n, seed=3) if has_bias else None
    got = gemm_nt(a, b, out_dtype, bias)
    assert got.dtype == out_dtype
    assert_gemm(got, a, b, bias)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("size", [(256, 256, 256), (1000, 192, 576), (512, 1536, 8960), (512, 3584, 18944)], ids=str)
def test_fast_accumulation_stays_within_its_bound(granularity: str, size: tuple[int, int, int]) -> None:
    """Recipes by row and by tensor: within 1 % of the exact product of the same quantised operands (norms)."""
    m, n, k = size
    recipe = RecipeConfig(name=granularity, granularity=granularity, scale="fp32")  # type: ignore[arg-type]
    x, w = normal(m, k, seed=1), normal(n, k, seed=2)
    from fp8ctl.fp8.native import NATIVE

    a, _ = NATIVE["cublas"].input(x, recipe, rows=True, columns=False)
    (b,) = NATIVE["cublas"].weights([w], recipe, transposed=False, join=False)
    assert a is not None
    got = NATIVE["cublas"].gemm("fprop", recipe, a, b, GemmSize(m, n, k), torch.bfloat16).double()
    quantize = {"row": quantize_row, "tensor": quantize_tensor}[granularity]
    exact = dequantize(*quantize(x, E4M3, "fp32")).double() @ dequantize(*quantize(w, E4M3, "fp32")).double().t()
    assert (got - exact).norm() <= 0.01 * exact.norm()


def test_gemm_nt_refuses_blocks_on_the_left_and_has_nothing_to_do_for_no_rows() -> None:
    from fp8ctl.fp8.native import gemm_nt

    block = quantize_block(normal(256, 256, seed=1))
    with pytest.raises(ValueError, match="the first matrix must be quantised by tiles"):
        gemm_nt(block, block, torch.bfloat16)
    nothing = quantize_tile(normal(0, 256, seed=1))
    assert gemm_nt(nothing, block, torch.bfloat16).shape == (0, 256)


def layers(n: int, k: int, dtype: torch.dtype, bias: bool, **recipe: str) -> tuple[Fp8Linear, Fp8Linear]:
    torch.manual_seed(0)
    native = Fp8Linear(k, n, bias, recipe=RecipeConfig(**recipe), backend="native", device="cuda", dtype=dtype)  # type: ignore[arg-type]
    emulated = copy.deepcopy(native)
    emulated.backend = "reference"
    return native, emulated


def run(layer: Fp8Linear, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad} | (
        {"db": layer.bias.grad} if layer.bias is not None else {}
    )  # type: ignore[dict-item]


@DTYPES
@SCALES
@pytest.mark.parametrize("wgrad", ["fp8", "bf16"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_layer_computes_what_its_emulation_computes(
    dtype: torch.dtype, kind: str, wgrad: str, size: tuple[int, int, int]
) -> None:
    m, n, k = size
    native, emulated = layers(n, k, dtype, bias=True, scale=kind, wgrad=wgrad)
    x, dy = normal(m, k, seed=1, dtype=dtype), normal(m, n, seed=2, dtype=dtype) * 1e-3
    got, wanted = run(native, x, dy), run(emulated, x, dy)
    for name, value in wanted.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape
        error = ((got[name] - value).double().norm() / value.double().norm().clamp_min(1e-30)).item()
        assert error < (0.004 if dtype == torch.bfloat16 else 0.001), (name, error)
    assert native.counter.flops == emulated.counter.flops
    padded = any(s % 16 for s in size)
    assert (native.counter.padding_flops > 0) == padded and emulated.counter.padding_flops == 0


def test_backward_keeps_a_byte_a_value_and_shares_the_input_of_siblings() -> None:
    q, _ = layers(1024, 2048, torch.bfloat16, bias=False)
    k, _ = layers(1024, 2048, torch.bfloat16, bias=False)
    x = normal(8192, 2048, seed=1).requires_grad_()
    q.forward_together(x * 1, (q, k))  # cuBLAS takes its workspace
    gc.collect()
    before = torch.cuda.memory_allocated()
    h = x * 1
    y = q.forward_together(h, (q, k))
    del h
    kept = torch.cuda.memory_allocated() - before - sum(t.numel() * 2 for t in y)
    # one FP8 copy for both, with an FP32 scale for 128 values; the BF16 input itself is gone
    assert kept <= 8192 * 2048 * (1 + 4 / 128) + (1 << 20)


def test_an_input_changed_in_place_is_quantised_anew() -> None:
    native, emulated = layers(256, 256, torch.bfloat16, bias=False)
    x = normal(128, 256, seed=1)
    with torch.no_grad():
        first = native(x)
        assert torch.equal(native(x), first)
        x.mul_(2)
        assert torch.equal(native(x), 2 * first)


def test_a_kept_weight_is_quantised_again_when_told() -> None:
    native, _ = layers(256, 256, torch.bfloat16, bias=False)
    native.weight_is_kept = True
    x = normal(128, 256, seed=1)
    with torch.no_grad():
        first = native(x)
        assert native.quantized_weight() is native.quantized_weight()
        native.weight.data.mul_(2)  # as DeepSpeed does: behind the tensor's version
        native.weight_changed()
        assert torch.equal(native(x), 2 * first)


def test_a_non_finite_value_shows_in_the_outputs_it_touches() -> None:
    native, _ = layers(192, 576, torch.bfloat16, bias=False)
    x = normal(150, 576, seed=1)
    x[3, 5] = math.inf
    with torch.no_grad():
        y = native(x)
    assert y[3].isnan().all() and y[[i for i in range(150) if i != 3]].isfinite().all()
    x[3], x[4] = 0.0, 0.0
    with torch.no_grad():
        y = native(x)
    assert not y[3].any() and y.isfinite().all()


@pytest.mark.parametrize("leading", [(3, 50), (1, 1), (2, 0), ()])
def test_any_leading_dimensions(leading: tuple[int, ...]) -> None:
    native, emulated = layers(192, 576, torch.bfloat16, bias=True)
    x, dy = normal(*leading, 576, seed=1), normal(*leading, 192, seed=2)
    got, wanted = run(native, x, dy), run(emulated, x, dy)
    for name, value in wanted.items():
        assert got[name].shape == value.shape
        assert torch.allclose(got[name].float(), value.float(), rtol=2e-2, atol=2e-2)


def test_recomputation_gives_the_same_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    plain = torch.nn.Sequential(*(layers(256, 256, torch.bfloat16, bias=False)[0] for _ in range(3)))
    again = copy.deepcopy(plain)
    x = normal(128, 256, seed=1)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(a).sum().backward()
    checkpoint(again, b, use_reentrant=False).sum().backward()
    assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    for one, two in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    assert all(layer.counter.flops["fprop"]["bf16"] == 0 for layer in again)


def test_statistics_are_those_of_the_emulation() -> None:
    seen: list[dict[str, object]] = []
    for layer in layers(192, 576, torch.bfloat16, bias=False):
        found: dict[str, object] = {}
        layer.stats_sink = lambda role, stats, found=found: found.update({role: stats})
        run(layer, normal(150, 576, seed=1), normal(150, 192, seed=2))
        seen.append(found)
    assert seen[0] == seen[1] and list(seen[0]) == ["input", "weight", "grad_output"]


def test_auto_takes_native_here() -> None:
    for asked in ("auto", "native"):
        chosen = choose_backend(asked, recipe=PrecisionConfig().recipe, device_type="cuda")
        assert chosen.name == "native" and "ran right on this" in chosen.reason
    assert choose_backend("auto", recipe=RecipeConfig(), device_type="cpu").name == "reference"
    e5m2 = choose_backend("auto", recipe=RecipeConfig(grad_format="e5m2"), device_type="cuda")
    assert (e5m2.name, e5m2.gemm) == ("native", "triton") and "E5M2" in e5m2.gemm_reason
