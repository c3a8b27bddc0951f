import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8ctl.model import fused

EPS = 1e-5


def leaves(*sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in sizes]


def exact(x):
    return x.detach().double().requires_grad_()


def norm_of(x, weight):
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * weight


def angles(num_tokens, head_size):
    turns = torch.arange(num_tokens)[:, None] / 3.0 * torch.arange(1, head_size // 2 + 1)
    return turns.cos(), turns.sin()


def check(outs, expected, inputs, exact_inputs, tolerance):
    """Values and gradients agree; a random weight stands on each output."""
    weights = [torch.randn(e.shape, generator=torch.Generator().manual_seed(3)) for e in expected]
    got = torch.autograd.grad(sum((o.float() * w).sum() for o, w in zip(outs, weights, strict=True)), inputs)
    want = torch.autograd.grad(sum((e * w).sum() for e, w in zip(expected, weights, strict=True)), exact_inputs)
    for a, b in zip((*outs, *got), (*expected, *want), strict=True):
        assert (a.double() - b).norm() < tolerance * b.norm()


# Both forms of each function: the one that runs as it is, and the one that torch.compile makes a kernel of
@pytest.mark.parametrize("function", [fused.norm, fused._norm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_norm(function, dtype, tolerance):
    x, weight = leaves((30, 3, 48), (48,), dtype=dtype)
    x64, weight64 = exact(x), exact(weight)
    out = function(x, weight, EPS)
    assert out.dtype == dtype
    check([out], [norm_of(x64, weight64)], [x, weight], [x64, weight64], tolerance)


@pytest.mark.parametrize("function", [fused.add_norm, fused._add_norm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_add_norm(function, dtype, tolerance):
    x, delta, weight = leaves((30, 48), (30, 48), (48,), dtype=dtype)
    x64, delta64, weight64 = exact(x), exact(delta), exact(weight)
    total, normed = function(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    expected = [x64 + delta64, norm_of(x64 + delta64, weight64)]
    check([total, normed], expected, [x, delta, weight], [x64, delta64, weight64], tolerance)


def test_the_sum_is_rounded_before_its_norm_as_it_is_without_fusion():
    x, delta, weight = leaves((30, 48), (30, 48), (48,), dtype=torch.bfloat16)
    for function, norm in ((fused.add_norm, fused.norm), (fused._add_norm, fused._norm)):
        assert torch.equal(function(x, delta, weight, EPS)[1], norm(x + delta, weight, EPS))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_rotate_qk_of_views_into_one_buffer(dtype, tolerance):
    (packed,) = leaves((20, (4 + 2 + 2) * 16), dtype=dtype)
    packed64, (cos, sin) = exact(packed), angles(20, 16)
    q, k = (part.unflatten(1, (-1, 16)) for part in (packed[:, :64], packed[:, 64:96]))
    outs = fused.rotate_qk(q, k, cos, sin)
    assert [o.dtype for o in outs] == [dtype, dtype]
    assert all(o.is_contiguous() for o in outs)
    turn = torch.complex(cos.double(), sin.double())[:, None]
    expected = []
    for part in (packed64[:, :64], packed64[:, 64:96]):
        x = part.unflatten(1, (-1, 16))
        turned = torch.complex(x[..., :8], x[..., 8:]) * turn
        expected.append(torch.cat([turned.real, turned.imag], dim=-1))
    check(outs, expected, [packed], [packed64], tolerance)


@pytest.mark.parametrize("function", [fused.silu_mul, fused._silu_mul])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_silu_mul(function, dtype, tolerance):
    gate, up = leaves((30, 48), (30, 48), dtype=dtype)
    gate64, up64 = exact(gate), exact(up)
    out = function(gate, up)
    assert out.dtype == dtype
    check([out], [gate64 * gate64.sigmoid() * up64], [gate, up], [gate64, up64], tolerance)


def test_silu_mul_keeps_its_operands_only():
    gate, up = leaves((30, 48), (30, 48), dtype=torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused.silu_mul(gate, up)
    assert [t.data_ptr() for t in kept] == [gate.data_ptr(), up.data_ptr()]


def test_silu_mul_far_out():
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], requires_grad=True)
    fused.silu_mul(gate, torch.ones(5)).sum().backward()
    assert torch.equal(gate.grad, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))


@pytest.fixture
def compiles(monkeypatch):
    """As on a GPU in training, with a compiler that only traces."""
    monkeypatch.setattr(fused, "_compiled", {})
    monkeypatch.setattr(fused, "_variants", {})
    may_compile = fused._may_compile
    monkeypatch.setattr(
        fused, "_may_compile", lambda f, *args: torch.is_grad_enabled() and may_compile(f, *map(_OnGpu.of, args))
    )
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _OnGpu(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True

    @staticmethod
    def of(x):
        return x.detach().requires_grad_(x.requires_grad).as_subclass(_OnGpu) if isinstance(x, torch.Tensor) else x


@pytest.mark.usefixtures("compiles")
def test_compiled_equals_plain_also_where_activations_are_recomputed():
    x, delta, weight = leaves((30, 48), (30, 48), (48,))

    def work(x, delta, compiled):
        total, normed = fused.add_norm(x, delta, weight, EPS, compiled=compiled)
        return fused.silu_mul(total, fused.norm(normed, weight, EPS, compiled=compiled), compiled=compiled).sum()

    plain = torch.autograd.grad(work(x, delta, False), [x, delta, weight])
    assert not fused._compiled
    for is_recomputed in (False, True):
        call = functools.partial(checkpoint, work, use_reentrant=False) if is_recomputed else work
        got = torch.autograd.grad(call(x, delta, True), [x, delta, weight])
        for a, b in zip(got, plain, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert len(fused._compiled) == 3


@pytest.mark.usefixtures("compiles")
def test_without_gradients_and_beyond_some_shapes_nothing_is_compiled():
    with torch.no_grad():
        fused.norm(torch.randn(4, 8), torch.ones(8), EPS, compiled=True)
    assert not fused._compiled
    weight = torch.ones(8, requires_grad=True)
    for rows in range(1, fused._MAX_VARIANTS + 5):
        x = torch.randn(rows, 8)
        assert torch.allclose(fused.norm(x, weight, EPS, compiled=True), fused.norm(x, weight, EPS))
    assert len(fused._variants[fused._norm]) == fused._MAX_VARIANTS
    assert fused._may_compile(fused._norm, torch.randn(1, 8), weight, EPS), "a shape that was met goes on"
