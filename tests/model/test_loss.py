import pytest
import torch
from torch import nn
from torch.nn import functional

from fp8ctl.config.constants import IGNORE_INDEX
from fp8ctl.model import loss
from fp8ctl.model.loss import cross_entropy_sum, default_chunk_tokens, linear_cross_entropy_sum

V, D, T = 101, 16, 40


@pytest.fixture
def problem():
    torch.manual_seed(5)
    hidden = torch.randn(T, D, requires_grad=True)
    head = nn.Linear(D, V, bias=False)
    labels = torch.randint(0, V, (T,))
    labels[torch.rand(T) < 0.3] = IGNORE_INDEX
    return hidden, head, labels


def reference(hidden, head, labels):
    total = functional.cross_entropy(head(hidden).float(), labels, reduction="sum", ignore_index=IGNORE_INDEX)
    return total, *torch.autograd.grad(total, [hidden, head.weight])


@pytest.mark.parametrize("chunk_tokens", [T, 1000, 16, 7, 1])
@pytest.mark.parametrize("block_bytes", [2**20, 4 * V * 3])
def test_value_and_gradients_equal_pytorchs(problem, chunk_tokens, block_bytes, monkeypatch):
    monkeypatch.setattr(loss, "_BLOCK_BYTES", block_bytes)
    hidden, head, labels = problem
    expected, expected_hidden, expected_weight = reference(hidden, head, labels)
    total = cross_entropy_sum(hidden, head, labels, chunk_tokens=chunk_tokens)
    assert total.dtype == torch.float32 and total.shape == ()
    assert torch.allclose(total, expected, rtol=1e-6)
    grad_hidden, grad_weight = torch.autograd.grad(total / 3, [hidden, head.weight])
    assert torch.allclose(grad_hidden, expected_hidden / 3, atol=1e-6)
    assert torch.allclose(grad_weight, expected_weight / 3, atol=1e-6)
    assert grad_hidden[labels == IGNORE_INDEX].count_nonzero() == 0


def test_bf16_logits_give_an_fp32_sum_and_bf16_gradients(problem):
    hidden, head, labels = problem
    head, hidden = head.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    expected, expected_hidden, _ = reference(hidden, head, labels)
    total = cross_entropy_sum(hidden, head, labels, chunk_tokens=T)
    assert torch.allclose(total, expected, rtol=1e-6)
    total.backward()
    assert hidden.grad.dtype == torch.bfloat16
    assert (hidden.grad - expected_hidden).float().norm() < 5e-3 * expected_hidden.float().norm()


def test_any_callable_is_a_head(problem):
    hidden, head, labels = problem
    tied = cross_entropy_sum(hidden, lambda h: functional.linear(h, head.weight), labels, chunk_tokens=7)
    assert torch.equal(tied, cross_entropy_sum(hidden, head, labels, chunk_tokens=7))


def test_without_trained_labels_the_loss_and_its_gradient_are_zero(problem):
    hidden, head, labels = problem
    total = cross_entropy_sum(hidden, head, torch.full_like(labels, IGNORE_INDEX), chunk_tokens=16)
    total.backward()
    assert total == 0
    assert head.weight.grad.count_nonzero() == 0


def test_an_untrained_position_brings_in_no_nan(problem):
    hidden, head, labels = problem
    untrained = int((labels == IGNORE_INDEX).nonzero()[0])
    broken = hidden.detach().clone()
    broken[untrained] = float("nan")
    broken.requires_grad_()
    total = cross_entropy_sum(broken, head, labels, chunk_tokens=T)
    assert torch.allclose(total, reference(hidden, head, labels)[0], rtol=1e-6)
    total.backward()
    assert broken.grad.isfinite().all()


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e4, 0.0, -3e4]], requires_grad=True)
    total = cross_entropy_sum(logits, lambda x: x, torch.tensor([1]), chunk_tokens=8)
    total.backward()
    assert total == 3e4
    assert torch.equal(logits.grad, torch.tensor([[1.0, -1.0, 0.0]]))


def test_the_head_runs_as_often_whatever_the_labels_are(problem):
    """Under ZeRO-3 the call gathers weights on all ranks: ranks with other labels must call it as often."""
    hidden, head, labels = problem
    calls = []
    head.register_forward_pre_hook(lambda _m, args: calls.append(len(args[0])))
    for some in (labels, torch.full_like(labels, IGNORE_INDEX)):
        cross_entropy_sum(hidden, head, some, chunk_tokens=16).backward()
    assert calls[:6] == calls[6:]
    assert sorted(calls[:6]) == [8, 8, 16, 16, 16, 16], "each chunk once forward, once again in the backward pass"


def test_logits_of_one_chunk_at_most_exist_at_once(problem):
    """Between forward and backward nothing as long as the vocabulary is kept."""
    hidden, head, labels = problem
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        total = cross_entropy_sum(hidden, head, labels, chunk_tokens=10)
    assert total.requires_grad
    assert not [s for s in kept if s[-1:] == (V,)]


# ---------------------------------------------------------------- a head that is one matrix


