"""`fp8ctl data dedup`: which rows are there already.

Every row becomes a hash of 128 bits, written to scratch files beside its place; equal hashes are found part by part, so that
memory holds 4 bytes a row and a few hundred MiB whatever the input is. The first in the order of the sources stays.
"""

from __future__ import annotations

import bisect
import functools
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fp8ctl.config.checks import check_scan
from fp8ctl.config.data_schema import DedupConfig
from fp8ctl.data import near_duplicates
from fp8ctl.data.encode import num_chars
from fp8ctl.data.exclude import ExclusionWriter, new_list
from fp8ctl.data.files import Slice
from fp8ctl.data.rows import BadRow, Row
from fp8ctl.data.scan import (
    LineNumbers,
    RowCounts,
    as_dict,
    lines_in_slices,
    refuse_nothing,
    refuse_twice,
    rows_of,
    run_scan,
    text_of,
)
from fp8ctl.data.sources import iter_slice
from fp8ctl.data.tasks import Report, Task, input_sizes, iter_task, plan_tasks

DUPLICATE, NEAR_DUPLICATE = "duplicate", "near_duplicate"
_FLUSH_ROWS = 65_536
_ROWS_SORTED_AT_ONCE = 2**22
_BYTES_SORTED = 56
_SAMPLED_ROWS = 200
_PACKED = 3.0
_CLUSTERS = 10
_EXCERPT_CHARS = 160

Progress = Callable[[int, int, int], None]


