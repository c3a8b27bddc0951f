"""The output head: hidden states to logits, or straight to the summed loss of a row.

A head with `takes_labels` makes the loss inside its own forward, where ZeRO-3 has gathered its weight, and never holds
the logits of a whole row (`loss.py`). It has an optional `counter`, which hears of each GEMM when it runs.

Letters: T packed tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, is_grad_enabled, nn
from torch.nn import functional

from fp8ctl.model.loss import Counter, cross_entropy_sum, linear_cross_entropy_sum


class Head(nn.Linear):
    """Output head with a weight of its own."""

    takes_labels = True
    counter: Counter | None = None

    def forward(self, hidden_TD: Tensor, labels_T: Tensor | None = None, chunk_tokens: int = 0) -> Tensor:
        """hidden [T, D] -> logits [T, V]; with labels the FP32 sum of the token losses."""
        return _run(hidden_TD, self.weight, labels_T, chunk_tokens, self.counter)


class Embedding(nn.Embedding):
    """Token embedding that is also the output head of a model with tied weights."""

    def forward(
        self,
        x: Tensor,
        labels_T: Tensor | None = None,
        chunk_tokens: int = 0,
        *,
        as_head: bool = False,
        counter: Counter | None = None,
    ) -> Tensor:
        """Token ids [T] -> hidden [T, D]; `as_head` what `Head` does with hidden [T, D]."""
        if as_head:
            return _run(x, self.weight, labels_T, chunk_tokens, counter)
        return functional.embedding(x, self.weight)


class TiedHead(nn.Module):
    """Output head without weights of its own: a call of the embedding, in whose forward ZeRO-3 gathers the weight."""

    takes_labels = True
    counter: Counter | None = None

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = (embedding,)  # in a tuple, so that the weight has one owner and one name

    def forward(self, hidden_TD: Tensor, labels_T: Tensor | None = None, chunk_tokens: int = 0) -> Tensor:
        """See `Head`."""
        return self._embedding[0](hidden_TD, labels_T, chunk_tokens, as_head=True, counter=self.counter)  # type: ignore[no-any-return]


def head_loss(head: nn.Module, hidden_TD: Tensor, labels_T: Tensor, *, chunk_tokens: int) -> Tensor:
    """FP32 sum of the token losses under any head; one without `takes_labels` maps hidden [C, D] to logits [C, V]."""
    if getattr(head, "takes_labels", False):
        return head(hidden_TD, labels_T, chunk_tokens)  # type: ignore[no-any-return]
    return cross_entropy_sum(hidden_TD, head, labels_T, chunk_tokens=chunk_tokens)


def _run(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor | None, chunk_tokens: int, counter: Counter | None
) -> Tensor:
    if labels_T is not None:
        return linear_cross_entropy_sum(hidden_TD, weight_VD, labels_T, chunk_tokens=chunk_tokens, counter=counter)
    logits_TV = functional.linear(hidden_TD, weight_VD)
    if counter is not None:
        _count(logits_TV, hidden_TD, weight_VD, counter)
    return logits_TV


def _count(logits_TV: Tensor, hidden_TD: Tensor, weight_VD: Tensor, counter: Counter) -> None:
    """Counts the GEMM that made the logits now, and those of its backward pass when they run."""
    V, D = weight_VD.shape
    size = {"m": hidden_TD.numel() // D, "n": V, "k": D}
    counter.add("fprop", "bf16", **size)
    if not (is_grad_enabled() and logits_TV.requires_grad):
        return
    needs_dgrad, needs_wgrad = hidden_TD.requires_grad, weight_VD.requires_grad

    # The gradient of the logits arrives right before the two GEMMs that use it
    def before_backward(_: Tensor) -> None:
        if needs_dgrad:
            counter.add("dgrad", "bf16", **size)
        if needs_wgrad:
            counter.add("wgrad", "bf16", **size)

    logits_TV.register_hook(before_backward)