@pytest.mark.parametrize("chunk_tokens", [T, 1000, 16, 7, 1])
@pytest.mark.parametrize("block_bytes", [2**20, 4 * V * 3])
def test_linear_value_and_gradients_equal_pytorchs(problem, chunk_tokens, block_bytes, monkeypatch):
    monkeypatch.setattr(loss, "_BLOCK_BYTES", block_bytes)
    hidden, head, labels = problem
    expected, expected_hidden, expected_weight = reference(hidden, head, labels)
    total = linear_cross_entropy_sum(hidden, head.weight, labels, chunk_tokens=chunk_tokens)
    assert total.dtype == torch.float32 and total.shape == ()
    assert torch.allclose(total, expected, rtol=1e-6)
    grad_hidden, grad_weight = torch.autograd.grad(total / 3, [hidden, head.weight])
    assert torch.allclose(grad_hidden, expected_hidden / 3, atol=1e-6)
    assert torch.allclose(grad_weight, expected_weight / 3, atol=1e-6)
    assert grad_hidden[labels == IGNORE_INDEX].count_nonzero() == 0


@pytest.mark.parametrize("chunk_tokens", [T, 9])
def test_linear_in_bf16_is_as_exact_as_its_rounding(problem, chunk_tokens):
    hidden, head, labels = problem
    head, hidden = head.bfloat16(), hidden.detach().bfloat16().requires_grad_()
    exact = head.weight.detach().float().requires_grad_(), hidden.detach().float().requires_grad_()
    total = functional.cross_entropy(exact[1] @ exact[0].t(), labels, reduction="sum", ignore_index=IGNORE_INDEX)
    expected = torch.autograd.grad(total, exact)
    got = linear_cross_entropy_sum(hidden, head.weight, labels, chunk_tokens=chunk_tokens)
    assert got.dtype == torch.float32 and abs(got - total) < 2e-3 * total
    for a, b in zip(torch.autograd.grad(got, [head.weight, hidden]), expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.float() - b).norm() < 1e-2 * b.norm()


def test_linear_makes_only_the_gradients_that_are_wanted(problem):
    hidden, head, labels = problem
    expected, expected_hidden, expected_weight = reference(hidden, head, labels)
    frozen = linear_cross_entropy_sum(hidden, head.weight.detach(), labels, chunk_tokens=16)
    frozen.backward()
    assert torch.allclose(hidden.grad, expected_hidden, atol=1e-6)
    probe = linear_cross_entropy_sum(hidden.detach(), head.weight, labels, chunk_tokens=16)
    probe.backward()
    assert torch.allclose(head.weight.grad, expected_weight, atol=1e-6)
    with torch.no_grad():
        quiet = linear_cross_entropy_sum(hidden, head.weight, labels, chunk_tokens=16)
    assert not quiet.requires_grad
    assert torch.equal(quiet, frozen) and torch.equal(quiet, probe)


def test_linear_without_trained_labels_or_tokens_is_zero(problem):
    hidden, head, labels = problem
    for some in (slice(None), slice(0)):
        total = linear_cross_entropy_sum(
            hidden[some], head.weight, torch.full_like(labels[some], IGNORE_INDEX), chunk_tokens=16
        )
        grads = torch.autograd.grad(total, [hidden, head.weight])
        assert total == 0
        assert not any(g.count_nonzero() for g in grads)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_linear_takes_nothing_from_an_untrained_position(problem, value):
    hidden, head, labels = problem
    expected, expected_hidden, expected_weight = reference(hidden, head, labels)
    broken = hidden.detach().clone()
    broken[labels == IGNORE_INDEX] = value
    broken.requires_grad_()
    total = linear_cross_entropy_sum(broken, head.weight, labels, chunk_tokens=16)
    total.backward()
    assert torch.allclose(total, expected, rtol=1e-6)
    assert torch.allclose(broken.grad, expected_hidden, atol=1e-6)
    assert torch.allclose(head.weight.grad, expected_weight, atol=1e-6)


def test_linear_lets_a_nan_of_a_trained_position_through(problem):
    hidden, head, labels = problem
    broken = hidden.detach().clone()
    broken[int((labels != IGNORE_INDEX).nonzero()[0])] = float("nan")
    broken.requires_grad_()
    total = linear_cross_entropy_sum(broken, head.weight, labels, chunk_tokens=16)
    total.backward()
    assert total.isnan() and head.weight.grad.isnan().any()


def test_linear_keeps_no_logits_and_computes_nothing_twice(problem):
    hidden, head, labels = problem
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        linear_cross_entropy_sum(hidden, head.weight, labels, chunk_tokens=10)
    assert kept == [(T, D), (V, D)]


def test_linear_is_differentiable_once(problem):
    hidden, head, labels = problem
    total = linear_cross_entropy_sum(hidden, head.weight, labels, chunk_tokens=10)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_linear_under_autocast_multiplies_in_its_dtype(problem):
    hidden, head, labels = problem
    expected, expected_hidden, expected_weight = reference(hidden, head, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = linear_cross_entropy_sum(hidden, head.weight, labels, chunk_tokens=16)
    total.backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.float32
    for a, b in ((hidden.grad, expected_hidden), (head.weight.grad, expected_weight)):
        assert 1e-5 * b.norm() < (a - b).norm() < 2e-2 * b.norm()


def test_chunks_are_larger_on_a_gpu():
    assert default_chunk_tokens(torch.device("cpu")) < default_chunk_tokens(torch.device("cuda", 0))