@dataclass
class Hashed:
    """What a task found; its hashes and places lie in scratch files."""

    counts: RowCounts
    files: list[tuple[str, int]] = field(default_factory=list)
    """Name of each file, and the number of its first row among those of the task."""
    lines: list[tuple[Slice, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Estimate:
    """What a run will take, from the first rows of some tasks."""

    documents: int
    memory_bytes: int
    scratch_bytes: int


def estimate(config: DedupConfig) -> Estimate:
    """What `dedup` will take.

    Raises:
        ConfigError, DataError: see `dedup`.
    """
    check_scan(config)
    tasks = plan_tasks(config.sources, config.task_mb * 2**20 if config.task_mb else None)
    documents = 0.0
    for task in {t.number: t for t in (tasks[0], tasks[len(tasks) // 2], tasks[-1])}.values():
        rows = list(islice(iter_task(task, config.sources, config.kind), _SAMPLED_ROWS))
        chars = sum(num_chars(row) for row in rows)
        packed = any(piece.file.compression or piece.file.format == "parquet" for piece in task.slices)
        size = task.bytes * (_PACKED if packed else 1.0)
        whole = len(rows) if len(rows) < _SAMPLED_ROWS else max(len(rows), size * len(rows) / max(chars, 1))
        documents = max(documents, whole / max(task.bytes, 1))
    count = int(documents * max(sum(t.bytes for t in tasks), 1))
    wide = config.num_bands if config.method == "minhash" else 0
    return Estimate(
        documents=count,
        memory_bytes=_index_type(count).itemsize * count
        + _BYTES_SORTED * min(count, _ROWS_SORTED_AT_ONCE)
        + (16 * count if wide else 0),
        scratch_bytes=count * (40 + 8 * wide),
    )


def dedup(config: DedupConfig, progress: Progress = lambda done, total, rows: None) -> dict[str, Any]:
    """Writes the exclusion list that `config` describes and returns its report.

    Args:
        progress: see `scan.run_scan`; called for a second pass too where MinHash has candidates to compare.

    Raises:
        ConfigError: settings that are missing or don't fit together.
        DataError: no rows, files that can't be read, or a folder that can't be written or holds something already.
        MissingPackageError: MinHash without rensa.
    """
    check_scan(config)
    assert config.out is not None
    if config.method == "minhash":
        near_duplicates.require()
    tasks = plan_tasks(config.sources, config.task_mb * 2**20 if config.task_mb else None)
    refuse_twice(tasks)
    with new_list(Path(config.out)) as out:
        work = functools.partial(hash_task, config=config, scratch=out.scratch)
        places = _Places(tasks, out.scratch, run_scan(work, tasks, config.num_workers, progress))
        refuse_nothing(places.counts, places.numbers)
        first = _first_equal(places)
        exact = int((first != np.arange(len(first), dtype=first.dtype)).sum())
        near: dict[str, Any] = {}
        if config.method == "minhash":
            is_near, near = near_duplicates.join(first, places.offsets, tasks, config, out.scratch, progress)
        else:
            is_near = None
        report = _write(out, first, is_near, places)
        settings = config.model_dump(mode="json", exclude={"out", "num_workers"})
        return out.finish(
            {
                "command": "data dedup",
                **as_dict(places.counts),
                "duplicates": exact,
                "near_duplicates": out.rows - exact,
                **report,
                "largest_clusters": _largest(first, places, config),
                **({"minhash": near} if near else {}),
                "settings": settings,
            },
            input_sizes(tasks, config.sources),
        )


def hash_task(task: Task, report: Report, *, config: DedupConfig, scratch: Path) -> Hashed:
    """Writes hash (2 x uint64) and place (at, line, characters: int64) of each row of a task to scratch files."""
    found = Hashed(RowCounts())
    hashes, places = array("Q"), array("q")
    sketch = near_duplicates.Sketcher(config) if config.method == "minhash" else None
    with open(scratch / f"{task.number:05d}.hash", "wb") as a, open(scratch / f"{task.number:05d}.place", "wb") as b:
        for row in rows_of(task, config.sources, config.kind, report, found.counts):
            if not found.files or found.files[-1][0] != row.origin.file:
                found.files.append((row.origin.file, found.counts.documents - 1))
            text = text_of(row)
            digest = xxhash.xxh3_128_intdigest(normalised(text, config.normalise).encode("utf-8", "surrogatepass"))
            hashes.extend((digest >> 64, digest & 0xFFFFFFFFFFFFFFFF))
            places.extend((row.origin.at, row.origin.line, len(text)))
            if sketch is not None:
                sketch.add(text)
            if len(hashes) >= 2 * _FLUSH_ROWS:
                hashes.tofile(a)
                places.tofile(b)
                del hashes[:], places[:]
        hashes.tofile(a)
        places.tofile(b)
    if sketch is not None:
        np.save(scratch / f"{task.number:05d}.bands.npy", sketch.bands())
    found.lines = lines_in_slices(task)
    return found


def normalised(text: str, how: str) -> str:
    """The text as `DedupConfig.normalise` wants it."""
    if how == "raw":
        return text
    return " ".join(unicodedata.normalize("NFC", text).split())


class _Places:
    """Where every row stands, by its number over all tasks."""

    def __init__(self, tasks: Sequence[Task], scratch: Path, results: Iterator[Hashed]) -> None:
        self.tasks = tasks
        self.counts, self.numbers = RowCounts(), LineNumbers()
        self.files: list[list[tuple[str, int]]] = []
        sizes = []
        for hashed in results:
            self.counts.add(hashed.counts)
            self.files.append(hashed.files)
            sizes.append(hashed.counts.documents)
            for piece, lines in hashed.lines:
                self.numbers.add(piece, lines)
        self.offsets = np.array([0, *accumulate(sizes)], dtype=np.int64)
        self.hashes = [scratch / f"{t.number:05d}.hash" for t in tasks]
        self.places = [_mapped(scratch / f"{t.number:05d}.place", np.int64, 3) for t in tasks]

    def task_of(self, row: int) -> tuple[int, int]:
        """Number of the task, and of the row in it."""
        task = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return task, row - int(self.offsets[task])

    def of(self, row: int) -> tuple[str, int, int]:
        """File, at and line of a row."""
        task, number = self.task_of(row)
        files = self.files[task]
        file = files[bisect.bisect_right(files, number, key=lambda entry: entry[1]) - 1][0]
        at, line, _ = self.places[task][number].tolist()
        return file, at, self.numbers.line(file, at, line)


def _mapped(path: Path, dtype: Any, width: int) -> np.ndarray:
    if not path.stat().st_size:
        return np.empty((0, width), dtype)
    return np.memmap(path, dtype=dtype, mode="r").reshape(-1, width)


def _index_type(count: int) -> np.dtype[Any]:
    return np.dtype(np.uint32 if count < 2**32 else np.uint64)


def _first_equal(places: _Places) -> np.ndarray:
    """For each row the number of the first row with the same hash; its own where there is none before it."""
    total = int(places.offsets[-1])
    first = np.arange(total, dtype=_index_type(total))
    bits = max(0, (total - 1) // _ROWS_SORTED_AT_ONCE).bit_length()
    for part in range(2**bits):
        high, low, numbers = [], [], []
        for path, offset in zip(places.hashes, places.offsets, strict=False):
            hashes = np.fromfile(path, np.uint64).reshape(-1, 2)
            here = np.flatnonzero((hashes[:, 0] >> np.uint64(64 - bits)) == part) if bits else np.arange(len(hashes))
            high.append(hashes[here, 0])
            low.append(hashes[here, 1])
            numbers.append(here + offset)
        a, b, rows = np.concatenate(high), np.concatenate(low), np.concatenate(numbers)
        order = np.lexsort((b, a))  # stable: of equal hashes the first row comes first
        a, b, rows = a[order], b[order], rows[order]
        is_first = np.ones(len(rows), bool)
        is_first[1:] = (a[1:] != a[:-1]) | (b[1:] != b[:-1])
        first[rows] = rows[np.flatnonzero(is_first)][np.cumsum(is_first) - 1].astype(first.dtype)
    return first


def _write(out: ExclusionWriter, first: np.ndarray, is_near: np.ndarray | None, places: _Places) -> dict[str, Any]:
    by_file: dict[str, dict[str, int]] = {}
    chars = dropped_chars = 0
    for task, files in enumerate(places.files):
        offset = int(places.offsets[task])
        ends = [*(number for _, number in files[1:]), len(places.places[task])]
        for (file, start), end in zip(files, ends, strict=False):
            rows = np.arange(offset + start, offset + end)
            named = rows[first[rows] != rows]
            where = places.places[task][named - offset]
            counts = by_file.setdefault(file, {"documents": 0, "excluded": 0})
            counts["documents"] += len(rows)
            counts["excluded"] += len(named)
            chars += int(places.places[task][start:end, 2].sum())
            dropped_chars += int(where[:, 2].sum())
            for row, (at, line, _) in zip(named.tolist(), where.tolist(), strict=True):
                original, _, its_line = places.of(int(first[row]))
                reason = NEAR_DUPLICATE if is_near is not None and is_near[row] else DUPLICATE
                out.add(file, at, places.numbers.line(file, at, line), reason, f"{original} line {its_line}")
    share = {
        "excluded_share": out.rows / places.counts.documents,
        "excluded_chars_share": dropped_chars / max(chars, 1),
    }
    return {**share, "by_file": by_file}


def _largest(first: np.ndarray, places: _Places, config: DedupConfig) -> list[dict[str, Any]]:
    copies = first[first != np.arange(len(first), dtype=first.dtype)]
    originals, counts = np.unique(copies, return_counts=True)
    biggest = np.lexsort((originals, -counts))[:_CLUSTERS]
    clusters = []
    for original, count in zip(originals[biggest].tolist(), counts[biggest].tolist(), strict=True):
        file, _, line = places.of(original)
        text = _text_at(original, places, config)
        clusters.append({"documents": count + 1, "file": file, "line": line, "example": text[:_EXCERPT_CHARS]})
    return clusters


def _text_at(row: int, places: _Places, config: DedupConfig) -> str:
    task_number, number = places.task_of(row)
    task = places.tasks[task_number]
    file, at, _ = places.of(row)
    piece = next((s for s in task.slices if s.file.path == file), None)
    rows: Iterator[Row]
    if piece is not None and piece.file.format == "jsonl" and not piece.file.compression:
        rows = iter_slice(Slice(piece.file, at, at + 1), config.sources[task.source], config.kind)
    else:
        rows = iter_task(task, config.sources, config.kind)
    found = next((r for r in rows if r.origin.file == file and r.origin.at == at and not isinstance(r, BadRow)), None)
    return " ".join(text_of(found).split()) if found is not None else ""
