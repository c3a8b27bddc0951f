"""Reading all rows of some sources to learn something about them: what `data dedup` and `data decontaminate` have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data.encode import num_chars
from fp8ctl.data.exclude import identity
from fp8ctl.data.files import Slice
from fp8ctl.data.rows import BadRow, Conversation, Document
from fp8ctl.data.streams import open_raw
from fp8ctl.data.tasks import Report, Task, iter_task, run_tasks
from fp8ctl.errors import DataError

T = TypeVar("T")
_REPORT_EVERY_CHARS = 4_000_000
_CHUNK = 2**24
_ROUNDED_BYTES = 2**20


class Seen(NamedTuple):
    """What a task tells now and then."""

    task: int
    rows: int
    chars: int


@dataclass
class RowCounts:
    """What came in. rows = documents + empty + bad."""

    rows: int = 0
    documents: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: BadRow | None = None

    def add(self, other: RowCounts) -> None:
        """Adds another part."""
        self.rows += other.rows
        self.documents += other.documents
        self.empty += other.empty
        self.bad += other.bad
        self.first_bad = self.first_bad or other.first_bad


@dataclass
class LineNumbers:
    """Line numbers that count from the beginning of a file, for rows of slices, which count from the beginning of the slice."""

    _starts: dict[str, list[int]] = field(default_factory=dict)
    _before: dict[str, list[int]] = field(default_factory=dict)

    def add(self, slice: Slice, lines: int) -> None:
        """Slices of a file come in order.

        Args:
            lines: lines that start in the slice.
        """
        starts = self._starts.setdefault(slice.file.path, [])
        before = self._before.setdefault(slice.file.path, [0])
        starts.append(slice.start)
        before.append(before[-1] + lines)

    def line(self, file: str, at: int, line: int) -> int:
        """The line in the file of what stands at `at` and is the `line`-th of its slice."""
        if file not in self._starts:
            return line
        return line + self._before[file][int(np.searchsorted(self._starts[file], at, side="right")) - 1]


def rows_of(
    task: Task, sources: Sequence[SourceConfig], kind: str, report: Report, counts: RowCounts
) -> Iterator[Document | Conversation]:
    """The documents and conversations of a task that hold text, counted, and reported now and then."""
    reported = rows = chars = 0
    for row in iter_task(task, sources, kind):
        counts.rows += 1
        rows += 1
        if isinstance(row, BadRow):
            counts.bad += 1
            counts.first_bad = counts.first_bad or row
        else:
            size = num_chars(row)
            chars += size
            if not (isinstance(row, Document) and (not size or row.text.isspace())):
                counts.documents += 1
                yield row
            else:
                counts.empty += 1
        if chars - reported >= _REPORT_EVERY_CHARS:
            report(Seen(task.number, rows, chars - reported))
            reported, rows = chars, 0
    report(Seen(task.number, rows, chars - reported))


def text_of(row: Document | Conversation) -> str:
    """What rows are compared by: the text of a document; of a conversation all of it, roles and tools included."""
    if isinstance(row, Document):
        return row.text
    if row.tokens is not None:
        ids, mask = row.tokens
        return " ".join(f"{i}{'+' if m else ''}" for i, m in zip(ids.tolist(), mask.tolist(), strict=True))
    whole = [row.messages, row.tools] if row.tools else row.messages
    return json.dumps(whole, ensure_ascii=False, sort_keys=True)


def run_scan(
    work: Callable[[Task, Report], T],
    tasks: Sequence[Task],
    num_workers: int,
    progress: Callable[[int, int, int], None] = lambda bytes_read, total_bytes, rows: None,
) -> Iterator[T]:
    """Results of `work`, in the order of the tasks, as `run_tasks` gives them.

    Args:
        progress: called with bytes read (an estimate for tasks that are running), bytes in all, and rows read.
    """
    total = sum(task.bytes for task in tasks)
    running: dict[int, int] = {}
    done = rows = 0
    left = len(tasks)

    def tell() -> None:
        read = done + sum(min(chars, tasks[n].bytes) for n, chars in running.items())
        # an estimate must not say that all is done while something is running
        progress(min(read, max(total - _ROUNDED_BYTES, 0)) if left else total, total, rows)

    def on_report(seen: Seen) -> None:
        nonlocal rows
        rows += seen.rows
        running[seen.task] = running.get(seen.task, 0) + seen.chars
        tell()

    for task, result in zip(tasks, run_tasks(work, tasks, num_workers, on_report), strict=True):
        running.pop(task.number, None)
        left -= 1
        done += task.bytes
        tell()
        yield result


def lines_in_slices(task: Task) -> list[tuple[Slice, int]]:
    """For each slice that is a part of a JSONL file, how many lines start in it."""
    parts = [s for s in task.slices if s.file.format == "jsonl" and not s.file.compression and s.end is not None]
    return [(part, _line_starts(part)) for part in parts]


def _line_starts(part: Slice) -> int:
    # a line starts at 0 and behind each line end
    assert part.end is not None
    at, count = max(part.start - 1, 0), int(part.start == 0)
    with open_raw(part.file.path, part.file.bytes) as f:
        f.seek(at)
        while at < part.end - 1 and (chunk := f.read(min(_CHUNK, part.end - 1 - at))):
            count += chunk.count(b"\n")
            at += len(chunk)
    return count


def refuse_twice(tasks: Sequence[Task]) -> None:
    """Raises DataError when a file belongs to two sources: a list names rows by their file, and could not tell them apart."""
    owners: dict[str, int] = {}
    for task in tasks:
        for piece in task.slices:
            if owners.setdefault(identity(piece.file.path), task.source) != task.source:
                raise DataError(
                    f"{piece.file.path} belongs to two sources", "name it once: all of its rows would be duplicates"
                )


def refuse_nothing(counts: RowCounts, numbers: LineNumbers) -> None:
    """Raises DataError when no row holds text."""
    if not counts.documents:
        bad = counts.first_bad
        line = numbers.line(bad.origin.file, bad.origin.at, bad.origin.line) if bad else 0
        why = f"; the first bad one is {bad.origin.file} line {line}: {bad.reason}" if bad else ""
        raise DataError(
            f"nothing to read: {counts.rows:,} rows, {counts.empty:,} of them empty, {counts.bad:,} bad{why}",
            "check the files that sources.*.paths name, kind and text_field",
        )


def as_dict(counts: RowCounts) -> dict[str, Any]:
    """For a report."""
    return {"rows": counts.rows, "documents": counts.documents, "empty": counts.empty, "bad": counts.bad}
