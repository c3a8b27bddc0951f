"""`fp8ctl data prep`: text or conversations to token shards and a manifest.

The work is cut into tasks, each of which writes its own shards (`prep_task.py`); putting them together writes metadata only.
Order in, order out: the shards follow the sources, whatever num_workers is. The manifest is written last, so a folder is a data
set or it is not; a preparation that was stopped or killed goes on with the tasks that are not done. rows = kept + dropped + bad
holds for every run.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import filelock

from fp8ctl.config.checks import check_data_prep
from fp8ctl.config.data_schema import DataPrepConfig
from fp8ctl.data import reasoning_gym
from fp8ctl.data.encode import encoder_for
from fp8ctl.data.manifest import FILE, QUARANTINE
from fp8ctl.data.merge import merge
from fp8ctl.data.plan import Plan, make_plan
from fp8ctl.data.prep_task import TASKS, Counts, Done, Progress, run_task
from fp8ctl.data.splits import SPLITS
from fp8ctl.data.tasks import run_tasks
from fp8ctl.errors import DataError

_OURS = re.compile(r"(train|validation)-\d{5}(-\d{3})?\.(bin|idx|mask\.bin)")
_HOPELESS_ROWS = 10_000


@dataclass
class Status:
    """How far a preparation is."""

    num_tasks: int
    total_bytes: int
    counts: Counts = field(default_factory=Counts)
    tasks_done: int = 0
    bytes_done: int = 0
    """Input of the tasks that are done."""
    tokens_found: int = 0
    """Tokens that an earlier, stopped command had made."""
    bytes_found: int = 0
    started_s: float = field(default_factory=time.monotonic)
    first_bad: dict[str, Any] | None = None
    running_chars: dict[int, int] = field(default_factory=dict)
    """Characters that came out of each task that is running."""
    chars_done: int = 0
    """Characters that came out of the tasks that this command finished."""

    @property
    def tokens_per_second(self) -> float:
        """Speed of this command, over all its processes."""
        return (self.counts.tokens - self.tokens_found) / max(time.monotonic() - self.started_s, 1e-9)

    @property
    def bytes_read(self) -> int:
        """Input read so far; an estimate for the tasks that are running, by what finished ones gave for their bytes."""
        finished = self.bytes_done - self.bytes_found
        bytes_per_char = finished / self.chars_done if self.chars_done and finished else 1.0
        return min(self.bytes_done + int(sum(self.running_chars.values()) * bytes_per_char), self.total_bytes)

    @property
    def seconds_left(self) -> float | None:
        """Estimate; None as long as there is nothing to base it on."""
        read = self.bytes_read - self.bytes_found
        elapsed_s = time.monotonic() - self.started_s
        return elapsed_s * (self.total_bytes - self.bytes_read) / read if read > 0 else None


def prepare(config: DataPrepConfig, progress: Callable[[Status], None] = lambda status: None) -> Path:
    """Writes the data set that `config` describes and returns the path of its manifest.

    Args:
        progress: called after every batch of rows and every task.

    Raises:
        ConfigError: settings that are missing or don't fit together.
        DataError: the folder holds a data set already or is in use, files can't be read or written, too many rows are bad, or
            nothing is left.
    """
    with opened(config) as (plan, folder):
        if config.executor == "local":
            run_plan(plan, folder, progress)
        else:
            from fp8ctl.data.cluster import run_on_cluster

            run_on_cluster(plan, folder)
        return merge(plan, folder, config.max_bad_rate)


def submit(config: DataPrepConfig) -> str:
    """Hands the tasks to a Slurm cluster, and a last job that writes the manifest when they are done; does not wait.

    Returns:
        The number of the last job.

    Raises:
        ConfigError, DataError: see `prepare`.
        LaunchError: Slurm refuses the jobs.
        MissingPackageError: datatrove is not installed.
    """
    from fp8ctl.data.cluster import submit_to_slurm

    plan, folder = _planned(config)
    with _writing(folder), _folder_of_our_own(folder):
        _go_on_or_begin(plan, folder, restart=config.restart)
    return submit_to_slurm(plan, folder)


def finish(folder: Path, max_bad_rate: float | None = None) -> Path:
    """Writes the manifest of a data set whose tasks were done by others, on this machine or elsewhere; returns its path.

    Args:
        max_bad_rate: default: that of the command which made the plan.

    Raises:
        DataError: the folder holds no unfinished data set, tasks are not done, or see `prepare`.
    """
    plan = Plan.read(folder)
    with _writing(folder), _folder_of_our_own(folder):
        try:
            return merge(plan, folder, plan.config.max_bad_rate if max_bad_rate is None else max_bad_rate)
        finally:
            tidy(plan, folder)


@contextlib.contextmanager
def opened(config: DataPrepConfig) -> Iterator[tuple[Plan, Path]]:
    """The plan of a preparation, new or found, and its folder, which is locked as long as the context lasts.

    Raises:
        ConfigError, DataError: see `prepare`.
    """
    plan, folder = _planned(config)
    with _writing(folder), _folder_of_our_own(folder):
        _go_on_or_begin(plan, folder, restart=config.restart)
        try:
            yield plan, folder
        finally:
            tidy(plan, folder)


def run_plan(plan: Plan, folder: Path, progress: Callable[[Status], None] = lambda status: None) -> None:
    """Runs the tasks of a plan that are not done yet, in `num_workers` processes.

    Raises:
        DataError: input can't be read, output can't be written, nearly all rows are bad, or a process was killed.
    """
    status = Status(len(plan.tasks), plan.bytes)
    waiting = []
    for task in plan.tasks:
        done = Done.read(folder, task.number, plan.fingerprint)
        if done is None:
            waiting.append(task)
            continue
        status.counts.add(done.counts)
        status.tasks_done += 1
        status.bytes_done += task.bytes
        status.first_bad = status.first_bad or done.first_bad
    status.tokens_found, status.bytes_found = status.counts.tokens, status.bytes_done

    def on_report(update: Progress) -> None:
        status.counts.add(update.counts)
        status.running_chars[update.task] = status.running_chars.get(update.task, 0) + update.chars
        status.first_bad = status.first_bad or update.first_bad
        _refuse_hopeless_input(status, plan.config)
        progress(status)

    work = functools.partial(run_task, config=plan.config, plan=plan.fingerprint, folder=folder)
    for done in run_tasks(work, waiting, plan.config.num_workers, on_report):
        status.tasks_done += 1
        status.bytes_done += plan.tasks[done.task].bytes
        status.chars_done += status.running_chars.pop(done.task, 0)
        progress(status)


def tidy(plan: Plan, folder: Path) -> None:
    """Removes what no command can use: after the manifest the markers, before it the shards of tasks that are not done."""
    done = [d for task in plan.tasks if (d := Done.read(folder, task.number, plan.fingerprint)) is not None]
    if (folder / FILE).exists() or not done:
        shutil.rmtree(folder / TASKS, ignore_errors=True)
    if (folder / FILE).exists():
        return
    wanted = {info.name for d in done for split in SPLITS for info in d.splits[split]}
    _remove_shards(folder, but=wanted)


def _planned(config: DataPrepConfig) -> tuple[Plan, Path]:
    check_data_prep(config)
    assert config.out is not None
    for family in chain.from_iterable(s.families for s in config.sources if s.kind == "reasoning_gym"):
        reasoning_gym.question(family, 0, 0)  # a wrong name fails before anything is written
    return make_plan(config, encoder_for(config)), Path(config.out)


def _go_on_or_begin(plan: Plan, folder: Path, *, restart: bool) -> None:
    if (folder / TASKS / "plan.json").is_file() and not restart:
        found = Plan.read(folder)
        if found.fingerprint == plan.fingerprint:
            return
        num_done = sum(Done.read(folder, t.number, found.fingerprint) is not None for t in found.tasks)
        if num_done:
            raise DataError(
                f"{folder} holds {num_done:,} finished tasks of a preparation with {_difference(found, plan)}",
                "go on with what it began with, begin again with restart=true, or choose another out=FOLDER",
            )
    shutil.rmtree(folder / TASKS, ignore_errors=True)
    _remove_shards(folder)
    (folder / QUARANTINE).unlink(missing_ok=True)
    try:
        plan.write(folder)
    except OSError:
        shutil.rmtree(folder / TASKS, ignore_errors=True)
        raise


def _difference(found: Plan, plan: Plan) -> str:
    for name in sorted(found.prepared.keys() | plan.prepared.keys()):
        if found.prepared.get(name) != plan.prepared.get(name):
            return f"another {name}"
    if found.modified != plan.modified or found.tasks != plan.tasks:
        return "other input: files were added, changed or removed"
    return "another version of fp8ctl"


def _refuse_hopeless_input(status: Status, config: DataPrepConfig) -> None:
    # The rate is judged in the end; but nobody wants to wait hours for that when hardly any row can be read
    counts = status.counts
    if counts.rows >= _HOPELESS_ROWS and counts.bad > max(0.5, config.max_bad_rate) * counts.rows:
        assert status.first_bad is not None
        first = status.first_bad
        raise DataError(
            f"{counts.bad:,} of the first {counts.rows:,} rows are bad, one of them is {first['file']} line "
            f"{first['line']}: {first['reason']}",
            "check that kind, sources.*.kind and text_field fit the files",
        )


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder} can't be written: {error.strerror}", "choose another out=FOLDER, or make room"
        ) from None


@contextlib.contextmanager
def _folder_of_our_own(folder: Path) -> Iterator[None]:
    """Creates the folder and keeps other preparations out of it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(folder / ".prep.lock", timeout=0)
    try:
        with lock:
            try:
                if (folder / FILE).exists():
                    shutil.rmtree(folder / TASKS, ignore_errors=True)  # left by a command killed at its very end
                    raise DataError(
                        f"{folder} holds a data set already", "choose another out=FOLDER, or remove this one"
                    )
                yield
            finally:
                (folder / ".prep.lock").unlink(missing_ok=True)
    except filelock.Timeout:
        raise DataError(
            f"another data prep is writing into {folder}", "wait for it, or choose another out=FOLDER"
        ) from None


def _remove_shards(folder: Path, but: set[str] | frozenset[str] = frozenset()) -> None:
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name.split(".")[0] not in but:
            path.unlink()
