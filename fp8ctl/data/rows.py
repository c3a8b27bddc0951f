"""What sources give and what can be wrong with it: a document, a conversation, or a row to put into quarantine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ctl.errors import DataError

Message = dict[str, Any]
"""One turn: `role` (system, developer, user, assistant or tool) and `content`, both text; an assistant's may have `reasoning_content`
(text), `tool_calls` (a list of {type, function: {name, arguments}}) and `is_trained` (False), a tool's `name` and `tool_call_id`."""


class BadRowError(DataError):
    """One row that can't be used: data preparation puts it into quarantine, elsewhere it ends the command."""


@dataclass(frozen=True)
class Origin:
    """Where a row came from: a file (or generator) and its place in it."""

    file: str
    line: int
    """Line, row or item number from 1; counted from the start of the slice where only a slice of a JSONL file is read."""
    at: int = 0
    """What identifies the record whatever slice is read, from 0: byte of the (decompressed) file where the line starts
    (jsonl), row (parquet) or item (json, generators); 0 for a text file."""


@dataclass(frozen=True)
class Document:
    """Text to pre-train on."""

    origin: Origin
    text: str


@dataclass(frozen=True)
class Conversation:
    """Turns to fine-tune on, or tokens that somebody made of them."""

    origin: Origin
    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of the functions that may be called."""
    tokens: tuple[np.ndarray, np.ndarray] | None = None
    """Ids (int32, [T]) and mask (uint8, [T]) of a row that holds tokens already; it has no messages."""


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read: why, and its first bytes."""

    origin: Origin
    reason: str
    excerpt: str = ""
    is_damage: bool = False
    """Stands for all that is lost behind a damaged place of a file."""


Row = Document | Conversation | BadRow


@dataclass(frozen=True)
class Sample:
    """One document or conversation as tokens."""

    ids: np.ndarray
    """int32, shape [T]."""
    mask: np.ndarray | None
    """uint8, shape [T], for conversations."""
    key: int
    """Hash (64 bits) of the text, for a conversation of all before its first answer: it decides the split."""
    note: str = ""
    """What was done to it, if anything: counted in the manifest (truncated, split, split_within_turn)."""
    tokens_cut: int = 0
    """Tokens of its row that were left out on that occasion."""


@dataclass(frozen=True)
class Dropped:
    """A row that is in order but left out."""

    reason: str
    """empty, too_long, no_trained_token, or why an exclusion list names it."""
    tokens: int = 0
    """Its length, where it is known."""


Encoded = list[Sample] | Dropped | BadRow
"""What becomes of a row: samples (several where a long conversation was split), or why there are none."""
