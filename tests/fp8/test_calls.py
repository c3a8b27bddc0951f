"""Linears that share an input: joined or not, they compute what their recipe says of them one by one or as one matrix."""

from __future__ import annotations

import copy

import pytest
import torch

from fp8ctl.config.schema import RecipeConfig
from fp8ctl.fp8.linear import Fp8Linear

M, K, SIZES = 150, 192, (256, 128, 128)
GRANULARITIES = pytest.mark.parametrize("granularity", ["block", "row", "tensor"])


def make(granularity: str = "block", precision: str = "fp8", **recipe: str) -> list[Fp8Linear]:
    torch.manual_seed(0)
    chosen = RecipeConfig(granularity=granularity, **recipe)  # type: ignore[arg-type]
    return [Fp8Linear(K, n, precision=precision, recipe=chosen, dtype=torch.bfloat16) for n in SIZES]  # type: ignore[arg-type]


def data() -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(M, K, generator=generator, dtype=torch.bfloat16)
    return x, [torch.randn(M, n, generator=generator, dtype=torch.bfloat16) * 10.0**-i for i, n in enumerate(SIZES)]


def together(layers: list[Fp8Linear]) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    x, dys = data()
    x.requires_grad_()
    ys = layers[0].forward_together(x, layers)
    torch.autograd.backward(ys, dys)
    assert x.grad is not None
    return tuple(y.detach() for y in ys), x.grad


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("wgrad", ["fp8", "bf16", "x_block"])
def test_by_block_each_linear_computes_what_it_computes_alone(precision: str, wgrad: str) -> None:
    layers = make(precision=precision, wgrad=wgrad)
    alone = copy.deepcopy(layers)
    ys, dx = together(layers)
    x, dys = data()
    x.requires_grad_()
    for layer, y, dy in zip(alone, ys, dys, strict=True):
        own = layer(x)
        own.backward(dy)
        assert torch.equal(own, y)
    for one, two in zip(layers, alone, strict=True):
        assert torch.equal(one.weight.grad, two.weight.grad) and torch.equal(one.bias.grad, two.bias.grad)  # type: ignore[arg-type]
        assert one.counter.flops == two.counter.flops
    # the sum over linears may be rounded in between
    assert x.grad is not None and torch.allclose(dx.float(), x.grad.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_by_row_and_by_tensor_they_are_one_matrix(granularity: str) -> None:
    layers = make(granularity, scale="fp32")
    ys, dx = together(layers)
    whole = Fp8Linear(K, sum(SIZES), recipe=layers[0].recipe, dtype=torch.bfloat16)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([layer.weight for layer in layers]))
        whole.bias.copy_(torch.cat([layer.bias for layer in layers]))
    x, dys = data()
    x.requires_grad_()
    y = whole(x)
    y.backward(torch.cat(dys, dim=1))
    assert torch.equal(torch.cat(ys, dim=1), y) and torch.equal(dx, x.grad)  # type: ignore[arg-type]
    assert torch.equal(torch.cat([layer.weight.grad for layer in layers]), whole.weight.grad)  # type: ignore[arg-type, misc]
    flops = [layer.counter.flops["dgrad"]["fp8"] for layer in layers]
    assert sum(flops) == whole.counter.flops["dgrad"]["fp8"] and flops[0] == 2 * flops[1]


@GRANULARITIES
def test_one_that_runs_in_something_else_runs_alone(granularity: str) -> None:
    layers = make(granularity, scale="fp32")
    layers[1].precision = "bf16"
    alone = copy.deepcopy(layers)
    ys, _ = together(layers)
    x, _ = data()
    for layer, y in zip(alone, ys, strict=True):
        assert torch.equal(layer(x), y)
    assert layers[1].counter.flops["fprop"]["fp8"] == 0 < layers[0].counter.flops["fprop"]["fp8"]


@GRANULARITIES
def test_statistics_come_from_every_linear(granularity: str) -> None:
    layers, seen = make(granularity, scale="fp32"), []
    for i, layer in enumerate(layers):
        layer.stats_sink = lambda role, stats, i=i: seen.append((i, role, stats.amax))
    together(layers)
    x, dys = data()
    wanted = {(i, "input", x.abs().max().item()) for i in range(3)}
    wanted |= {(i, "weight", layer.weight.detach().abs().max().item()) for i, layer in enumerate(layers)}
    wanted |= {(i, "grad_output", dy.abs().max().item()) for i, dy in enumerate(dys)}
    assert set(seen) == wanted and len(seen) == 9


@GRANULARITIES
def test_kept_weights_serve_both_directions_until_they_change(granularity: str) -> None:
    layers = make(granularity, scale="fp32")
    for layer in layers:
        layer.weight_is_kept = True
    fresh = copy.deepcopy(layers)
    for layer in fresh:
        layer.weight_is_kept = False
    for _ in range(2):
        kept_ys, kept_dx = together(layers)
        ys, dx = together(fresh)
        assert all(torch.equal(a, b) for a, b in zip(kept_ys, ys, strict=True)) and torch.equal(kept_dx, dx)
        for layer in (*layers, *fresh):
            layer.weight.data.mul_(0.5)
            layer.weight_changed()
