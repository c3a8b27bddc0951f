"""The feed-forward as one call against the same linears one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8ctl.config.schema import ModelShape, RecipeConfig
from fp8ctl.fp8.backend import choose_backend
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.fp8.mlp import Fp8Mlp
from fp8ctl.model.transformer import MLP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        choose_backend("auto", recipe=RecipeConfig(), device_type="cuda").name != "native", reason="no native backend"
    ),
]
SHAPE = ModelShape(
    family="llama",
    num_layers=1,
    hidden_size=576,
    ffn_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    vocab_size=256,
    max_positions=512,
)
RECIPES = {
    "block": RecipeConfig(),
    "block-fp32-scale": RecipeConfig(scale="fp32"),
    "x_block": RecipeConfig(wgrad="x_block"),
    "bf16-wgrad": RecipeConfig(wgrad="bf16"),
    "row": RecipeConfig(granularity="row", scale="fp32"),
    "tensor": RecipeConfig(granularity="tensor", scale="fp32"),
}


def make(recipe: RecipeConfig, precision: str = "fp8") -> Fp8Mlp:
    torch.manual_seed(0)
    mlp = MLP(SHAPE).to("cuda", torch.bfloat16)
    backend = choose_backend("auto", recipe=recipe, device_type="cuda")
    gate, up, down = (
        Fp8Linear.from_linear(linear, precision=precision, recipe=recipe, backend=backend.name)  # type: ignore[arg-type]
        for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    return Fp8Mlp(gate, up, down, mlp)


def one_by_one(mlp: Fp8Mlp) -> Fp8Mlp:
    """A copy that reports statistics, which the one call does not."""
    twin = copy.deepcopy(mlp)
    twin.gate_proj.stats_sink = lambda role, stats: None
    return twin


def run(mlp: Fp8Mlp, num_tokens: int, recompute: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(num_tokens, 576, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(num_tokens, 576, generator=generator, device="cuda", dtype=torch.bfloat16) * 1e-3
    y = checkpoint(mlp, x, use_reentrant=False) if recompute else mlp(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in mlp.parameters() if p.grad is not None)]


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).double().norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("name", [*RECIPES, "bf16"])
@pytest.mark.parametrize("num_tokens", [1024, 200, 17, 1])
def test_one_call_computes_what_its_linears_compute(name: str, num_tokens: int) -> None:
    mlp = make(RECIPES.get(name, RecipeConfig()), "bf16" if name == "bf16" else "fp8")
    twin = one_by_one(mlp)
    got, wanted = run(mlp, num_tokens), run(twin, num_tokens)
    # SwiGLU rounds once here and twice there, and a value next to a rounding boundary of FP8 may then go either way
    bound = 0.005 if name == "bf16" else 0.02
    assert len(got) == len(wanted) == 5
    assert max(error(a, b) for a, b in zip(got, wanted, strict=True)) < bound
    for one, two in zip(mlp.children(), twin.children(), strict=True):
        assert one.counter.flops == two.counter.flops  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["block", "tensor"])
def test_recomputation_gives_the_same_bits_and_is_counted(name: str) -> None:
    mlp = make(RECIPES[name])
    twin = copy.deepcopy(mlp)
    for one, two in zip(run(mlp, 256), run(twin, 256, recompute=True), strict=True):
        assert torch.equal(one, two)
    assert all(
        layer.counter.flops["fprop"] == {"fp8": 4 * 256 * layer.out_features * layer.in_features, "bf16": 0}
        for layer in twin.children()
        if isinstance(layer, Fp8Linear)
    )


@pytest.mark.parametrize("name", [*RECIPES, "bf16"])
def test_compiled_it_gives_the_same_bits(name: str) -> None:
    mlp = make(RECIPES.get(name, RecipeConfig()), "bf16" if name == "bf16" else "fp8")
    twin = copy.deepcopy(mlp)
    torch._dynamo.reset()
    twin.compile(fullgraph=True, dynamic=False)
    for one, two in zip(run(mlp, 256), run(twin, 256), strict=True):
        assert torch.equal(one, two)


def test_a_kept_weight_gives_the_same_bits() -> None:
    mlp = make(RECIPES["block"])
    twin = copy.deepcopy(mlp)
    for layer in twin.children():
        layer.weight_is_kept = True  # type: ignore[assignment]
    for one, two in zip(run(mlp, 256), run(twin, 256), strict=True):
        assert torch.equal(one, two)


def test_forward_keeps_gate_and_up_and_one_byte_a_value_of_the_input() -> None:
    mlp = make(RECIPES["block"])
    x = torch.randn(8192, 576, device="cuda", dtype=torch.bfloat16).requires_grad_()
    mlp(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    h = x * 1
    y = mlp(h)
    del h
    kept = torch.cuda.memory_allocated() - before - y.numel() * 2
    assert kept <= 8192 * (2 * 1536 * 2 + 640 * (1 + 4 / 128)) + (1 << 21)


def test_nothing_comes_of_no_tokens() -> None:
    assert make(RECIPES["block"])(torch.zeros(0, 576, device="cuda", dtype=torch.bfloat16)).shape == (0, 576)


@pytest.mark.parametrize("frozen", [("gate_proj", "up_proj", "down_proj"), ("up_proj",)])
def test_gradients_pass_through_frozen_weights(frozen: tuple[str, ...]) -> None:
    mlp = make(RECIPES["block"])
    for name in frozen:
        mlp.get_submodule(name).weight.requires_grad_(False)
    twin = one_by_one(mlp)
    got, wanted = run(mlp, 256), run(twin, 256)
    assert len(got) == len(wanted) == 5 - len(frozen)
    assert max(error(a, b) for a, b in zip(got, wanted, strict=True)) < 0.02
