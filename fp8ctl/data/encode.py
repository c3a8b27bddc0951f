"""Rows to tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from fp8ctl.config.data_schema import DataPrepConfig
from fp8ctl.data.rows import BadRow, Conversation, Document, Dropped, Encoded, Row, Sample
from fp8ctl.data.sft import ConversationEncoder
from fp8ctl.data.tokenizer import load_tokenizer
from fp8ctl.errors import DataError

_BATCH_ROWS = 128
_BATCH_CHARS = 1_000_000


class Encoder:
    """Tokenizes batches of rows as the settings say."""

    def __init__(self, config: DataPrepConfig) -> None:
        """Raises DataError when the tokenizer or the chat template can't be used."""
        assert config.tokenizer is not None, "checks.check_data_prep asks for it"
        self._config = config
        self.tokenizer = load_tokenizer(config.tokenizer, config.document_control_tokens)
        self._conversations = ConversationEncoder(config, self.tokenizer) if config.kind == "sft" else None
        self.template = self._conversations.template if self._conversations else None
        if config.kind == "cpt" and config.append_eos and self.tokenizer.eos_id is None:
            raise DataError(
                f"the tokenizer in {config.tokenizer} names no end-of-text token",
                "add eos_token to its tokenizer_config.json, or set append_eos=false",
            )
        if config.kind == "cpt" and config.prepend_bos and self.tokenizer.bos_id is None:
            raise DataError(
                f"the tokenizer in {config.tokenizer} names no begin-of-text token",
                "add bos_token to its tokenizer_config.json, or set prepend_bos=false",
            )
        if config.kind == "cpt":
            self.tokenizer.encode_documents([])  # what it can't do is said before a document is at fault

    def encode(self, rows: list[Row]) -> list[Encoded]:
        """One result for each row, in the same order."""
        documents = [r for r in rows if isinstance(r, Document) and r.text.strip()]
        ids = iter(self._encode_documents([d.text for d in documents]))
        out: list[Encoded] = []
        for row in rows:
            if isinstance(row, Conversation):
                assert self._conversations is not None, "sources give conversations for kind sft only"
                out.append(self._conversations.encode(row))
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
        if not len(ids):
            return Dropped("empty")
        first = [self.tokenizer.bos_id] if self._config.prepend_bos else []
        last = [self.tokenizer.eos_id] if self._config.append_eos else []
        ids = np.concatenate([first, ids, last]).astype(np.int32)
        note = "control_text" if self.tokenizer.holds_control_text(row.text) else ""
        return [Sample(ids, None, _hash(row.text), note)]


@functools.lru_cache(maxsize=1)
def encoder_for(config: DataPrepConfig) -> Encoder:
    """The encoder of some settings; one process makes it once, since tokenizers take long to load.

    Raises:
        DataError: see `Encoder`.
    """
    return Encoder(config)


def in_batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in groups that are worth a call of the tokenizer and don't take much memory."""
    batch: list[Row] = []
    chars = 0
    for row in rows:
        batch.append(row)
        chars += num_chars(row)
        if len(batch) == _BATCH_ROWS or chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def num_chars(row: Row) -> int:
    """Characters of text in a row."""
    if isinstance(row, Document):
        return len(row.text)
    if not isinstance(row, Conversation):
        return 0
    texts = (text for message in row.messages for text in message.values() if isinstance(text, str))
    return sum(map(len, texts)) + (4 * len(row.tokens[0]) if row.tokens is not None else 0)


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", errors="surrogatepass"))
