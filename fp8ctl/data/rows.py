"""What sources give and what can be wrong with it: a document, a conversation, or a row to put into quarantine."""

from __future__ import annotations

from dataclasses import dataclass

from fp8ctl.errors import DataError

Message = dict[str, str]
"""One turn: `role` (system, user or assistant), `content`, and sometimes `reasoning_content`."""


class BadRowError(DataError):
    """One row that can't be used: data preparation puts it into quarantine, elsewhere it ends the command."""


@dataclass(frozen=True)
class Origin:
    """Where a row came from: a file (or generator) and the line, row or item number in it, counted from 1."""

    file: str
    line: int


@dataclass(frozen=True)
class Document:
    """Text to pre-train on."""

    origin: Origin
    text: str


@dataclass(frozen=True)
class Conversation:
    """Turns to fine-tune on."""

    origin: Origin
    messages: list[Message]


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read: why, and its first bytes."""

    origin: Origin
    reason: str
    excerpt: str = ""


Row = Document | Conversation | BadRow
