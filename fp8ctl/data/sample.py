"""Some rows of raw files, from all over them, and what the whole amounts to by them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data.files import InputFile, Slice
from fp8ctl.data.formats import Refused
from fp8ctl.data.raw_rows import raw_rows
from fp8ctl.data.rows import BadRow
from fp8ctl.data.sources import iter_slice
from fp8ctl.data.streams import open_raw
from fp8ctl.errors import DataError

_MOST_FILES = 32
_MOST_BYTES = 64 * 2**20
_ENTERED_BYTES = 2**22
_DEFAULT_PACKED = 3.0


@dataclass
class SampledRow:
    """One row as it is in its file: an object, text, any other JSON value, or `Refused`."""

    place: str
    value: Any
    file: int
    """Number of the file among those that were looked at."""


@dataclass
class Sample:
    """Rows of some files, and how many rows all files have, which is an estimate where they were not counted."""

    rows: list[SampledRow] = field(default_factory=list)
    num_rows: list[float] = field(default_factory=list)
    """Of each file that was looked at."""
    scale: float = 1.0
    """All files by those that were looked at."""
    is_exact: bool = True
    errors: list[str] = field(default_factory=list)
    """Files that can't be read to where the sample ends."""


def sample(files: Sequence[InputFile], num_rows: int) -> Sample:
    """Rows of up to 32 files that lie evenly among all, the same for the same files."""
    step = max(1, -(-len(files) // _MOST_FILES))
    chosen = files[::step]
    share = max(1, num_rows // max(len(chosen), 1))
    out = Sample(is_exact=step == 1)
    for file in chosen:
        out.num_rows.append(0.0)
        try:
            _of_file(file, share, out)
        except DataError as error:
            out.errors.append(error.message)
            out.is_exact = False
    chosen_bytes = sum(f.bytes for f in chosen)
    if step > 1 and chosen_bytes:
        out.scale = sum(f.bytes for f in files) / chosen_bytes
    return out


def _of_file(file: InputFile, most: int, out: Sample) -> None:
    number_of_file = len(out.num_rows) - 1
    if file.format == "text":
        source = SourceConfig(kind="text", paths=(file.path,))
        for row in iter_slice(Slice(file), source, "cpt"):
            value = Refused(row.reason) if isinstance(row, BadRow) else getattr(row, "text", "")
            out.rows.append(SampledRow(file.path, value, number_of_file))
        out.num_rows[-1] += 1
        return
    starts = [0]
    if file.format == "jsonl" and not file.compression and file.bytes > _ENTERED_BYTES and "://" not in file.path:
        starts = [0, file.bytes // 3, 2 * file.bytes // 3]
    size, count, is_whole = 0, 0, False
    for start in starts:
        limit = max(1, most // len(starts))
        seen = 0
        for number, value in islice(raw_rows(file, start), limit):
            behind = f" behind byte {start:,}" if start else ""
            out.rows.append(SampledRow(f"{file.path} line {number:,}{behind}", value, number_of_file))
            size += _size(value)
            seen += 1
            if size > _MOST_BYTES:
                break
        count += seen
        is_whole = start == 0 and len(starts) == 1 and seen < limit and size <= _MOST_BYTES
    if file.format == "parquet":
        out.num_rows[-1] += _parquet_rows(file)
    elif is_whole:
        out.num_rows[-1] += count
    else:
        packed = _packed(out.rows[-count:]) if file.compression else 1.0
        out.num_rows[-1] += file.bytes * packed * count / max(size, 1)
        out.is_exact = False


def _size(value: Any) -> int:
    if isinstance(value, Refused):
        return 1
    return len(orjson.dumps(value, default=str)) + 1


def _packed(rows: Sequence[SampledRow]) -> float:
    """How many times smaller compressing makes such rows."""
    raw = b"\n".join(
        orjson.dumps(row.value, default=str) for row in islice(rows, 200) if not isinstance(row.value, Refused)
    )
    return len(raw) / len(zlib.compress(raw)) if raw else _DEFAULT_PACKED


def _parquet_rows(file: InputFile) -> int:
    with open_raw(file.path, file.bytes) as f:
        try:
            return int(pq.read_metadata(f).num_rows)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file.path} is no whole Parquet file: {error}", "copy it again") from None


def objects(rows: Sequence[SampledRow]) -> Iterator[dict[str, Any]]:
    """The rows that are objects."""
    yield from (row.value for row in rows if isinstance(row.value, dict))
