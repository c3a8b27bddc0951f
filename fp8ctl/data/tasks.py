"""The pieces that a preparation is made of, and processes that work on them.

A task is a part of one source: some small files, one file, or a slice of a large one. What a task holds depends on the sources
and on `task_bytes` alone, never on who works on it, so results put together in the order of tasks are the same for any number of
processes or machines.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data import reasoning_gym
from fp8ctl.data.rows import Conversation, Origin, Row
from fp8ctl.data.sources import InputFile, Slice, find_files, iter_slice, split_file
from fp8ctl.data.stdlib_text import iter_stdlib
from fp8ctl.errors import DataError

Report = Callable[[Any], None]
T = TypeVar("T")

_SMALLEST_BYTES = 16 * 2**20
_LARGEST_BYTES = 512 * 2**20
_TASKS_WANTED = 64
_POLL_S = 0.1


@dataclass(frozen=True)
class Task:
    """A part of one source, worked on in one go."""

    number: int
    source: int
    """Place of the source in the settings."""
    slices: tuple[Slice, ...] = ()
    part: str = ""
    """What a source without files generates: a reasoning-gym family."""
    bytes: int = 0
    """Size of the input as it lies on the disk; 0 where there are no files."""


class StoppedError(BaseException):
    """Raised inside a task by its `report` when the command is ending; no Exception, so that no handler keeps it."""


def plan_tasks(sources: Sequence[SourceConfig], task_bytes: int | None = None) -> list[Task]:
    """Cuts sources into tasks, in the order of the sources.

    Args:
        task_bytes: input of a task; default: a 64th of all, between 16 MiB and 512 MiB. A compressed file is never cut.

    Raises:
        DataError: a path matches nothing.
    """
    files = [find_files(s) if s.paths else [] for s in sources]
    if task_bytes is None:
        total = sum(f.bytes for of_source in files for f in of_source)
        task_bytes = min(max(total // _TASKS_WANTED, _SMALLEST_BYTES), _LARGEST_BYTES)
    tasks: list[Task] = []
    for number, source in enumerate(sources):
        if source.kind == "reasoning_gym":
            for family in source.families or reasoning_gym.FAMILIES:
                tasks.append(Task(len(tasks), number, part=family))
        elif source.kind == "python_stdlib":
            tasks.append(Task(len(tasks), number))
        else:
            for slices, size in _groups(files[number], task_bytes):
                tasks.append(Task(len(tasks), number, tuple(slices), bytes=size))
    return tasks


def input_sizes(tasks: Sequence[Task], sources: Sequence[SourceConfig]) -> dict[str, int]:
    """Size in bytes of each input file, 0 where it is not known; what is generated stands there by the name of its source."""
    sizes = {piece.file.path: piece.file.bytes for task in tasks for piece in task.slices}
    return sizes | {generated_name(task, sources): 0 for task in tasks if not task.slices}


def generated_name(task: Task, sources: Sequence[SourceConfig]) -> str:
    """What a task without files generates."""
    kind = sources[task.source].kind
    return f"{kind}/{task.part}" if task.part else kind


def iter_task(task: Task, sources: Sequence[SourceConfig], kind: str) -> Iterator[Row]:
    """Rows of a task, in the order of its source.

    Args:
        kind: cpt for documents, sft for conversations.

    Raises:
        DataError: a file can't be read.
        ConfigError, MissingPackageError: see `reasoning_gym.question`.
    """
    source = sources[task.source]
    if source.kind == "python_stdlib":
        yield from iter_stdlib()
    elif source.kind == "reasoning_gym":
        questions = reasoning_gym.iter_questions(task.part, source.num_per_family, source.seed, held_out=False)
        for number, asked in enumerate(questions):
            origin = Origin(f"reasoning_gym/{task.part}", number + 1, number)
            yield Conversation(origin, reasoning_gym.messages(asked))
    else:
        for piece in task.slices:
            yield from iter_slice(piece, source, kind)


def run_tasks(
    work: Callable[[Task, Report], T],
    tasks: Sequence[Task],
    num_workers: int,
    on_report: Report = lambda update: None,
) -> Iterator[T]:
    """Results of `work(task, report)`, in the order of the tasks.

    Args:
        work: a function that can be pickled; it should call `report` often, which ends it when the command is ending.
        on_report: called in this process with whatever `work` reports; may raise to end everything.

    Raises:
        DataError: a process was killed.
        Exception: whatever `work` raised, first task first among those that had begun.
    """
    if num_workers == 1 or len(tasks) <= 1:
        for task in tasks:
            yield work(task, on_report)
        return
    # spawn, not fork: the tokenizer's threads do not survive a fork
    context = get_context("spawn")
    reports, stopping = context.SimpleQueue(), context.Event()

    def pass_on_reports() -> None:
        while not reports.empty():
            on_report(reports.get())

    pool = ProcessPoolExecutor(min(num_workers, len(tasks)), context, _start_process, (reports, stopping, os.getpid()))
    try:
        # the largest first, so that no process is left alone with one at the end
        by_size = sorted(tasks, key=lambda task: -task.bytes)
        futures: dict[int, Future[T]] = {task.number: pool.submit(_work, work, task) for task in by_size}
        for task in tasks:
            while not futures[task.number].done():
                pass_on_reports()
                wait([futures[task.number]], timeout=_POLL_S)
                _raise_first_error(futures)
            yield futures.pop(task.number).result()
        pass_on_reports()
    except BrokenProcessPool:
        raise DataError(
            "a process was killed", "most often memory ran out: set fewer num_workers, then run the command again"
        ) from None
    finally:
        stopping.set()
        while not reports.empty():  # a process may wait for room in the queue
            reports.get()
        pool.shutdown(wait=True, cancel_futures=True)


def _groups(files: list[InputFile], task_bytes: int) -> Iterator[tuple[list[Slice], int]]:
    """Slices that make one task each, with their size: large files in several tasks, small ones together."""
    group: list[Slice] = []
    size = 0
    for file in files:
        slices = split_file(file, task_bytes)
        for piece in slices:
            piece_bytes = file.bytes // len(slices)
            if group and size + piece_bytes > task_bytes:
                yield group, size
                group, size = [], 0
            group.append(piece)
            size += piece_bytes
    if group:
        yield group, size


def _raise_first_error(futures: dict[int, Future[T]]) -> None:
    for _, future in sorted(futures.items()):
        if future.done() and not future.cancelled() and (error := future.exception()) is not None:
            raise error


_reports: Any = None
_stopping: Any = None


def _start_process(reports: Any, stopping: Any, parent: int) -> None:
    global _reports, _stopping
    _reports, _stopping = reports, stopping
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    # A parent that is killed can't stop its processes, and they must not write into a folder that is prepared anew
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


def _work(work: Callable[[Task, Report], T], task: Task) -> T:
    def report(update: Any) -> None:
        if _stopping.is_set():
            raise StoppedError
        _reports.put(update)

    return work(task, report)
