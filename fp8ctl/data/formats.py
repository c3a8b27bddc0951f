"""From bytes to records: lines of JSONL, items of JSON, rows of Parquet. A record that can't be read costs only itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fp8ctl.data.streams import CHUNK_BYTES, DamagedError, open_raw
from fp8ctl.errors import DataError

EXCERPT_BYTES = 200
_BOM = b"\xef\xbb\xbf"
_OUTSIDE_STRING = re.compile(rb'["\[\]{},]')
_NOT_SPACE = re.compile(rb"[^ \t\r\n]")
_EXPLAINED_BYTES = 1 << 20
_BATCH_BYTES = 16 << 20
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class TooLong:
    """Stands for a record longer than allowed, of which only the head was kept."""

    size: int
    """Bytes."""
    head: bytes


@dataclass(frozen=True)
class Refused:
    """Stands for a record that could not be read."""

    reason: str


Raw = bytes | TooLong


def lines(chunks: Iterator[bytes], max_bytes: int, at: int = 0) -> Iterator[tuple[int, Raw, bool]]:
    """Lines with the offset where each starts, without the line end, and whether there was one.

    Only b"\\n" ends a line: U+2028, vertical tab and the like stay inside a text.

    Args:
        at: offset of the first chunk.

    Raises:
        DamagedError: from the chunks; `at` and `number` say where the first lost line starts.
    """
    held: list[bytes] = []
    size = number = 0
    try:
        for chunk in chunks:
            parts = chunk.split(b"\n")
            rest = parts.pop()
            if parts:
                number += len(parts)
                if held:
                    size += len(parts[0])
                    first: Raw = _joined(held, parts[0], size, max_bytes)
                    yield at, first, True
                    at += size + 1
                    del parts[0]
                    held, size = [], 0
                for line in parts:
                    yield at, line if len(line) <= max_bytes else TooLong(len(line), line[:EXCERPT_BYTES]), True
                    at += len(line) + 1
            if rest:
                size += len(rest)
                if size <= max_bytes or not held:
                    held.append(rest)
                else:
                    held = [b"".join([*held, rest])[:EXCERPT_BYTES]]
    except DamagedError as damage:
        damage.at, damage.number = at, number + 1
        raise
    if held:
        yield at, _joined(held, b"", size, max_bytes), False


def lines_before(path: str, offset: int) -> int:
    """Line ends in the first `offset` bytes of an uncompressed file.

    Raises:
        DataError: it can't be read.
    """
    count = 0
    with open_raw(path) as f:
        while offset > 0 and (chunk := f.read(min(offset, CHUNK_BYTES))):
            count += chunk.count(b"\n")
            offset -= len(chunk)
    return count


def _joined(held: list[bytes], last: bytes, size: int, max_bytes: int) -> Raw:
    line = b"".join([*held, last])
    return line if size <= max_bytes else TooLong(size, line[:EXCERPT_BYTES])


def items(chunks: Iterator[bytes], max_bytes: int) -> Iterator[Raw]:
    """Items of a JSON list, or the objects and the items of lists that follow each other; framed, not yet parsed.

    Raises:
        DamagedError: from the chunks, a list or object that is not closed, or what is neither.
    """
    number = 0
    try:
        for item in _Framing(max_bytes).items(chunks):
            yield item
            number += 1
    except DamagedError as damage:
        damage.at, damage.number = number, number + 1
        raise


class _Framing:
    """Finds where items end, by brackets and strings alone: what is wrong inside of one does not matter here."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        """Begins where the current item begins."""
        self._pos = 0
        self._depth = 0
        self._in_list = False
        self._in_string = False
        self._dropped = 0
        self._head = b""

    def items(self, chunks: Iterator[bytes]) -> Iterator[Raw]:
        for chunk in chunks:
            self._buffer += chunk
            while (item := self._next()) is not None:
                if not isinstance(item, bytes) or item:
                    yield item
            self._drop_what_is_too_long()
        if self._in_list or self._depth or self._buffer:
            raise DamagedError("a list or object is not closed at its end: cut short, or a bracket is missing")

    def _next(self) -> Raw | None:
        """The next whole item (empty where a list begins or ends without one); None when more bytes are needed."""
        while True:
            if self._in_string:
                if not self._leave_string():
                    return None
                continue
            if not self._in_list and not self._depth:
                if not self._enter():
                    return None
                continue
            found = _OUTSIDE_STRING.search(self._buffer, self._pos)
            if found is None:
                self._pos = len(self._buffer)
                return None
            self._pos = found.end()
            sign = found.group()
            if sign == b'"':
                self._in_string = True
            elif sign in b"[{":
                self._depth += 1
            elif sign == b"," and self._in_list and self._depth == 1:
                return self._take(self._pos - 1) or b","
            elif sign in b"]}":
                self._depth -= 1
                if self._depth == 0:
                    if self._in_list and sign == b"}":
                        raise DamagedError("a list is closed by a brace: a bracket is missing")
                    item = self._take(self._pos - 1 if self._in_list else self._pos)
                    self._in_list = False
                    return item

    def _enter(self) -> bool:
        """Steps into the next list or object; False when there is none yet."""
        while True:
            found = _NOT_SPACE.search(self._buffer, self._pos)
            del self._buffer[: found.start() if found else len(self._buffer)]
            self._pos = 0
            if not self._buffer.startswith(_BOM):
                break
            del self._buffer[: len(_BOM)]
        if _BOM.startswith(self._buffer):  # nothing, or more of it is to come
            return False
        if self._buffer[0] not in b"[{":
            raise DamagedError(f"neither a list nor an object starts with {ascii(_text(bytes(self._buffer[:20])))}")
        self._depth = 1
        if self._buffer[0] in b"[":
            self._in_list = True
            del self._buffer[0]
        else:
            self._pos = 1
        return True

    def _leave_string(self) -> bool:
        quote = self._buffer.find(b'"', self._pos)
        if quote < 0:
            self._pos = len(self._buffer)
            return False
        before = quote
        while before and self._buffer[before - 1] == 0x5C:
            before -= 1
        self._in_string = (quote - before) % 2 == 1  # an odd number of backslashes: the quote belongs to the text
        self._pos = quote + 1
        return True

    def _take(self, end: int) -> Raw:
        """The item that ends before `end` (only a list's own sign may follow it there)."""
        whole = bytes(self._buffer[:end])
        del self._buffer[: self._pos]
        self._pos = 0
        size, head = self._dropped + len(whole), (self._head + whole)[:EXCERPT_BYTES]
        self._dropped, self._head = 0, b""
        return TooLong(size, head.strip()) if size > self._max_bytes else whole.strip()

    def _drop_what_is_too_long(self) -> None:
        if self._dropped + self._pos <= self._max_bytes or not (self._in_list or self._depth):
            return
        self._head = (self._head + bytes(self._buffer[:EXCERPT_BYTES]))[:EXCERPT_BYTES]
        kept = len(self._buffer)
        while kept and self._buffer[kept - 1] == 0x5C:
            kept -= 1
        odd = (len(self._buffer) - kept) % 2  # backslashes in front of a quote that may come
        self._dropped += len(self._buffer) - odd
        del self._buffer[: len(self._buffer) - odd]
        self._pos = odd


def parse(raw: Raw, *, ended: bool = True) -> Any:
    """The JSON value of one record, or `Refused`; of keys that come twice the last one counts.

    Args:
        ended: whether a line end follows, where one is expected.
    """
    if isinstance(raw, TooLong):
        return Refused(f"{raw.size:,} bytes long, which is more than max_row_bytes")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        bare = raw.strip().removeprefix(_BOM)  # files that were joined have one in the middle
        if len(bare) < len(raw):
            try:
                return orjson.loads(bare)
            except orjson.JSONDecodeError:
                pass
        return Refused(_why(bare, error) + ("" if ended else " (the last line, without a line end: half written?)"))


def _why(raw: bytes, error: ValueError) -> str:
    if not raw.strip(b"\0"):
        return "only NUL bytes, as a crash of whoever wrote it leaves them"
    if b"\0" in raw:
        return "not JSON: it holds NUL bytes"
    if raw == b",":
        return "not JSON: nothing in front of a comma"
    try:
        raw.decode()
    except UnicodeDecodeError as undecodable:
        return f"not UTF-8: {undecodable.reason} at byte {undecodable.start}"
    if len(raw) <= _EXPLAINED_BYTES:
        try:
            _, end = json.JSONDecoder().raw_decode(raw.decode())
            if end < len(raw.decode()):
                return "not JSON: something follows the first value"
            return f"not JSON: it holds NaN, Infinity, a lone surrogate or another thing that JSON has not ({error})"
        except (ValueError, RecursionError):
            pass
    return f"not JSON: {error}"


def excerpt(raw: Raw) -> str:
    """The beginning of a record, for people."""
    return _text((raw if isinstance(raw, bytes) else raw.head)[:EXCERPT_BYTES])


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace")


# ------------------------------------------------------------ Parquet


def parquet_groups(f: IO[bytes], path: str) -> list[int]:
    """Size of each row group, in bytes before compression.

    Raises:
        DamagedError: no whole Parquet file.
    """
    metadata = _open_parquet(f, path).metadata
    # not the sizes of its columns: asking for a column that a broken footer lacks ends the whole process
    return [max(0, metadata.row_group(i).total_byte_size) for i in range(metadata.num_row_groups)]


def parquet_rows(
    f: IO[bytes], path: str, wanted: tuple[str, ...], *, text: bool, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, dict[str, Any] | Refused | DamagedError]]:
    """Rows of row groups [start, end) with their numbers in the file, from 0; only the wanted columns are read.

    Where a row group breaks off, the error stands for its rows from there on; the next row group follows.

    Args:
        text: whether the columns must hold text.

    Raises:
        DataError: none of the columns is there, or it holds something else than text.
        DamagedError: no Parquet file at all, or one without its end.
    """
    file = _open_parquet(f, path)
    schema = file.schema_arrow
    columns = [n for n in wanted if n in schema.names]
    if not columns:
        raise DataError(f"{path} has no column {' or '.join(wanted)}", f"its columns: {', '.join(schema.names)}")
    for name in columns if text else ():
        if not _holds_text(schema.field(name).type):
            raise DataError(
                f"column {name} of {path} is {schema.field(name).type}, not text", "set text_field to a column of text"
            )
    metadata = file.metadata
    at = sum(metadata.row_group(g).num_rows for g in range(min(start, metadata.num_row_groups)))
    for group in range(metadata.num_row_groups)[start:end]:
        rows = metadata.row_group(group)
        batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows.num_rows // (rows.total_byte_size + 1)))
        expected = at + rows.num_rows
        try:
            for batch in file.iter_batches(batch_rows, row_groups=[group], columns=columns, use_threads=False):
                for row in _rows_of(batch):
                    yield at, row
                    at += 1
            if at != expected:
                raise pa.ArrowInvalid(f"row group {group} ends at row {at:,} of {expected:,}")
        except (pa.ArrowException, OSError, MemoryError, OverflowError) as error:
            damage = DamagedError(f"no whole Parquet file: {_first_line(error)}")
            damage.at, damage.number = at, at + 1
            yield at, damage
        at = expected


def _open_parquet(f: IO[bytes], path: str) -> pq.ParquetFile:
    try:
        # pages come one by one: a row group may be as large as the file
        return pq.ParquetFile(f, buffer_size=1 << 20, pre_buffer=False)
    except (pa.ArrowException, OSError, MemoryError, OverflowError, UnicodeDecodeError) as error:
        raise DamagedError(f"no whole Parquet file: {_first_line(error)}") from None


def _holds_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _holds_text(kind.value_type)
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    # writers that mark no column as text leave it as bytes
    return any(is_it(kind) for is_it in (*text, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view))


def _rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | Refused]:
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for i in range(batch.num_rows):
        try:
            yield batch.slice(i, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield Refused(f"not UTF-8: {error.reason} at byte {error.start}")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
