"""Cross-entropy of the next token that never holds the FP32 logits of a long row.

The head runs on chunks of the hidden states. Each chunk is checkpointed: its logits are made again in the backward
pass. Inside a chunk the softmax goes over a few rows at a time, which fit the cache of a CPU core, and its gradient
is written in the dtype of the logits at once.

Letters: T packed tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fp8ctl.config.constants import IGNORE_INDEX

# FP32 bytes that the softmax works on at a time: the second-level cache of a CPU core; on a GPU enough to fill it
_BLOCK_BYTES = {"cpu": 2**20, "cuda": 2**28}


def cross_entropy_sum(
    hidden_TD: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], labels_T: torch.Tensor, *, chunk_tokens: int
) -> torch.Tensor:
    """Sum over all labels other than IGNORE_INDEX of -log softmax(head(hidden))[label]: an FP32 scalar.

    `head` maps hidden [C, D] to logits [C, V]. It is called once per chunk on every position, whatever the labels
    are: under ZeRO-3 each call is a collective, and ranks with other labels must make the same calls. Rows of at most
    `chunk_tokens` are one chunk and are not checkpointed, so nothing is computed twice.
    """
    if labels_T.numel() <= chunk_tokens:
        return _chunk_loss(hidden_TD, head, labels_T)
    loss = hidden_TD.new_zeros((), dtype=torch.float32)
    for hidden_CD, labels_C in zip(hidden_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True):
        loss = loss + checkpoint(_chunk_loss, hidden_CD, head, labels_C, use_reentrant=False, preserve_rng_state=False)
    return loss


def _chunk_loss(
    hidden_CD: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor], labels_C: torch.Tensor
) -> torch.Tensor:
    return _SoftmaxLoss.apply(head(hidden_CD), labels_C)


class _SoftmaxLoss(torch.autograd.Function):
    """Summed cross-entropy of logits [C, V] in FP32, by blocks of rows. Differentiable once."""

    @staticmethod
    def forward(ctx: Any, logits_CV: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        trained_C = labels_C != IGNORE_INDEX
        target_C = labels_C.clamp(min=0)
        lse_C = torch.cat([block.float().logsumexp(dim=1) for block in _blocks(logits_CV)])
        ctx.save_for_backward(logits_CV, lse_C, target_C, trained_C)
        picked_C = logits_CV.gather(1, target_C[:, None]).squeeze(1).float()
        # where, not a product: an untrained position must not bring in its inf or NaN
        return torch.where(trained_C, lse_C - picked_C, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_CV, lse_C, target_C, trained_C = ctx.saved_tensors
        grad_CV = torch.empty_like(logits_CV)
        begin = 0
        for block in _blocks(logits_CV):
            rows = slice(begin, begin + block.shape[0])
            # d loss / d logits = softmax - one_hot(target)
            part = torch.sub(block, lse_C[rows, None]).exp_()
            part.scatter_(1, target_C[rows, None], part.gather(1, target_C[rows, None]) - 1.0)
            grad_CV[rows] = part.mul_(grad).masked_fill_(~trained_C[rows, None], 0.0)
            begin = rows.stop
        return grad_CV, None


def _blocks(logits_CV: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = max(1, _BLOCK_BYTES.get(logits_CV.device.type, 2**20) // (4 * logits_CV.shape[1]))
    return logits_CV.split(rows)
