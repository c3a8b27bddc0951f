"""The three GEMMs against reference-quantised operands, and that none runs uncounted."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.fp8.formats import E4M3, FORMATS
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.fp8.reference import Quantized, dequantize, gemm_nt, quantize_block, quantize_tile
from fp8ctl.fp8.stats import QuantStats

M, N, K = 150, 192, 200  # ragged everywhere
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
FLOPS = 2 * M * N * K


def make(precision: str, dtype: torch.dtype, *, bias: bool = False, **recipe: str) -> Fp8Linear:
    torch.manual_seed(0)
    return Fp8Linear(K, N, bias, precision=precision, recipe=RecipeConfig(**recipe), dtype=dtype)  # type: ignore[arg-type]


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(M, K, generator=generator).to(dtype).requires_grad_(),
        (torch.randn(M, N, generator=generator) * 1e-3).to(dtype),
    )


def run(layer: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    y = layer(x)
    y.backward(dy)
    found = {
        "fprop": y.detach(),
        "dgrad": x.grad,
        "wgrad": layer.weight.grad,
        "bias": getattr(layer.bias, "grad", None),
    }
    return {k: v for k, v in found.items() if v is not None}


def assert_gemm(got: torch.Tensor, a: Quantized, b: Quantized, bias: torch.Tensor | None = None) -> None:
    """At most twice the error of a plain GEMM of the same dtype, both against the FP64 product of the same operands."""
    a_MK, b_NK = dequantize(*a).double(), dequantize(*b).double()
    exact = a_MK @ b_NK.t() + (0 if bias is None else bias.double())
    plain = (a_MK.to(got.dtype) @ b_NK.to(got.dtype).t()).double() + (0 if bias is None else bias.double())
    error, bound = (got.double() - exact).norm(), (plain.to(got.dtype).double() - exact).norm()
    assert error <= 2 * bound
    assert torch.allclose(
        got, gemm_nt(a, b, got.dtype, bias), rtol=2e-2 if got.dtype == torch.bfloat16 else 1e-4, atol=1e-5
    )


@DTYPES
@pytest.mark.parametrize("scale", ["pow2", "fp32"])
@pytest.mark.parametrize("grad_format", ["e4m3", "e5m2"])
def test_each_gemm_multiplies_operands_quantised_as_the_recipe_says(
    dtype: torch.dtype, scale: str, grad_format: str
) -> None:
    layer = make("fp8", dtype, bias=True, scale=scale, grad_format=grad_format)
    x, dy = inputs(dtype)
    got = run(layer, x, dy)
    kind, grad = layer.recipe.scale, FORMATS[grad_format]
    x, w = x.detach(), layer.weight.detach()

    w_q = quantize_block(w, E4M3, kind)
    assert_gemm(got["fprop"], quantize_tile(x, E4M3, kind), w_q, layer.bias.detach())
    assert_gemm(got["dgrad"], quantize_tile(dy, grad, kind), w_q.t())
    assert_gemm(got["wgrad"], quantize_tile(dy.t(), grad, kind), quantize_tile(x.t(), E4M3, kind))
    assert torch.equal(got["bias"], dy.sum(0))
    assert all(t.dtype == dtype for t in got.values())


def test_bf16_wgrad_uses_the_tensors_as_they_are() -> None:
    layer = make("fp8", torch.bfloat16, wgrad="bf16")
    x, dy = inputs(torch.bfloat16)
    assert torch.equal(run(layer, x, dy)["wgrad"], dy.t() @ x.detach())
    assert layer.counter.flops == {
        "fprop": {"fp8": FLOPS, "bf16": 0},
        "dgrad": {"fp8": FLOPS, "bf16": 0},
        "wgrad": {"fp8": 0, "bf16": FLOPS},
    }


@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(M,), (3, 50), (1, 1), (2, 0), ()])
def test_bf16_precision_is_bit_equal_to_nn_linear(dtype: torch.dtype, bias: bool, leading: tuple[int, ...]) -> None:
    layer = make("bf16", dtype, bias=bias)
    plain = nn.Linear(K, N, bias, dtype=dtype)
    plain.load_state_dict(layer.state_dict())
    results = []
    for module in (layer, plain):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(*leading, K, generator=generator).to(dtype).requires_grad_()
        results.append(run(module, x, torch.randn(*leading, N, generator=generator).to(dtype)))
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


def test_leading_dimensions_are_only_a_view() -> None:
    layer = make("fp8", torch.bfloat16)
    x, dy = inputs(torch.bfloat16)
    flat = run(layer, x, dy)
    twin = make("fp8", torch.bfloat16)
    folded = run(twin, x.detach().view(3, 50, K).requires_grad_(), dy.view(3, 50, N))
    assert torch.equal(folded["fprop"].view(M, N), flat["fprop"])
    assert torch.equal(folded["dgrad"].view(M, K), flat["dgrad"])
    assert torch.equal(folded["wgrad"], flat["wgrad"])


def test_only_gemms_that_run_are_counted() -> None:
    layer = make("fp8", torch.bfloat16)
    x, dy = inputs(torch.bfloat16)
    with torch.no_grad():
        layer(x)
    assert layer.counter.flops["fprop"] == {"fp8": FLOPS, "bf16": 0}
    assert layer.counter.flops["dgrad"] == layer.counter.flops["wgrad"] == {"fp8": 0, "bf16": 0}

    layer.counter.reset()
    layer(x.detach()).backward(dy)  # the input needs no gradient: no dgrad
    assert [layer.counter.flops[d]["fp8"] for d in ("fprop", "dgrad", "wgrad")] == [FLOPS, 0, FLOPS]

    layer.counter.reset()
    layer.weight.requires_grad_(False)
    layer(x).backward(dy)  # a frozen weight: no wgrad
    assert [layer.counter.flops[d]["fp8"] for d in ("fprop", "dgrad", "wgrad")] == [FLOPS, FLOPS, 0]


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_recomputation_is_counted_and_changes_nothing(precision: str) -> None:
    """Three linears under checkpoint: what the backward pass recomputes is counted, the gradients are the same bits."""
    torch.manual_seed(3)
    plain = nn.Sequential(*(Fp8Linear(64, 64, precision=precision, dtype=torch.bfloat16) for _ in range(3)))  # type: ignore[arg-type]
    recomputed = copy.deepcopy(plain)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(a).sum().backward()
    checkpoint(recomputed, b, use_reentrant=False).sum().backward()
    assert torch.equal(a.grad, b.grad)
    for one, two in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    flops = 2 * 32 * 64 * 64
    for layer in plain:
        assert [layer.counter.flops[d][precision] for d in ("fprop", "dgrad", "wgrad")] == [flops] * 3
    for layer in recomputed:
        assert [layer.counter.flops[d][precision] for d in ("fprop", "dgrad", "wgrad")] == [2 * flops, flops, flops]


def test_a_gemm_that_recomputation_never_reaches_counts_once() -> None:
    """checkpoint ends a recomputation as soon as it has every tensor that backward needs."""
    first, second = (Fp8Linear(64, 64, dtype=torch.bfloat16) for _ in range(2))

    def block(x: torch.Tensor) -> torch.Tensor:
        h = first(x)
        y = h.square()  # saves the last tensor
        with torch.no_grad():
            shift = second(h)
        return y + shift

    checkpoint(block, torch.randn(8, 64, dtype=torch.bfloat16).requires_grad_(), use_reentrant=False).sum().backward()
    flops = 2 * 8 * 64 * 64
    assert first.counter.flops["fprop"]["fp8"] == 2 * flops
    assert second.counter.flops["fprop"]["fp8"] == flops


def test_backward_follows_the_precision_of_its_own_forward() -> None:
    layer = make("fp8", torch.bfloat16)
    x, dy = inputs(torch.bfloat16)
    expected = run(make("fp8", torch.bfloat16), x, dy)
    x = x.detach().requires_grad_()
    y = layer(x)
    layer.precision, layer.recipe = "bf16", RecipeConfig(grad_format="e5m2", wgrad="bf16")
    y.backward(dy)
    assert torch.equal(x.grad, expected["dgrad"]) and torch.equal(layer.weight.grad, expected["wgrad"])
    assert layer.counter.flops == {d: {"fp8": FLOPS, "bf16": 0} for d in ("fprop", "dgrad", "wgrad")}


def test_switching_changes_the_next_forward() -> None:
    layer = make("fp8", torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    in_fp8 = layer(x)
    layer.precision = "bf16"
    in_bf16 = layer(x)
    assert torch.equal(in_bf16, nn.functional.linear(x, layer.weight)) and not torch.equal(in_fp8, in_bf16)
    assert layer.counter.flops["fprop"] == {"fp8": FLOPS, "bf16": FLOPS}


def test_zero_gradients_and_expanded_gradients() -> None:
    layer = make("fp8", torch.bfloat16, bias=True)
    x, dy = inputs(torch.bfloat16)
    got = run(layer, x, torch.zeros_like(dy))
    assert not got["dgrad"].any() and not got["wgrad"].any() and not got["bias"].any()
    layer.zero_grad()
    layer(x).sum().backward()  # the gradient of sum() is one number expanded
    assert torch.equal(layer.bias.grad, torch.full((N,), float(M)).bfloat16())


def test_a_non_finite_input_shows_in_the_outputs_it_touches() -> None:
    layer = make("fp8", torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    x = x.detach()
    x[3, 5] = math.inf
    y = layer(x)
    assert y[3].isnan().all() and y[[i for i in range(M) if i != 3]].isfinite().all()


def test_statistics_of_all_roles_in_either_precision() -> None:
    for precision in ("fp8", "bf16"):
        layer = make(precision, torch.bfloat16)
        seen: dict[str, QuantStats] = {}
        layer.stats_sink = lambda role, stats, seen=seen: seen.update({role: stats})
        x, dy = inputs(torch.bfloat16)
        run(layer, x, dy)
        assert list(seen) == ["input", "weight", "grad_output"]
        assert seen["input"].amax == x.detach().abs().max().item()
        assert seen["weight"].amax == layer.weight.detach().abs().max().item()
        assert seen["grad_output"].amax == dy.abs().max().item()
        assert all(28 < s.sqnr_db < 34 for s in seen.values())


def test_from_linear_keeps_the_parameter_objects() -> None:
    plain = nn.Linear(K, N, dtype=torch.bfloat16).eval()
    layer = Fp8Linear.from_linear(plain, precision="fp8", recipe=RecipeConfig())
    assert layer.weight is plain.weight and layer.bias is plain.bias and not layer.training
    assert list(layer.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    assert repr(layer) == "Fp8Linear(in_features=200, out_features=192, bias=True, precision=fp8)"


def test_a_frozen_weight_is_quantised_once_and_not_trained() -> None:
    layer = make("fp8", torch.bfloat16)
    x, _ = inputs(torch.bfloat16)
    expected = layer(x)
    layer.weight_is_frozen = True
    with pytest.raises(AssertionError, match="a frozen weight can't be trained"):
        layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
        in_pow2 = layer.quantized_weight()
        assert layer.quantized_weight() is in_pow2
        layer.recipe = RecipeConfig(scale="fp32")
        assert not torch.equal(layer.quantized_weight()[0], in_pow2[0])
        layer.weight_is_frozen, layer.recipe = False, RecipeConfig()
        layer.weight.mul_(2)
        assert torch.equal(layer(x), 2 * expected)
    assert list(layer.state_dict()) == ["weight"]


def test_a_gemm_that_fails_is_not_counted() -> None:
    layer = make("bf16", torch.bfloat16)
    with pytest.raises(RuntimeError):
        layer(torch.randn(2, K))  # FP32 into a BF16 layer
    assert not any(layer.counter.flops["fprop"].values())


def test_double_backward_is_refused() -> None:
    layer = make("fp8", torch.float32)
    x, dy = inputs(torch.float32)
    (dx,) = torch.autograd.grad(layer(x), x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
