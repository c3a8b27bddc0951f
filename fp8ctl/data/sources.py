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
from typing import Any, Literal

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fp8ctl.config.data_schema import SourceConfig
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
    """One file of a source: a local path or a URL."""

    path: str
    bytes: int
    """Size on disk, compressed where it is; 0 where a remote file tells none."""
    format: Literal["jsonl", "json", "parquet", "text"]
    compression: Literal["", "gz", "zst", "xz", "bz2"] = ""


@dataclass(frozen=True)
class Slice:
    """Part of a file that one task reads, [start, end): bytes of an uncompressed JSONL file (it owns the lines that start
    in it), row groups of a Parquet file; of others the whole."""

    file: InputFile
    start: int = 0
    end: int | None = None


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


def iter_slice(slice: Slice, source: SourceConfig, kind: str) -> Iterator[Row]:
    """Rows of one slice; the slices of a file together give what the whole file gives.

    Raises:
        DataError: the file can't be read.
    """
    parse: Parse = _conversation if kind == "sft" else lambda origin, row: _document(origin, row, source.text_field)
    path = Path(slice.file.path)
    with _reading(path):
        if slice.file.format == "jsonl":
            yield from _jsonl(slice, parse)
        elif slice.file.format == "parquet":
            wanted = conversations.FIELDS if kind == "sft" else (source.text_field,)
            yield from _parquet(slice, parse, wanted)
        else:
            yield _text(path)


def split_file(file: InputFile, max_bytes: int) -> list[Slice]:
    """Slices of about `max_bytes` that together are the file; one slice where a file can't be read in parts.

    Raises:
        DataError: the file can't be read.
    """
    with _reading(Path(file.path)):
        if file.format == "jsonl" and not file.compression and file.bytes > max_bytes:
            return [Slice(file, at, min(at + max_bytes, file.bytes)) for at in range(0, file.bytes, max_bytes)]
        if file.format == "parquet" and file.bytes > max_bytes:
            slices, start, size = [], 0, 0
            try:
                metadata = pq.read_metadata(file.path)
            except pa.ArrowException:
                return [Slice(file)]
            for group in range(metadata.num_row_groups):
                size += sum(
                    metadata.row_group(group).column(i).total_compressed_size for i in range(metadata.num_columns)
                )
                if size >= max_bytes or group + 1 == metadata.num_row_groups:
                    slices.append(Slice(file, start, group + 1))
                    start, size = group + 1, 0
            return slices or [Slice(file)]
    return [Slice(file)]


def find_files(source: SourceConfig) -> list[InputFile]:
    """Files of a source: each path or pattern in the order given, folders and patterns sorted by name, no file twice.

    Raises:
        DataError: a path that matches nothing, or compressed files.
    """
    assert source.kind in ("jsonl", "parquet", "text")
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
    return [InputFile(str(path), path.stat().st_size, source.kind) for path in found.values()]


def _jsonl(slice: Slice, parse: Parse) -> Iterator[Row]:
    with open(slice.file.path, "rb") as f:
        if slice.start:  # the line that runs into this slice belongs to the slice where it starts
            f.seek(slice.start - 1)
            f.readline()
        at = f.tell()
        # Binary lines end at b"\n" only: U+2028, vertical tab and the like inside a text do not split a record.
        for number, line in enumerate(f, start=1):
            if slice.end is not None and at >= slice.end:
                return
            origin = Origin(slice.file.path, number, at)
            at += len(line)
            if origin.at == 0:
                line = line.removeprefix(_BOM)
            if not line.strip():
                continue
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                yield BadRow(origin, f"not JSON: {error}", _excerpt(line))
                continue
            parsed = parse(origin, row)
            yield BadRow(origin, parsed.reason, _excerpt(line)) if isinstance(parsed, BadRow) else parsed


def _parquet(slice: Slice, parse: Parse, wanted: tuple[str, ...]) -> Iterator[Row]:
    path = slice.file.path
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        columns = [n for n in wanted if n in names]
        if not columns:
            raise DataError(f"{path} has no column {' or '.join(wanted)}", f"its columns: {', '.join(names)}")
        groups = range(file.num_row_groups)[slice.start : slice.end]
        at = sum(file.metadata.row_group(g).num_rows for g in range(slice.start))
        for batch in file.iter_batches(batch_size=1024, row_groups=list(groups), columns=columns):
            for row in _rows_of(batch):
                origin = Origin(path, at + 1, at)
                at += 1
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
            yield Conversation(Origin(f"reasoning_gym/{family}", number, number - 1), reasoning_gym.messages(asked))


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
