"""Backend te against the reference: same recipe, other people's kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8ctl.config.schema import ModelShape, PrecisionConfig, RecipeConfig
from fp8ctl.fp8.backend import Backend
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.fp8.te import import_te, open_autocast, te_forward, te_obstacle
from fp8ctl.model.transformer import Transformer
from fp8ctl.precision.apply import apply_plan, fp8_linears, set_precision
from fp8ctl.precision.coverage import coverage
from fp8ctl.precision.plan import make_plan

OBSTACLE = te_obstacle(RecipeConfig(), "cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(OBSTACLE is not None, reason=f"no transformer-engine: {OBSTACLE}")]
RECIPES = {
    "block": RecipeConfig(),
    "block-fp32-scale": RecipeConfig(scale="fp32"),
    "block-e5m2": RecipeConfig(grad_format="e5m2"),
    "tensor": RecipeConfig(granularity="tensor", scale="fp32"),
    "delayed": RecipeConfig(granularity="tensor_delayed", scale="fp32", grad_format="e5m2"),
}


def pair(name: str, n: int, k: int, bias: bool) -> tuple[Fp8Linear, Fp8Linear]:
    torch.manual_seed(0)
    layer = Fp8Linear(k, n, bias, recipe=RECIPES[name], backend="te", device="cuda", dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    twin.backend = "reference"
    return layer, twin


def run(layer: Fp8Linear, m: int, recompute: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(m, layer.in_features, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(m, layer.out_features, generator=generator, device="cuda", dtype=torch.bfloat16)
    y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 256), (1000, 192, 576), (17, 1536, 576), (1, 576, 192)])
@pytest.mark.parametrize("bias", [False, True])
def test_near_the_reference_and_counted_alike(name: str, m: int, n: int, k: int, bias: bool) -> None:
    layer, twin = pair(name, n, k, bias)
    for got, wanted in zip(run(layer, m), run(twin, m), strict=True):
        # delayed scaling starts with scales of 1, and E5M2 gradients are coarse
        assert (got - wanted).double().norm() < (0.01 if name.startswith("block") else 0.12) * wanted.double().norm()
    assert layer.counter.flops == twin.counter.flops
    assert layer.counter.padding_flops == 3 * 2 * (-m % 32) * n * k


def test_leading_dimensions_and_no_tokens() -> None:
    layer, _ = pair("block", 192, 576, True)
    x = torch.randn(2, 5, 576, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(layer(x), layer(x.view(10, 576)).view(2, 5, 192))
    nothing = torch.zeros(0, 576, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = te_forward(layer, nothing)
    y.sum().backward()
    assert y.shape == (0, 192) and nothing.grad is not None and nothing.grad.shape == (0, 576)
    assert layer.weight.grad is not None and not layer.weight.grad.any()


def test_nan_stays_nan() -> None:
    layer, _ = pair("block", 256, 256, False)
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    x[3, 5] = torch.nan
    y = layer(x)
    assert y[3].isnan().all() and y[[i for i in range(64) if i != 3]].isfinite().all()


def test_a_kept_weight_follows_each_change() -> None:
    layer, twin = pair("block", 256, 256, False)
    twin.backend, layer.weight_is_kept = "te", True
    x = torch.ones(32, 256, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(run(layer, 64), run(twin, 64), strict=True))
            layer.zero_grad()
            twin.zero_grad()
        with torch.no_grad():
            for each in (layer, twin):
                each.weight.mul_(0.5)
                each.weight_changed()
            assert torch.equal(layer(x), twin(x))  # a validation pass


def test_it_draws_no_random_numbers() -> None:
    layer, _ = pair("block", 256, 256, True)
    before = torch.cuda.get_rng_state()
    run(layer, 64)
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_switching_the_state_dict_and_recomputation() -> None:
    layer, _ = pair("block", 256, 256, True)
    assert list(layer.state_dict()) == ["weight", "bias"]
    first = run(layer, 128)
    layer.zero_grad()
    once = {direction: dict(flops) for direction, flops in layer.counter.flops.items()}
    assert all(torch.equal(a, b) for a, b in zip(first, run(layer, 128, recompute=True), strict=True))
    for direction, times in (("fprop", 3), ("dgrad", 2), ("wgrad", 2)):
        assert layer.counter.flops[direction]["fp8"] == times * once[direction]["fp8"], direction
    assert list(layer.state_dict()) == ["weight", "bias"]
    layer.precision = "bf16"
    plain = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(layer(x), plain(x))


def test_delayed_scaling_moves_its_scales_once_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, moved = import_te().quantization.FP8GlobalStateManager, []
    move = manager.reduce_and_update_fp8_tensors

    def count(forward: bool = True) -> None:
        moved.append("forward" if forward else "backward")
        move(forward=forward)

    monkeypatch.setattr(manager, "reduce_and_update_fp8_tensors", count)
    model = torch.nn.Sequential(*(pair("delayed", 256, 256, False)[0] for _ in range(3)))
    open_autocast(model, RECIPES["delayed"])
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    assert moved == 2 * ["forward", "backward"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_trains_with_it_and_coverage_tells(name: str) -> None:
    torch.manual_seed(0)
    shape = ModelShape(
        family="llama", num_layers=2, hidden_size=256, ffn_size=512, num_heads=4, num_kv_heads=2, head_size=64, vocab_size=512,
        max_positions=256, tie_embeddings=True,
    )  # fmt: skip
    model = Transformer(shape).to("cuda", torch.bfloat16)
    config = PrecisionConfig(default="fp8", backend="te", recipe=RECIPES[name])
    apply_plan(model, make_plan(model, config), config, backend=Backend("te", "asked for"))
    names = list(model.state_dict())
    set_precision(model, "model.layers.0.mlp.up_proj", "bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.arange(256, device="cuda") % 50
    bounds = torch.tensor([0, 256], dtype=torch.int32, device="cuda")
    losses = []
    for _ in range(12):
        loss = model(ids, torch.arange(256, device="cuda"), bounds, 256, labels_T=(ids + 1) % 50) / 256
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert list(model.state_dict()) == names and not any("extra" in n for n in names)
    done = coverage(model)
    assert done.fp8_linears == len(fp8_linears(model)) - 1 == 13
    assert all(done.flops("fp8", d) > 0 for d in ("fprop", "dgrad", "wgrad"))
