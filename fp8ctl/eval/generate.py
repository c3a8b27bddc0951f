"""Answers to many prompts at once, with a key/value cache.

Rows of the cache are slots. A slot whose answer has ended takes the next prompt at once, so the batch stays full until the
prompts run out; then the rows that are left move together. What all prompts begin with (the system message) is computed once
and copied. What an answer says depends on its own prompt, its own random
stream (`sampling.stream`) and the model, not on the slot, the batch size or the neighbours, up to the rounding of GEMMs of
different heights.

Letters: B slots, A tokens of an answer, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fp8ctl.errors import ModelError
from fp8ctl.eval.completions import Key
from fp8ctl.eval.sampling import Sampling, choose, stream
from fp8ctl.model.kv_cache import KVCache
from fp8ctl.model.transformer import Transformer

# Prompt tokens computed in one pass: enough to fill any device, little enough for its memory.
_PREFILL_TOKENS = 8192
# Slots are closed up once this share of them is idle: each time copies the rows that move.
_IDLE_SHARE = 0.25


@dataclass(frozen=True)
class Request:
    """One answer to be generated."""

    key: Key
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Generated:
    """One answer as it came out."""

    request: Request
    token_ids: tuple[int, ...]
    """Generated tokens without the end token."""
    num_tokens: int
    """Generated tokens with the end token."""
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Protocol:
    """What decides an answer besides prompt and model."""

    sampling: Sampling
    seed: int
    """Every answer's random stream comes from this and its key."""
    stop_ids: frozenset[int]
    """Tokens that end an answer."""
    max_new_tokens: int
    """Most tokens of one answer, the end token included."""
    shared_tokens: int = 0
    """Tokens that all prompts of the evaluation begin with; fewer than the shortest prompt has."""


@dataclass
class _Slot:
    request: Request
    tokens: list[int]

    @property
    def position(self) -> int:
        """Where the newest token stands: it is not in the cache yet."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1


def shared_tokens(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many tokens all prompts begin with, at least one left over for each."""
    first, last = min(prompts), max(prompts)  # in order of tokens, what these two share all the others share
    longest = min(len(p) for p in prompts) - 1
    return next((i for i in range(longest) if first[i] != last[i]), longest)


