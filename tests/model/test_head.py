import pytest
import torch
from torch import nn

from fp8ctl.model.head import Embedding, Head, TiedHead, head_loss

V, D, T = 53, 16, 20


class Counter:
    """Notes every call."""

    def __init__(self):
        self.calls = []

    def add(self, direction, precision, *, m, n, k):
        self.calls.append((direction, precision, m, n, k))

    def count(self, direction):
        return sum(m * n * k for d, _, m, n, k in self.calls if d == direction)


@pytest.fixture(params=["own", "tied"])
def head(request):
    torch.manual_seed(4)
    return Head(D, V, bias=False) if request.param == "own" else TiedHead(Embedding(V, D))


def weight_of(head):
    return head.weight if isinstance(head, Head) else head._embedding[0].weight


@pytest.fixture
def row():
    torch.manual_seed(5)
    labels = torch.randint(0, V, (T,))
    labels[3:6] = -100
    return torch.randn(T, D, requires_grad=True), labels


def test_logits_and_loss(head, row):
    hidden, labels = row
    logits = head(hidden)
    assert torch.equal(logits, hidden @ weight_of(head).t())
    expected = nn.functional.cross_entropy(logits, labels, reduction="sum")
    assert torch.allclose(head(hidden, labels, 7), expected, rtol=1e-6)


def test_the_embedding_is_an_embedding_too():
    embedding = Embedding(V, D)
    assert torch.equal(embedding(torch.tensor([3, 5])), embedding.weight[[3, 5]])


@pytest.mark.parametrize("chunk_tokens", [T, 6])
def test_each_gemm_of_the_loss_is_counted_once(head, row, chunk_tokens):
    head.counter = Counter()
    head(*row, chunk_tokens).backward()
    assert [head.counter.count(d) for d in ("fprop", "dgrad", "wgrad")] == [T * V * D] * 3
    assert {(p, n, k) for _, p, _, n, k in head.counter.calls} == {("bf16", V, D)}


def test_only_what_runs_is_counted(head, row):
    hidden, labels = row
    head.counter = Counter()
    with torch.no_grad():
        head(hidden)
        head(hidden, labels, 6)
    assert [head.counter.count(d) for d in ("fprop", "dgrad", "wgrad")] == [2 * T * V * D, 0, 0]
    head.counter = Counter()
    weight_of(head).requires_grad_(False)
    head(hidden).sum().backward()
    head(hidden, labels, 6).backward()
    assert [head.counter.count(d) for d in ("fprop", "dgrad", "wgrad")] == [2 * T * V * D, 2 * T * V * D, 0]


def test_backward_gemms_of_logits_are_counted_when_they_run(head, row):
    head.counter = Counter()
    logits = head(row[0])
    assert head.counter.count("dgrad") == 0
    logits.sum().backward()
    assert head.counter.count("dgrad") == head.counter.count("wgrad") == T * V * D


def test_a_head_that_only_makes_logits_has_the_same_loss(head, row):
    hidden, labels = row
    plain = nn.Linear(D, V, bias=False)
    plain.weight = weight_of(head)
    losses = [head_loss(h, hidden, labels, chunk_tokens=6) for h in (head, plain)]
    assert torch.allclose(*losses, rtol=1e-6)
    grads = [torch.autograd.grad(loss, [hidden, plain.weight]) for loss in losses]
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
