"""Rows to tokens, in this process or in several; the result does not depend on how many."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
import xxhash

from fp8ctl.config.schema import DataPrepConfig
from fp8ctl.data.chat import load_template, render
from fp8ctl.data.rows import BadRow, BadRowError, Conversation, Document, Message, Row
from fp8ctl.data.shards import count_trained
from fp8ctl.data.tokenizer import load_tokenizer
from fp8ctl.errors import DataError

_BATCH_ROWS = 128
_BATCH_CHARS = 1_000_000


@dataclass(frozen=True)
class Sample:
    """One document or conversation as tokens."""

    ids: np.ndarray
    """int32, shape [T]."""
    mask: np.ndarray | None
    """uint8, shape [T], for conversations."""
    key: int
    """Hash (64 bits) of the text, for a conversation of all before its first answer: it decides the split."""


@dataclass(frozen=True)
class Dropped:
    """A row that is in order but left out."""

    reason: str
    """One of: empty, too_long, no_trained_token."""


Encoded = Sample | Dropped | BadRow


class Encoder:
    """Tokenizes batches of rows as the settings say."""

    def __init__(self, config: DataPrepConfig) -> None:
        """Raises DataError when the tokenizer or the chat template can't be used."""
        assert config.tokenizer is not None, "checks.check_data_prep asks for it"
        self._config = config
        self.tokenizer = load_tokenizer(config.tokenizer)
        self.template = load_template(config.chat_template, self.tokenizer) if config.kind == "sft" else None
        if config.kind == "cpt" and config.append_eos and self.tokenizer.eos_id is None:
            raise DataError(
                f"the tokenizer in {config.tokenizer} names no end-of-text token",
                "add eos_token to its tokenizer_config.json, or set append_eos=false",
            )

    def encode(self, rows: list[Row]) -> list[Encoded]:
        """One result for each row, in the same order."""
        documents = [r for r in rows if isinstance(r, Document) and r.text.strip()]
        ids = iter(self._encode_documents([d.text for d in documents]))
        out: list[Encoded] = []
        for row in rows:
            if isinstance(row, Conversation):
                out.append(self._conversation(row))
            elif isinstance(row, Document):
                out.append(self._document(row, next(ids)) if row.text.strip() else Dropped("empty"))
            else:
                out.append(row)
        return out

    def _encode_documents(self, texts: list[str]) -> list[np.ndarray | None]:
        try:
            return list(self.tokenizer.encode_documents(texts))
        except Exception:  # one text that the tokenizer can't take must not cost the whole batch
            if len(texts) == 1:
                return [None]
            return [ids for text in texts for ids in self._encode_documents([text])]

    def _document(self, row: Document, ids: np.ndarray | None) -> Encoded:
        if ids is None:
            return BadRow(row.origin, "the tokenizer refuses the text", ascii(row.text[:200]))
        if self._config.append_eos:
            ids = np.append(ids, np.array([self.tokenizer.eos_id], dtype=np.int32))
        if not len(ids):
            return Dropped("empty")
        return Sample(ids, None, _hash(row.text))

    def _conversation(self, row: Conversation) -> Encoded:
        assert self.template is not None
        messages = row.messages
        if self._config.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._config.system_prompt}, *messages]
        try:
            ids, mask = render(messages, self.template, self.tokenizer)
        except BadRowError as error:
            return BadRow(row.origin, error.message, ascii(messages[-1]["content"][:200]))
        if self._config.max_tokens is not None and len(ids) > self._config.max_tokens:
            return Dropped("too_long")
        if not count_trained(len(ids), mask):
            return Dropped("no_trained_token")
        return Sample(ids, mask, _hash(_question(row.messages)))


def encode_all(
    encoder: Encoder, config: DataPrepConfig, rows: Iterable[Row]
) -> Iterator[tuple[list[Row], list[Encoded]]]:
    """Batches of rows with their results, in order; `config.num_workers` processes when more than 1.

    Raises:
        DataError: a worker was killed.
    """
    batches = _batches(rows)
    if config.num_workers == 1:
        for batch in batches:
            yield batch, encoder.encode(batch)
        return
    # spawn, not fork: the tokenizer's threads do not survive a fork
    with ProcessPoolExecutor(config.num_workers, get_context("spawn"), _start_worker, (config,)) as pool:
        waiting: deque[tuple[list[Row], Future[list[Encoded]]]] = deque()
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_work, batch)))
                # a window, so that the reader never runs far ahead of the tokenizers
                if len(waiting) > 2 * config.num_workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            for done, future in waiting:
                yield done, future.result()
        except BrokenProcessPool:
            raise DataError(
                "a tokenizing process was killed", "most often memory ran out: set fewer num_workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    chars = 0
    for row in rows:
        batch.append(row)
        chars += len(row.text) if isinstance(row, Document) else 0
        if len(batch) == _BATCH_ROWS or chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _question(messages: list[Message]) -> str:
    # Answers to one prompt stay on one side: a validation question must not have been trained with another answer.
    first_answer = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    turns = messages[:first_answer] or messages
    return "\x1e".join(f"{m['role']}\x1f{m['content']}" for m in turns)


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", errors="surrogatepass"))


_encoder: Encoder | None = None


def _start_worker(config: DataPrepConfig) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    _encoder = Encoder(config)


def _work(batch: list[Row]) -> list[Encoded]:
    assert _encoder is not None
    return _encoder.encode(batch)
