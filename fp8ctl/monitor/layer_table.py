"""layers.parquet: a folder of Parquet parts, since a Parquet file can't be appended to and is unreadable without its end.

Each flush writes one part under a hidden name and renames it, so a killed run keeps every part that it finished. Single
parts are merged, 64 at a time, into one whose name covers their numbers. A resumed run records some steps again: wherever a
later part begins, what earlier parts hold from that step on belongs to a course that was given up, and readers leave it out.
`pyarrow.parquet.read_table` and `pandas.read_parquet` open the folder too, but don't do the last.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

MERGE_PARTS = 64
_PART = re.compile(r"part-(\d{8})-(\d{8})\.parquet")


class LayerRow(NamedTuple):
    """Statistics of one tensor of one linear at one step."""

    step: int
    fqn: str
    """Module name of the linear."""
    role: str
    """input, weight or grad_output."""
    precision: str
    """What the linear ran in; under bf16 the numbers say what FP8 would have done."""
    amax: float
    """Largest magnitude."""
    underflow_share: float
    """Nonzero values that became zero / all values."""
    saturation_share: float
    """Values at the largest code / all values."""
    sqnr_db: float
    """Signal over quantisation noise, dB; inf where nothing was lost."""


class LayerTable:
    """Writer of one layers.parquet; opening it again continues it.

    Args:
        path: the folder; made at the first flush.
        flush_s: rows wait at most until the next append after this time.
    """

    def __init__(self, path: Path, *, flush_s: float = 5.0) -> None:
        self._path = path
        self._flush_s = flush_s
        self._rows: list[LayerRow] = []
        self._flushed_at = time.monotonic()
        self._singles = [part for part in _parts(path) if part.first == part.last]
        self._next = max((part.last for part in _parts(path)), default=-1) + 1

    def append(self, rows: Sequence[LayerRow]) -> None:
        """Adds the rows of one step, steps ascending.

        Raises:
            OSError: see `flush`.
        """
        self._rows += rows
        if time.monotonic() - self._flushed_at >= self._flush_s:
            self.flush()

    def flush(self) -> None:
        """Writes the waiting rows as one part.

        Raises:
            OSError: the disk refuses; the rows are given up, what was written before stays.
        """
        rows, self._rows = self._rows, []
        self._flushed_at = time.monotonic()
        if not rows:
            return
        import pyarrow as pa

        self._path.mkdir(parents=True, exist_ok=True)
        columns = dict(zip(LayerRow._fields, zip(*rows, strict=True), strict=True))
        part = _Part(self._next, self._next, self._path / _name(self._next, self._next))
        _write(part.file, pa.table(columns, schema=_schema()))
        self._next += 1
        self._singles.append(part)
        if len(self._singles) >= MERGE_PARTS:
            self._merge()

    def _merge(self) -> None:
        first, last = self._singles[0].first, self._singles[-1].last
        _write(self._path / _name(first, last), _read(self._singles))
        # From here on readers know by its name that the new part replaces the others.
        for part in self._singles:
            part.file.unlink(missing_ok=True)
        self._singles = []


def read_layers(path: Path) -> pa.Table:
    """All rows that hold, steps ascending: columns as in `LayerRow`. No folder: no rows. Safe while a run writes."""
    while True:
        try:
            return _read(_parts(path))
        except FileNotFoundError:
            continue  # parts were merged between listing and reading


class _Part(NamedTuple):
    first: int
    last: int
    file: Path


def _parts(path: Path) -> list[_Part]:
    """The folder's parts in the order they were written, without those that a merged one replaces."""
    matches = [(m, p) for p in path.glob("part-*.parquet") if (m := _PART.fullmatch(p.name))]
    parts: list[_Part] = []
    for part in sorted((_Part(int(m[1]), int(m[2]), p) for m, p in matches), key=lambda p: (p.first, -p.last)):
        if not parts or part.first > parts[-1].last:
            parts.append(part)
    return parts


def _read(parts: Sequence[_Part]) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    kept = [_schema().empty_table()]
    later_begins: int | None = None
    for part in reversed(parts):
        try:
            table = pq.read_table(part.file, schema=_schema())
        except pa.ArrowInvalid:
            continue  # lost half-way by a power cut: the others still tell most of the story
        begins = pc.min(table["step"]).as_py()
        if later_begins is not None:
            table = table.filter(pc.less(table["step"], later_begins))
        later_begins = begins if later_begins is None else min(begins, later_begins)
        kept.append(table)
    return pa.concat_tables(reversed(kept))


def _write(file: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    temporary = file.with_name(f".{file.name}.tmp")  # readers of the folder pass over hidden files
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _name(first: int, last: int) -> str:
    return f"part-{first:08d}-{last:08d}.parquet"


def _schema() -> pa.Schema:
    import pyarrow as pa

    text, number = pa.dictionary(pa.int32(), pa.string()), pa.float32()
    types: dict[str, Any] = {"step": pa.int64(), "fqn": text, "role": text, "precision": text}
    return pa.schema([(name, types.get(name, number)) for name in LayerRow._fields])
