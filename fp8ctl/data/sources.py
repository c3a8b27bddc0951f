"""From files and generators to documents and conversations, one at a time.

Rows that can't be used come out as `BadRow` and never stop the reading; a file that can't be read does, since nobody can tell
how many rows it would have held.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fp8ctl.config.schema import SourceConfig
from fp8ctl.data import conversations, reasoning_gym
from fp8ctl.data.rows import BadRow, BadRowError, Conversation, Document, Origin, Row
from fp8ctl.data.stdlib_text import iter_stdlib
from fp8ctl.errors import DataError

_SUFFIXES = {"jsonl": (".jsonl", ".ndjson"), "parquet": (".parquet",), "text": (".txt", ".md", ".rst")}
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
_BOM = b"\xef\xbb\xbf"

Parse = Callable[[Origin, Any], Row]


@dataclass(frozen=True)
class InputFile:
    path: str
    bytes: int
    format: str
    compression: str = ""


@dataclass(frozen=True)
class Slice:
    file: InputFile
    start: int = 0
    end: int | None = None


def split_file(file: InputFile, max_bytes: int) -> list[Slice]:
    if file.format != "jsonl" or file.bytes <= max_bytes:
        return [Slice(file)]
    n = -(-file.bytes // max_bytes)
    cuts: list[int] = [file.bytes * i // n for i in range(n + 1)]
    return [Slice(file, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def iter_slice(piece: Slice, source: SourceConfig, kind: str) -> Iterator[Row]:
    parse: Parse = _conversation if kind == "sft" else lambda origin, row: _document(origin, row, source.text_field)
    wanted = conversations.FIELDS if kind == "sft" else (source.text_field,)
    path = Path(piece.file.path)
    with _reading(path):
        if source.kind == "jsonl":
            yield from _jsonl(path, parse, piece.start, piece.end)
        elif source.kind == "parquet":
            yield from _parquet(path, parse, wanted)
        else:
            yield _text(path)


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


def find_files(source: SourceConfig) -> list[InputFile]:
    """Files of a source: each path or pattern in the order given, folders and patterns sorted by name, no file twice.

    Raises:
        DataError: a path that matches nothing, or compressed files.
    """
    found: dict[str, Path] = {}
    suffixes = _SUFFIXES[source.kind]
    for given in source.paths:
        if os.path.isdir(given):
            matches = sorted(p for p in Path(given).rglob("*") if p.suffix in suffixes and p.is_file())
            expected = f"the folder must hold files that end in {' or '.join(suffixes)}"
        else:
            literal = [given] if os.path.exists(given) else []
            matches = [Path(p) for p in literal or sorted(glob.glob(given, recursive=True)) if os.path.isfile(p)]
            expected = "check the path; patterns may use *, ? and **"
        if not matches:
            raise DataError(f"no {source.kind} files in {given}", expected)
        for path in matches:
            if path.suffix in _COMPRESSED:
                raise DataError(f"{path} is compressed", "unpack it first")
            found.setdefault(os.path.realpath(path), path)
    return [InputFile(str(p), p.stat().st_size, source.kind) for p in found.values()]


def _jsonl(path: Path, parse: Parse, start: int = 0, end: int | None = None) -> Iterator[Row]:
    with open(path, "rb") as f:
        if start:
            f.seek(start - 1)
            f.readline()
        at = f.tell()
        # Binary lines end at b"\n" only: U+2028, vertical tab and the like inside a text do not split a record.
        for number, line in enumerate(f, start=1):
            here, at = at, at + len(line)
            if end is not None and here >= end:
                return
            if number == 1:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            origin = Origin(str(path), number, here)
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                yield BadRow(origin, f"not JSON: {error}", _excerpt(line))
                continue
            parsed = parse(origin, row)
            yield BadRow(origin, parsed.reason, _excerpt(line)) if isinstance(parsed, BadRow) else parsed


def _parquet(path: Path, parse: Parse, wanted: tuple[str, ...]) -> Iterator[Row]:
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [n for n in wanted if n in names]
        if not columns:
            raise DataError(f"{path} has no column {' or '.join(wanted)}", f"its columns: {', '.join(names)}")
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=columns):
            for row in _rows_of(batch):
                number += 1
                origin = Origin(str(path), number)
                yield BadRow(origin, row) if isinstance(row, str) else parse(origin, row)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is no whole Parquet file: {error}", "it may be cut short: copy it again") from None


def _rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | str]:
    """Rows as dicts; a row with text that is not UTF-8 as the reason why it can't be."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for i in range(batch.num_rows):
        try:
            yield batch.slice(i, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield f"not UTF-8: {error}"


def _text(path: Path) -> Row:
    origin = Origin(str(path), 1)
    raw = path.read_bytes()
    try:
        return Document(origin, raw.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(origin, f"not UTF-8: {error}", _excerpt(raw))


def _reasoning_gym(source: SourceConfig) -> Iterator[Row]:
    for family in source.families or reasoning_gym.FAMILIES:
        questions = reasoning_gym.iter_questions(family, source.num_per_family, source.seed, held_out=False)
        for number, asked in enumerate(questions, start=1):
            yield Conversation(Origin(f"reasoning_gym/{family}", number), reasoning_gym.messages(asked))


def _document(origin: Origin, row: Any, field: str) -> Row:
    if not isinstance(row, dict):
        return BadRow(origin, f"{type(row).__name__}, not an object")
    if field not in row:
        return BadRow(origin, f"no field {field!r} (fields: {', '.join(map(str, row)) or 'none'})")
    text = row[field]
    if not isinstance(text, str):
        return BadRow(origin, f"field {field!r} is {type(text).__name__}, not text")
    return Document(origin, text)


def _conversation(origin: Origin, row: Any) -> Row:
    if not isinstance(row, dict):
        return BadRow(origin, f"{type(row).__name__}, not an object")
    try:
        return conversations.to_conversation(row, origin)
    except BadRowError as error:
        return BadRow(origin, error.message)


def _excerpt(raw: bytes) -> str:
    return raw[:200].decode("utf-8", errors="replace")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}", "check that it exists and may be read") from None
