"""What torch.compile makes of norms, rotary embedding and SwiGLU: right values and gradients, one kernel forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fp8ctl.config.schema import ModelShape
from fp8ctl.model import fused
from fp8ctl.model.transformer import Transformer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
T, D, N, K, H = 640, 576, 9, 3, 64


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before counts."""
    fused._variants.clear()
    torch._dynamo.reset()
    yield
    fused._variants.clear()
    torch._dynamo.reset()


def leaf(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(size, device="cuda").to(dtype).requires_grad_()


def angles() -> tuple[Tensor, Tensor]:
    turns = torch.arange(T, device="cuda")[:, None] * torch.rand(H // 2, device="cuda")
    return turns.cos(), turns.sin()


def views() -> tuple[Tensor, Tensor]:
    packed = torch.randn(T, (N + 2 * K) * H, device="cuda").bfloat16()
    q, k, _ = (x.unflatten(1, (-1, H)) for x in packed.split([N * H, K * H, K * H], dim=1))
    return q.detach().requires_grad_(), k.detach().requires_grad_()


Case = tuple[Callable[..., Tensor | tuple[Tensor, ...]], Sequence[Tensor | float]]
CASES: dict[str, Callable[[], Case]] = {
    "norm": lambda: (fused.norm, (leaf(T, D), leaf(D), 1e-6)),
    "norm of heads": lambda: (fused.norm, (views()[0], leaf(H), 1e-6)),
    "add_norm": lambda: (fused.add_norm, (leaf(T, D), leaf(T, D), leaf(D), 1e-6)),
    "rotate_qk": lambda: (fused.rotate_qk, (*views(), *angles())),
    "silu_mul": lambda: (fused.silu_mul, (leaf(T, D), leaf(T, D))),
}


def run(function: Callable, args: Sequence[Tensor | float], is_compiled: bool) -> tuple[list[Tensor], list[Tensor]]:
    outs = function(*args, compiled=is_compiled)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    generator = torch.Generator("cuda").manual_seed(1)
    weights = [torch.randn(o.shape, device="cuda", generator=generator).to(o.dtype) for o in outs]
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return outs, list(torch.autograd.grad(outs, leaves, weights))


@pytest.mark.parametrize("name", CASES)
def test_compiled_is_as_exact_as_plain(name: str) -> None:
    torch.manual_seed(0)
    function, args = CASES[name]()
    wide = [a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    exact = run(function, wide, False)
    for is_compiled in (False, True):
        got = run(function, args, is_compiled)
        for a, b in zip([*got[0], *got[1]], [*exact[0], *exact[1]], strict=True):
            assert (a.double() - b).norm() < 6e-3 * b.norm(), f"compiled: {is_compiled}"
    assert fused._variants


@pytest.mark.parametrize("name", ["norm", "add_norm", "silu_mul"])
def test_forward_is_one_kernel(name: str) -> None:
    function, args = CASES[name]()
    function(*args, compiled=True)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function(*args, compiled=True)
        torch.cuda.synchronize()
    assert len([e for e in profiler.events() if "triton" in e.name]) == 1


def test_without_gradients_nothing_is_compiled() -> None:
    with torch.no_grad():
        for make in CASES.values():
            function, args = make()
            function(*args, compiled=True)
    assert not fused._variants


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_trains_the_same_with_and_without_recomputed_activations(family: str) -> None:
    shape = ModelShape(
        family=family,  # type: ignore[arg-type]
        num_layers=3,
        hidden_size=D,
        ffn_size=2 * D,
        num_heads=N,
        num_kv_heads=K,
        head_size=H,
        vocab_size=97,
        max_positions=T,
        init_std=0.05,
    )
    torch.manual_seed(0)
    plain = Transformer(shape).cuda().bfloat16()
    exact = copy.deepcopy(plain).float()
    ids = torch.randint(0, 97, (T,), device="cuda")
    cu_seqlens = torch.tensor([0, T], dtype=torch.int32, device="cuda")
    losses, gradients = [], []
    for model, is_compiled, is_recomputed in (
        (exact, False, False),
        (plain, False, False),
        (copy.deepcopy(plain), True, False),
        (copy.deepcopy(plain), True, True),
    ):
        model.compile_kernels, model.activation_checkpointing = is_compiled, is_recomputed
        loss = model(ids, torch.arange(T, device="cuda"), cu_seqlens, T, labels_T=ids)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    errors = [((g - gradients[0]).norm() / gradients[0].norm()).item() for g in gradients]
    assert max(errors[2:]) < 1.2 * errors[1] < 0.1
    assert losses[1:] == [pytest.approx(losses[0], rel=2e-3)] * 3
