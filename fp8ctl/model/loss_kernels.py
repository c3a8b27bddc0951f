"""Softmax cross-entropy of a chunk of logits in one Triton kernel, its gradient written over the logits.

A program owns one row. It reads the row once for maximum and sum, kept lane by lane so that nothing waits for a
reduction inside the loop, and once more for the gradient.

Letters: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8ctl.config.constants import IGNORE_INDEX

_IGNORE_INDEX = tl.constexpr(IGNORE_INDEX)
_LOWEST = tl.constexpr(-3.0e38)
_MAX_BLOCK = 8192


def softmax_loss_(logits_CV: Tensor, labels_C: Tensor, *, write_gradient: bool) -> Tensor:
    """`loss.softmax_loss_` on a GPU: FP32 losses [C]; with `write_gradient` the logits become their gradient."""
    rows, columns = logits_CV.shape
    assert logits_CV.stride(1) == 1, "rows must be contiguous"
    loss_C = torch.empty(rows, dtype=torch.float32, device=logits_CV.device)
    if rows == 0:
        return loss_C
    block = min(_MAX_BLOCK, triton.next_power_of_2(columns))
    # One element of each block in 8 lanes of a warp's thread: maxima and sums stay in registers
    num_warps = max(1, min(32, block // 256))
    _softmax_loss[(rows,)](
        logits_CV,
        labels_C.contiguous(),
        loss_C,
        logits_CV.stride(0),
        columns,
        WRITE=write_gradient,
        BLOCK=block,
        num_warps=num_warps,
    )
    return loss_C


@triton.jit
def _softmax_loss(logits, labels, loss, stride, V: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    lanes = tl.arange(0, BLOCK)
    if label == _IGNORE_INDEX:
        tl.store(loss + row, 0.0)
        if WRITE:
            for start in range(0, V, BLOCK):
                tl.store(logits + start + lanes, 0.0, mask=start + lanes < V)
    else:
        # A label outside the vocabulary makes the loss NaN instead of reading somewhere else
        target = tl.load(logits + label, mask=(label >= 0) & (label < V), other=float("nan")).to(tl.float32)
        largest = tl.full([BLOCK], _LOWEST, tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(logits + start + lanes, mask=start + lanes < V, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(largest, x)
            total = total * tl.exp(largest - higher) + tl.exp(x - higher)
            largest = higher
        peak = tl.max(largest, axis=0)
        lse = peak + tl.log(tl.sum(total * tl.exp(largest - peak), axis=0))
        tl.store(loss + row, lse - target)
        if WRITE:
            for start in range(0, V, BLOCK):
                columns = start + lanes
                x = tl.load(logits + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(x - lse) - tl.where(columns == label, 1.0, 0.0)
                tl.store(logits + columns, gradient, mask=columns < V)
