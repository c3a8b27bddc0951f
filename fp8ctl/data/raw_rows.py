"""Records of a file as they are, whatever fields they have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fp8ctl.data import formats
from fp8ctl.data.files import InputFile
from fp8ctl.data.formats import Refused
from fp8ctl.data.streams import DamagedError, open_raw, read_chunks
from fp8ctl.errors import DataError

_MAX_ROW_BYTES = 2**28


def raw_rows(file: InputFile, start: int = 0) -> Iterator[tuple[int, Any]]:
    """Values of a file with their line or row number, from 1, blank lines left out; of a text file each line.

    What can't be read comes as `Refused`.

    Args:
        start: byte of an uncompressed file of lines; the first line that starts behind it is number 1.

    Raises:
        DataError: the file can't be read, or is damaged.
    """
    try:
        yield from _parquet(file) if file.format == "parquet" else _records(file, start)
    except DamagedError as damage:
        raise DataError(f"{file.path} is damaged: {damage.message}", "copy or write it again") from None


def parquet_schema(file: InputFile) -> pa.Schema:
    """Names and types of the columns.

    Raises:
        DataError: no whole Parquet file.
    """
    with open_raw(file.path, file.bytes) as f:
        try:
            return pq.read_schema(f)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.path} is no whole Parquet file: {error}", "copy it again") from None


def _records(file: InputFile, start: int) -> Iterator[tuple[int, Any]]:
    chunks = read_chunks(file.path, file.compression, file.bytes, start)
    if file.format == "json":
        for number, raw in enumerate(formats.items(chunks, _MAX_ROW_BYTES), start=1):
            yield number, formats.parse(raw)
        return
    for number, (_, raw, ended) in enumerate(formats.lines(chunks, _MAX_ROW_BYTES), start=0 if start else 1):
        if not number:
            continue  # the end of a line that starts before
        if isinstance(raw, bytes) and not raw.strip():
            continue
        if file.format == "jsonl":
            yield number, formats.parse(raw, ended=ended)
        elif isinstance(raw, bytes):
            try:
                yield number, raw.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                yield number, Refused(f"not UTF-8: {error.reason} at byte {error.start}")
        else:
            yield number, Refused(f"{raw.size:,} bytes long")


def _parquet(file: InputFile) -> Iterator[tuple[int, Any]]:
    names = tuple(parquet_schema(file).names)
    with open_raw(file.path, file.bytes) as f:
        for at, row in formats.parquet_rows(f, file.path, names, text=False):
            if isinstance(row, DamagedError):
                raise row
            yield at + 1, row
