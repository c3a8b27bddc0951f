"""The output head as a linear whose precision can change."""

from __future__ import annotations

from torch import Tensor

from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.model.loss import cross_entropy_sum, linear_cross_entropy_sum


class Fp8Head(Fp8Linear):
    """`model.head.Head` in the plan's precision.

    In BF16 its loss makes the gradients at once (`model/loss.py`); in FP8, and when statistics are asked for, the GEMMs are those of
    `Fp8Linear` on checkpointed chunks.
    """

    takes_labels = True

    def forward(self, input: Tensor, labels_T: Tensor | None = None, chunk_tokens: int = 0) -> Tensor:
        """hidden [T, D] -> logits [T, V]; with labels the FP32 sum of the token losses."""
        if labels_T is None:
            return super().forward(input)
        if self.precision == "bf16" and self.stats_sink is None:
            return linear_cross_entropy_sum(
                input, self.weight, labels_T, chunk_tokens=chunk_tokens, counter=self.counter
            )
        return cross_entropy_sum(input, super().forward, labels_T, chunk_tokens=chunk_tokens)
