"""From files and generators to documents and conversations, one at a time.

Rows that can't be used come out as `BadRow` and never stop the reading. A file that can't be read does, since nobody can tell
how many rows it would have held; one that goes wrong in its middle does too, unless `damaged_files` says to keep its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data import conversations, formats, reasoning_gym
from fp8ctl.data.files import InputFile, Slice, find_files
from fp8ctl.data.formats import Refused
from fp8ctl.data.rows import BadRow, BadRowError, Conversation, Document, Origin, Row
from fp8ctl.data.stdlib_text import iter_stdlib
from fp8ctl.data.streams import DamagedError, WrongFormatError, can_seek, is_remote, open_raw, read_chunks, sniff
from fp8ctl.errors import DataError

_BOM = b"\xef\xbb\xbf"
_NAMES_SHOWN = 10

Parse = Callable[[Origin, Any], Row]


def iter_rows(source: SourceConfig, kind: str) -> Iterator[Row]:
    """Documents (kind cpt) or conversations (kind sft) of one source, in a fixed order.

    Raises:
        DataError: nothing matches the paths, or a file can't be read.
        ConfigError, MissingPackageError: see `reasoning_gym.question`.
    """
    if source.kind == "python_stdlib":
        yield from iter_stdlib()
    elif source.kind == "reasoning_gym":
        yield from _reasoning_gym(source)
    else:
        for file in find_files(source):
            yield from iter_slice(Slice(file), source, kind)


def iter_slice(part: Slice, source: SourceConfig, kind: str) -> Iterator[Row]:
    """Rows of one slice; the slices of a file together give what the whole file gives.

    Raises:
        DataError: the file can't be read, has changed since it was listed, or is damaged.
        MissingPackageError: a URL needs a package that is not installed.
    """
    read = {"jsonl": _jsonl, "json": _json, "parquet": _parquet, "text": _text}[part.file.format]
    good = 0
    try:
        for row in read(part, source, kind):
            good += not isinstance(row, BadRow)
            yield row
    except DamagedError as damage:
        path = part.file.path
        if source.damaged_files == "fail":
            raise DataError(
                f"{path} is damaged: {damage.message} ({good:,} good rows came before)",
                "copy or write it again, or set sources.*.damaged_files=keep to use the rows before the damage",
            ) from None
        origin = Origin(path, damage.number, damage.at)
        reason = f"the file is damaged, this row and all that follow are lost: {damage.message}"
        yield BadRow(origin, reason, is_damage=True)


def split_file(file: InputFile, max_bytes: int) -> list[Slice]:
    """Slices of about `max_bytes` that together are the file; one slice where a file can't be read in parts.

    Raises:
        DataError: the file can't be read.
        MissingPackageError: a URL needs a package that is not installed.
    """
    if file.bytes <= max_bytes:
        return [Slice(file)]
    if file.format == "jsonl" and not file.compression and _in_parts(file):
        return [Slice(file, at, min(at + max_bytes, file.bytes)) for at in range(0, file.bytes, max_bytes)]
    if file.format == "parquet":
        try:
            with open_raw(file.path, file.bytes) as f:
                groups = formats.parquet_groups(f, file.path)
        except DamagedError:  # said when it is read
            return [Slice(file)]
        slices, start, size = [], 0, 0.0
        compression = file.bytes / (sum(groups) or 1)
        for number, group in enumerate(groups, start=1):
            size += group * compression
            if size >= max_bytes or number == len(groups):
                slices.append(Slice(file, start, number))
                start, size = number, 0.0
        return slices or [Slice(file)]
    return [Slice(file)]


def _in_parts(file: InputFile) -> bool:
    if not is_remote(file.path):
        return True
    if not can_seek(file.path, file.bytes):
        return False
    with open_raw(file.path) as f:
        return sniff(f.read(16), "") == ""


def _jsonl(part: Slice, source: SourceConfig, kind: str) -> Iterator[Row]:
    parse = _parser(source, kind)
    path, size = part.file.path, part.file.bytes
    # from one byte before: a line starts here only when that byte ends another
    start = max(0, part.start - 1)
    chunks = read_chunks(path, part.file.compression, size, start)
    number = 0
    for at, raw, ended in formats.lines(chunks, source.max_row_bytes, start):
        if part.end is not None and at >= part.end:
            return
        if at < part.start:
            continue
        number += 1
        value = formats.parse(raw, ended=ended)
        if isinstance(value, Refused):
            if isinstance(raw, bytes) and not raw.strip().removeprefix(_BOM):
                continue
            yield BadRow(Origin(path, number, at), value.reason, formats.excerpt(raw))
            continue
        row = parse(Origin(path, number, at), value)
        yield BadRow(row.origin, row.reason, formats.excerpt(raw)) if isinstance(row, BadRow) else row


def _json(part: Slice, source: SourceConfig, kind: str) -> Iterator[Row]:
    parse = _parser(source, kind)
    path = part.file.path
    chunks = read_chunks(path, part.file.compression, part.file.bytes)
    for at, raw in enumerate(formats.items(chunks, source.max_row_bytes)):
        origin = Origin(path, at + 1, at)
        value = formats.parse(raw)
        row = BadRow(origin, value.reason) if isinstance(value, Refused) else parse(origin, value)
        yield BadRow(origin, row.reason, formats.excerpt(raw)) if isinstance(row, BadRow) else row


def _parquet(part: Slice, source: SourceConfig, kind: str) -> Iterator[Row]:
    parse = _parser(source, kind)
    path = part.file.path
    wanted = conversations.FIELDS if kind == "sft" else (source.text_field,)
    with open_raw(path, part.file.bytes) as f:
        for at, row in formats.parquet_rows(f, path, wanted, text=kind == "cpt", start=part.start, end=part.end):
            origin = Origin(path, at + 1, at)
            if isinstance(row, DamagedError):
                if source.damaged_files == "fail":
                    raise row
                yield BadRow(
                    origin, f"the file is damaged, this row and all that follow in its group are lost: {row.message}"
                )
            else:
                yield BadRow(origin, row.reason) if isinstance(row, Refused) else parse(origin, row)


def _text(part: Slice, source: SourceConfig, kind: str) -> Iterator[Row]:
    origin = Origin(part.file.path, 1)
    pieces: list[bytes] = []
    size = 0
    try:
        for chunk in read_chunks(part.file.path, part.file.compression, part.file.bytes):
            size += len(chunk)
            if size <= source.max_row_bytes:
                pieces.append(chunk)
            elif not pieces:
                pieces.append(chunk[: formats.EXCERPT_BYTES])
    except WrongFormatError as error:  # one file is one row here
        yield BadRow(origin, error.message)
        return
    raw = b"".join(pieces)
    if size > source.max_row_bytes:
        yield BadRow(origin, f"{size:,} bytes long, which is more than max_row_bytes", formats.excerpt(raw))
    elif b"\0" in raw:
        yield BadRow(origin, "it holds NUL bytes, so it is no text", formats.excerpt(raw))
    else:
        yield _decoded(origin, raw.removeprefix(_BOM))


def _decoded(origin: Origin, raw: bytes) -> Document | BadRow:
    try:
        return Document(origin, raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(origin, f"not UTF-8: {error.reason} at byte {error.start}", formats.excerpt(raw))


def _reasoning_gym(source: SourceConfig) -> Iterator[Row]:
    for family in source.families or reasoning_gym.FAMILIES:
        questions = reasoning_gym.iter_questions(family, source.num_per_family, source.seed, held_out=False)
        for number, asked in enumerate(questions, start=1):
            yield Conversation(Origin(f"reasoning_gym/{family}", number, number - 1), reasoning_gym.messages(asked))


def _parser(source: SourceConfig, kind: str) -> Parse:
    if kind == "sft":
        return _conversation
    field = source.text_field
    return lambda origin, row: _document(origin, row, field)


def _document(origin: Origin, row: Any, field: str) -> Row:
    text = row.get(field) if isinstance(row, dict) else None
    if isinstance(text, str):
        return Document(origin, text)
    if not isinstance(row, dict):
        return BadRow(origin, f"{_kind(row)}, not an object")
    if isinstance(text, bytes):
        return _decoded(origin, text)
    if field not in row:
        names = ", ".join(list(row)[:_NAMES_SHOWN]) + (", ..." if len(row) > _NAMES_SHOWN else "")
        return BadRow(origin, f"no field {field!r} (fields: {names[:200] or 'none'})")
    return BadRow(origin, f"field {field!r} is {_kind(text)}, not text")


def _conversation(origin: Origin, row: Any) -> Row:
    if not isinstance(row, dict):
        return BadRow(origin, f"{_kind(row)}, not an object")
    try:
        return conversations.to_conversation(row, origin)
    except BadRowError as error:
        return BadRow(origin, error.message)


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
