"""Cross-entropy of the next token that never holds the logits of a long row.

The head runs on chunks of the hidden states. For a head that is one matrix, the gradients of hidden states and matrix
are made during the forward pass, chunk by chunk: a chunk's logits turn into their own gradient in place, are
multiplied, and are gone. Nothing is computed twice. What comes in from above in the backward pass is one number, the
gradient of the summed loss, by which the two are multiplied then.

Any other head (one whose GEMMs run in FP8) is a function from hidden states to logits: its chunks are checkpointed, so
that their logits are made again in the backward pass.

Letters: T packed tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fp8ctl.config.constants import IGNORE_INDEX

# FP32 bytes that the softmax works on at a time without its GPU kernel: the second-level cache of a CPU core
_BLOCK_BYTES = 2**20


class Counter(Protocol):
    """What counts GEMMs where they run: C x V x D multiplications each."""

    def add(
        self, direction: Literal["fprop", "dgrad", "wgrad"], precision: Literal["bf16"], /, *, m: int, n: int, k: int
    ) -> None:
        """One GEMM of m x n outputs over k."""


def default_chunk_tokens(device: torch.device) -> int:
    """Tokens whose logits exist at once: enough for GEMMs at full speed (measured on an H200), few enough for memory."""
    return 4096 if device.type == "cuda" else 1024


def linear_cross_entropy_sum(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, chunk_tokens: int, counter: Counter | None = None
) -> Tensor:
    """Sum over all labels other than IGNORE_INDEX of -log softmax(hidden W')[label]: an FP32 scalar.

    Logits have the dtype of hidden, the softmax is FP32. Gradients, where wanted, are made at once; the weight's is
    summed over chunks in its own dtype. Differentiable once. What stands at an untrained position counts for nothing,
    be it inf or NaN.
    """
    device = hidden_TD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_TD, weight_VD = hidden_TD.to(dtype), weight_VD.to(dtype)
    with torch.autocast(device, enabled=False):
        if not torch.is_grad_enabled():
            wanted = _Wanted(False, False)
            return _head_pass(hidden_TD, weight_VD, labels_T, chunk_tokens, counter, wanted)[0]
        loss: Tensor = _LinearLoss.apply(hidden_TD, weight_VD, labels_T, chunk_tokens, counter)
    return loss


def cross_entropy_sum(
    hidden_TD: Tensor, head: Callable[[Tensor], Tensor], labels_T: Tensor, *, chunk_tokens: int
) -> Tensor:
    """`linear_cross_entropy_sum` for any head that maps hidden [C, D] to logits [C, V].

    It is called once per chunk on every position, whatever the labels are: under ZeRO-3 each call is a collective, and
    ranks with other labels must make the same calls. Rows of at most `chunk_tokens` are one chunk and are not
    checkpointed, so nothing is computed twice.
    """
    if labels_T.numel() <= chunk_tokens:
        return _chunk_loss(hidden_TD, head, labels_T)
    loss = hidden_TD.new_zeros((), dtype=torch.float32)
    for hidden_CD, labels_C in zip(hidden_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True):
        loss = loss + checkpoint(_chunk_loss, hidden_CD, head, labels_C, use_reentrant=False, preserve_rng_state=False)
    return loss


def softmax_loss_(logits_CV: Tensor, labels_C: Tensor, *, write_gradient: bool) -> Tensor:
    """FP32 losses [C], 0 where untrained; with `write_gradient` the logits become d loss / d logits, in their dtype:
    softmax - one_hot(label), 0 where untrained.
    """
    if logits_CV.is_cuda and importlib.util.find_spec("triton") is not None:
        from fp8ctl.model import loss_kernels

        return loss_kernels.softmax_loss_(logits_CV, labels_C, write_gradient=write_gradient)
    untrained_C1 = (labels_C == IGNORE_INDEX)[:, None]
    target_C1 = labels_C.clamp(min=0)[:, None]
    rows = max(1, _BLOCK_BYTES // (4 * logits_CV.shape[1]))
    losses = []
    for block, target, untrained in zip(*(x.split(rows) for x in (logits_CV, target_C1, untrained_C1)), strict=True):
        picked = block.gather(1, target).float()
        lse = block.float().logsumexp(dim=1, keepdim=True)
        # masked, not multiplied by 0: an untrained position must not bring in its inf or NaN
        losses.append((lse - picked).masked_fill_(untrained, 0.0))
        if write_gradient:
            part = torch.sub(block, lse).exp_() if block.dtype != torch.float32 else block.sub_(lse).exp_()
            part.scatter_(1, target, part.gather(1, target) - 1.0).masked_fill_(untrained, 0.0)
            if part is not block:
                block.copy_(part)
    return torch.cat(losses).squeeze(1)


class _LinearLoss(torch.autograd.Function):
    """Loss with the gradients of both operands made in forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int, counter: Counter | None
    ) -> Tensor:
        wanted = _Wanted(*ctx.needs_input_grad[:2])
        loss, d_hidden_TD, d_weight_VD = _head_pass(hidden_TD, weight_VD, labels_T, chunk_tokens, counter, wanted)
        ctx.save_for_backward(d_hidden_TD, d_weight_VD)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # In place: the weight's gradient may be the largest tensor of the step. A second backward pass through the
        # same loss is refused by autograd, which sees that what was saved has changed
        d_hidden_TD, d_weight_VD = (None if saved is None else saved.mul_(grad) for saved in ctx.saved_tensors)
        return d_hidden_TD, d_weight_VD, None, None, None


