"""The loss head on a GPU: its kernel against plain PyTorch, the whole against FP32."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fp8ctl.config.constants import IGNORE_INDEX
from fp8ctl.model.loss import cross_entropy_sum, linear_cross_entropy_sum, softmax_loss_

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def logits_and_labels(rows: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = 5 * torch.randn(rows, vocabulary, device="cuda")
    labels = torch.randint(0, vocabulary, (rows,), device="cuda")
    labels[::3] = IGNORE_INDEX
    return logits.to(dtype), labels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1, 97, 8192, 49152, 151936])
def test_the_kernel_equals_plain_pytorch(vocabulary: int, dtype: torch.dtype) -> None:
    logits, labels = logits_and_labels(37, vocabulary, dtype)
    exact = logits.float().cpu()
    expected = softmax_loss_(exact, labels.cpu(), write_gradient=True)
    untouched = logits.clone()
    quiet = softmax_loss_(logits, labels, write_gradient=False)
    assert torch.equal(logits, untouched)
    losses = softmax_loss_(logits, labels, write_gradient=True)
    assert torch.equal(losses, quiet)
    assert torch.allclose(losses.cpu(), expected, rtol=1e-5, atol=1e-5)
    tolerance = 1e-4 if dtype == torch.float32 else 4e-3
    assert torch.allclose(logits.float().cpu(), exact, rtol=tolerance, atol=1e-6)


def test_untrained_rows_are_never_looked_at() -> None:
    logits, labels = logits_and_labels(9, 1000, torch.bfloat16)
    clean = logits.clone()
    logits[::3], logits[3, 4], clean[::3] = float("nan"), float("inf"), 0.0
    assert torch.equal(
        softmax_loss_(logits, labels, write_gradient=True), softmax_loss_(clean, labels, write_gradient=True)
    )
    assert torch.equal(logits, clean)
    assert logits[::3].count_nonzero() == 0


def test_inf_nan_and_labels_beyond_the_vocabulary_make_the_loss_nan() -> None:
    logits, _ = logits_and_labels(5, 1000, torch.bfloat16)
    logits[0, 3], logits[1, 3], logits[4, 3] = float("inf"), float("nan"), float("-inf")
    labels = torch.tensor([1, 1, 1000, -1, 1], device="cuda")
    losses = softmax_loss_(logits, labels, write_gradient=True)
    assert losses.isnan().tolist() == [True, True, True, True, False]


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e4, 0.0, -3e4]], device="cuda")
    assert softmax_loss_(logits, torch.tensor([1], device="cuda"), write_gradient=True).item() == 3e4
    assert logits.tolist() == [[1.0, -1.0, 0.0]]


@pytest.mark.parametrize("chunk_tokens", [64, 200, 1000])
def test_loss_and_gradients_of_the_whole(chunk_tokens: int) -> None:
    torch.manual_seed(1)
    hidden = torch.randn(500, 256, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(5000, 256, device="cuda") / 16).bfloat16().requires_grad_()
    labels = torch.randint(0, 5000, (500,), device="cuda")
    labels[100:220] = IGNORE_INDEX
    exact = hidden.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
    expected = functional.cross_entropy(exact[0] @ exact[1].t(), labels, reduction="sum")
    want = torch.autograd.grad(expected / 380, exact)
    total = linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
    got = torch.autograd.grad(total / 380, [hidden, weight])
    generic = cross_entropy_sum(hidden, lambda h: h @ weight.t(), labels, chunk_tokens=chunk_tokens)
    assert torch.allclose(total, expected, rtol=1e-3)
    assert torch.allclose(total, generic, rtol=1e-6)
    for a, b in zip(got, want, strict=True):
        assert (a.float() - b).norm() < 1e-2 * b.norm()


def test_memory_is_that_of_one_chunk_and_nothing_waits_for_the_gpu() -> None:
    hidden = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 50000, (4096,), device="cuda")
    linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=512).backward()  # compiles its kernel
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=512).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    chunk, gradients = 512 * 50000 * 2, hidden.nbytes + weight.nbytes
    assert torch.cuda.max_memory_allocated() - before < 1.2 * (chunk + gradients)
