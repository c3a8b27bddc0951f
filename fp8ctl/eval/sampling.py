"""From logits to the next token: greedy, or nucleus sampling (Holtzman et al., arXiv 1904.09751) with one random stream per answer.

A token is the inverse of the cumulative distribution at one uniform number, so the t-th token of an answer depends on its own
logits and on the t-th number of its own stream: neither on the other answers of a batch nor on their order.

Letters: B answers in the batch, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

# Tokens looked at before the whole vocabulary is sorted: a trained model's nucleus nearly always lies in them.
_NUCLEUS_GUESS = 256


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 0.0
    """0: the most probable token."""
    top_p: float = 1.0
    """Smallest set of most probable tokens with at least this mass is sampled from; unused when greedy."""

    @property
    def is_greedy(self) -> bool:
        """Whether no random numbers are needed."""
        return self.temperature == 0.0


def stream(seed: int, family: str, index: int, sample: int, count: int) -> np.ndarray:
    """The first `count` uniform numbers in [0, 1) of one answer's own stream, float64.

    The Philox key is a hash of all that names the answer; a longer stream starts with the shorter one.
    """
    name = f"{seed}\0{family}\0{index}\0{sample}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def choose(logits_BV: torch.Tensor, uniform_B: torch.Tensor | None, sampling: Sampling) -> torch.Tensor:
    """The next token of each answer, int64 of length B.

    Args:
        logits_BV: any float dtype; judged in FP32.
        uniform_B: float64, one number of each answer's stream; unused (may be None) when greedy.
        sampling: temperature and nucleus.
    """
    logits_BV = logits_BV.float()
    if sampling.is_greedy:
        return logits_BV.argmax(-1)
    assert uniform_B is not None
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_p >= 1.0:
        return _draw(logits_BV.softmax(-1), uniform_B)
    log_mass_B1 = logits_BV.logsumexp(-1, keepdim=True)
    guess = min(_NUCLEUS_GUESS, logits_BV.shape[-1])
    while True:
        best, ids = logits_BV.topk(guess, dim=-1)
        probs = (best - log_mass_B1).exp()
        before = probs.double().cumsum(-1) - probs
        is_whole = guess == logits_BV.shape[-1]
        if is_whole or bool((before[:, -1] >= sampling.top_p).all()):
            break
        guess = logits_BV.shape[-1]
    # a token belongs to the nucleus while those before it hold less than top_p: the first always does
    nucleus = torch.where(before < sampling.top_p, probs, 0.0)
    return ids.gather(-1, _draw(nucleus, uniform_B).unsqueeze(-1)).squeeze(-1)


def _draw(weights: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Position whose share of the cumulative weight holds the uniform number; never one of weight 0."""
    cumulative = weights.double().cumsum(-1)
    target = uniform_B.double().unsqueeze(-1) * cumulative[:, -1:]
    position = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # rounding may lift the target to the total itself: then the last position that has weight
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.minimum(position, last)
