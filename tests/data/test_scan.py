from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data.scan import LineNumbers, RowCounts, lines_in_slices, rows_of, run_scan
from fp8ctl.data.tasks import Report, Task, plan_tasks


def count(task: Task, report: Report, *, source: SourceConfig) -> int:
    return len(list(rows_of(task, [source], "cpt", report, RowCounts())))


@pytest.fixture
def source(tmp_path: Path) -> SourceConfig:
    # compressed text is longer than its file: an estimate by characters runs ahead
    lines = [json.dumps({"text": f"{i} " * 40}) + "\n" * (1 + i % 3) for i in range(20_000)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return SourceConfig(paths=(str(tmp_path / "a.jsonl"),))


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_ends_once_and_with_all(source: SourceConfig, workers: int) -> None:
    told: list[tuple[int, int]] = []
    results: list[int] = []
    rows = total = 0

    def progress(read: int, all_bytes: int, seen: int) -> None:
        nonlocal rows, total
        rows, total = seen, all_bytes
        told.append((read, len(results)))

    tasks = plan_tasks([source], 2**20)
    for result in run_scan(functools.partial(count, source=source), tasks, workers, progress):
        results.append(result)
    assert sum(results) == rows == 20_000 and len(tasks) > 3
    assert told[-1][0] == total == sum(t.bytes for t in tasks)
    assert min(done for read, done in told if read == total) >= len(tasks) - 1


def test_lines_count_from_the_beginning_of_the_file(source: SourceConfig) -> None:
    raw = Path(source.paths[0]).read_bytes()
    numbers = LineNumbers()
    tasks = plan_tasks([source], 300_000)
    for task in tasks:
        for piece, lines in lines_in_slices(task):
            numbers.add(piece, lines)
    for task in tasks[::3]:
        for row in list(rows_of(task, [source], "cpt", lambda seen: None, RowCounts()))[:2]:
            origin = row.origin
            assert numbers.line(origin.file, origin.at, origin.line) == raw.count(b"\n", 0, origin.at) + 1
    assert numbers.line("other", 5, 7) == 7