class _Wanted:
    """Which gradients to make."""

    def __init__(self, hidden: bool, weight: bool) -> None:
        self.hidden, self.weight = hidden, weight


def _head_pass(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int, counter: Counter | None, wanted: _Wanted
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, its gradient by hidden, by weight), chunk by chunk."""
    V, D = weight_VD.shape
    loss = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
    d_hidden_TD = torch.empty_like(hidden_TD) if wanted.hidden else None
    d_weight_VD: Tensor | None = None
    if wanted.weight and labels_T.numel() == 0:
        d_weight_VD = torch.zeros_like(weight_VD)
    begin = 0
    for hidden_CD, labels_C in zip(hidden_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True):
        size = {"m": len(labels_C), "n": V, "k": D}
        # The weight's gradient multiplies what stands at untrained positions by 0, and 0 * NaN is NaN
        hidden_CD = hidden_CD.masked_fill((labels_C == IGNORE_INDEX)[:, None], 0.0)
        logits_CV = hidden_CD @ weight_VD.t()
        _count(counter, "fprop", size)
        loss += softmax_loss_(logits_CV, labels_C, write_gradient=wanted.hidden or wanted.weight).sum()
        if d_hidden_TD is not None:
            torch.mm(logits_CV, weight_VD, out=d_hidden_TD[begin : begin + len(labels_C)])
            _count(counter, "dgrad", size)
        if wanted.weight:
            if d_weight_VD is None:
                d_weight_VD = logits_CV.t() @ hidden_CD
            else:
                d_weight_VD.addmm_(logits_CV.t(), hidden_CD)
            _count(counter, "wgrad", size)
        begin += len(labels_C)
        del logits_CV  # or the next chunk's would exist beside them
    return loss, d_hidden_TD, d_weight_VD


def _count(counter: Counter | None, direction: Literal["fprop", "dgrad", "wgrad"], size: dict[str, int]) -> None:
    if counter is not None:
        counter.add(direction, "bf16", **size)


def _chunk_loss(hidden_CD: Tensor, head: Callable[[Tensor], Tensor], labels_C: Tensor) -> Tensor:
    loss: Tensor = _SoftmaxLoss.apply(head(hidden_CD), labels_C)
    return loss


class _SoftmaxLoss(torch.autograd.Function):
    """Summed cross-entropy of logits [C, V]. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, labels_C: Tensor) -> Tensor:
        ctx.save_for_backward(logits_CV, labels_C)
        return softmax_loss_(logits_CV, labels_C, write_gradient=False).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits_CV, labels_C = ctx.saved_tensors
        grad_CV = logits_CV.clone()
        softmax_loss_(grad_CV, labels_C, write_gradient=True)
        return grad_CV.mul_(grad), None