def generate(
    model: Transformer,
    requests: Sequence[Request],
    protocol: Protocol,
    *,
    batch_size: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Iterator[Generated]:
    """Yields every request's answer as soon as it has ended.

    Args:
        model: in inference; its weights' dtype and device are those of the cache.
        requests: in any order; the longest prompts are taken first.
        protocol: sampling, seed, end of answers.
        batch_size: answers generated at once.
        on_tokens: called after each step with the number of tokens it gave.

    Raises:
        ModelError: a prompt and its answer don't fit into the model's positions, or the model's logits are not finite.
    """
    if not requests:
        return
    batch = _Batch(model, requests, protocol, batch_size)
    while batch.has_work:
        count, finished = batch.step()
        on_tokens(count)
        yield from finished


class _Batch:
    """Slots, their cache, and the prompts that wait for one."""

    def __init__(self, model: Transformer, requests: Sequence[Request], protocol: Protocol, batch_size: int) -> None:
        weight = model.head_weight
        longest = max(len(r.prompt_ids) for r in requests)
        self.model, self.protocol, self.device = model, protocol, weight.device
        # sorted is stable: equal lengths keep the order of the questions
        self.waiting = deque(sorted(requests, key=lambda r: -len(r.prompt_ids)))
        num_rows = min(batch_size, len(requests))
        # the last token of an answer is never looked at again, so it needs no place
        max_tokens = longest + protocol.max_new_tokens - 1
        self.cache = KVCache(
            model.shape, num_rows=num_rows, max_tokens=max_tokens, dtype=weight.dtype, device=self.device
        )
        self.slots: list[_Slot | None] = [None] * num_rows
        self.shared = self._prefill_shared(requests) if protocol.shared_tokens else None
        self.uniform_BA = torch.zeros(0, dtype=torch.float64)
        if not protocol.sampling.is_greedy:
            self.uniform_BA = torch.zeros(num_rows, protocol.max_new_tokens, dtype=torch.float64, device=self.device)

    @property
    def has_work(self) -> bool:
        """Whether any answer is still to come."""
        return bool(self.waiting) or any(self.slots)

    # a decorated method and not a `with` in the generator: a generator's mode would leak to whoever iterates it
    @torch.inference_mode()
    def step(self) -> tuple[int, list[Generated]]:
        """Fills free slots with prompts (each gives its first token), or else gives every slot one more token.

        Returns: the number of new tokens, and the answers that ended.
        """
        rows = self._admit()
        if rows:
            logits_BV = self._prefill(rows)
        else:
            self._close_up()
            rows = [row for row, slot in enumerate(self.slots) if slot is not None]
            logits_BV = self._decode(rows)
        for row, token in zip(rows, self._choose(logits_BV, rows), strict=True):
            self._slot(row).tokens.append(token)
        return len(rows), [done for row in rows if (done := self._finish(row)) is not None]

    @torch.inference_mode()
    def _prefill_shared(self, requests: Sequence[Request]) -> KVCache:
        """Keys and values of what all prompts begin with."""
        shared = requests[0].prompt_ids[: self.protocol.shared_tokens]
        assert all(r.prompt_ids[: len(shared)] == shared and len(r.prompt_ids) > len(shared) for r in requests)
        cache = KVCache(
            self.model.shape, num_rows=1, max_tokens=len(shared), dtype=self.cache.k_LBKSH.dtype, device=self.device
        )
        self.model.extend(cache, [shared], [0])
        return cache

    def _slot(self, row: int) -> _Slot:
        slot = self.slots[row]
        assert slot is not None
        return slot

    def _admit(self) -> list[int]:
        """Gives waiting prompts neighbouring free rows, as many as one pass takes."""
        if not self.waiting or None not in self.slots:
            return []
        row, num_tokens = self.slots.index(None), 0
        rows: list[int] = []
        while row < len(self.slots) and self.slots[row] is None and self.waiting:
            num_tokens += len(self.waiting[0].prompt_ids) - self.protocol.shared_tokens
            if rows and num_tokens > _PREFILL_TOKENS:
                break
            request = self.waiting.popleft()
            self.slots[row] = _Slot(request, [])
            if not self.protocol.sampling.is_greedy:
                self.uniform_BA[row] = torch.from_numpy(self._stream(request.key))
            rows.append(row)
            row += 1
        return rows

    def _stream(self, key: Key) -> np.ndarray:
        return stream(self.protocol.seed, key.family, key.index, key.sample, self.protocol.max_new_tokens)

    def _prefill(self, rows: list[int]) -> torch.Tensor:
        """Computes prompts from where they part; gives the logits after each."""
        start, cache = self.protocol.shared_tokens, self.cache.rows(rows[0], rows[-1] + 1)
        if self.shared is not None:
            cache.k_LBKSH[:, :, :, :start] = self.shared.k_LBKSH
            cache.v_LBKSH[:, :, :, :start] = self.shared.v_LBKSH
        prompts = [self._slot(row).request.prompt_ids[start:] for row in rows]
        return self.model.extend(cache, prompts, [start] * len(rows))

    def _decode(self, rows: list[int]) -> torch.Tensor:
        """Computes the newest token of every slot; gives the logits of the occupied ones."""
        # an idle slot among busy ones computes a token at position 0 that nobody reads
        newest = [((slot.tokens[-1],), slot.position) if slot else ((0,), 0) for slot in self.slots]
        cache = self.cache.rows(0, len(newest))
        logits_BV = self.model.extend(cache, [token for token, _ in newest], [position for _, position in newest])
        return logits_BV if len(rows) == len(newest) else logits_BV[rows]

    def _choose(self, logits_BV: torch.Tensor, rows: list[int]) -> list[int]:
        uniform_B = None
        if not self.protocol.sampling.is_greedy:
            uniform_B = self.uniform_BA[rows, [len(self._slot(row).tokens) for row in rows]]
        finite_B = logits_BV.sum(-1).isfinite()
        tokens = choose(logits_BV, uniform_B, self.protocol.sampling).tolist()
        if not bool(finite_B.all()):
            key = self._slot(rows[int(finite_B.int().argmin())]).request.key
            raise ModelError(
                f"the model's logits are not finite (question {key.index} of {key.family})",
                "the weights hold inf or NaN, or overflow in this dtype: try dtype=fp32, or an earlier checkpoint",
            )
        return tokens

    def _finish(self, row: int) -> Generated | None:
        """Frees the row if its answer has ended."""
        request, tokens = self._slot(row).request, self._slot(row).tokens
        is_stopped = tokens[-1] in self.protocol.stop_ids
        if not is_stopped and len(tokens) < self.protocol.max_new_tokens:
            return None
        self.slots[row] = None
        text_tokens = tuple(tokens[:-1] if is_stopped else tokens)
        return Generated(request, text_tokens, len(tokens), "stop" if is_stopped else "length")

    def _close_up(self) -> None:
        """Without waiting prompts, idle rows stay idle: once they are many, the busy ones move together."""
        busy = [row for row, slot in enumerate(self.slots) if slot is not None]
        if len(self.slots) - len(busy) < max(1, _IDLE_SHARE * len(self.slots)):
            return
        self.cache.keep(busy)
        self.slots = [self.slots[row] for row in busy]
        if not self.protocol.sampling.is_greedy:
            self.uniform_BA = self.uniform_BA[busy]
