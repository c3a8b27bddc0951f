"""One task of a preparation: rows in, shards out, and a marker that says that it is done and what it holds.

The marker is written last and atomically, into `tasks/` of the data set's folder. Shards without a marker don't count: a task
that was killed begins again and writes the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fp8ctl.config.data_schema import DataPrepConfig
from fp8ctl.data.encode import encoder_for, in_batches, num_chars
from fp8ctl.data.exclude import Exclusions
from fp8ctl.data.rows import BadRow, Dropped, Encoded, Row
from fp8ctl.data.shards import ShardInfo
from fp8ctl.data.splits import SPLITS, Edge, Move, Split, SplitWriter, split_of
from fp8ctl.data.tasks import Report, Task, iter_task
from fp8ctl.errors import DataError
from fp8ctl.track.record import append_jsonl, write_json

TASKS = "tasks"


@dataclass
class Counts:
    """What came in and what became of it. rows = kept + dropped + bad, and each kept row gave one sample or more."""

    rows: int = 0
    kept: int = 0
    documents: int = 0
    """Samples: more than `kept` where conversations were split."""
    tokens: int = 0
    bad: int = 0
    damaged: int = 0
    """Of these, those that stand for all that is lost behind a damaged place."""
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_tokens: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    """Samples by what was done to them."""

    def see(self, result: Encoded) -> None:
        """Counts what became of one row."""
        self.rows += 1
        if isinstance(result, BadRow):
            self.bad += 1
            self.damaged += result.is_damage
        elif isinstance(result, Dropped):
            _count(self.dropped, result.reason)
            if result.tokens:
                _count(self.dropped_tokens, result.reason, result.tokens)
        else:
            self.kept += 1
            self.documents += len(result)
            self.tokens += sum(len(sample.ids) for sample in result)
            for sample in result:
                if sample.note:
                    _count(self.notes, sample.note)
                if sample.tokens_cut:
                    _count(self.dropped_tokens, sample.note, sample.tokens_cut)

    def add(self, other: Counts) -> None:
        """Adds another part."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            if isinstance(value, dict):
                for key, number in value.items():
                    _count(mine, key, number)
            else:
                setattr(self, name, mine + value)


@dataclass
class Done:
    """What the marker of a task says."""

    task: int
    plan: str
    """Fingerprint of the plan that the task belongs to."""
    counts: Counts
    splits: dict[Split, list[ShardInfo]]
    edges: dict[Split, Edge]
    """By the samples' own keys, before any move."""
    move: Move | None
    first_bad: dict[str, Any] | None

    @staticmethod
    def path(folder: Path, task: int) -> Path:
        """Where the marker of a task lies."""
        return folder / TASKS / f"{task:05d}.json"

    def write(self, folder: Path) -> None:
        """Writes the marker, atomically."""
        write_json(self.path(folder, self.task), asdict(self))

    @staticmethod
    def read(folder: Path, task: int, plan: str) -> Done | None:
        """The marker of a task; None when the task is not done."""
        try:
            value = json.loads(Done.path(folder, task).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        if value["plan"] != plan:
            return None
        return Done(
            task=task,
            plan=plan,
            counts=Counts(**value["counts"]),
            splits={s: [ShardInfo(**i) for i in value["splits"][s]] for s in SPLITS},
            edges={s: Edge(**value["edges"][s]) for s in SPLITS},
            move=Move(**value["move"]) if value["move"] else None,
            first_bad=value["first_bad"],
        )


@dataclass(frozen=True)
class Progress:
    """What a task reports after each batch of rows: what was added, and the first bad row so far."""

    task: int
    counts: Counts
    chars: int
    """Characters of text in the batch."""
    first_bad: dict[str, Any] | None


def quarantine_file(folder: Path, task: int) -> Path:
    """Where the bad rows of a task are listed."""
    return folder / TASKS / f"{task:05d}.quarantine.jsonl"


def run_task(
    task: Task, report: Report, *, config: DataPrepConfig, plan: str, folder: Path, move: Move | None = None
) -> Done:
    """Writes the shards of a task into `folder`, then its marker.

    Args:
        report: called with a `Progress` after each batch.
        plan: fingerprint of the plan that the task belongs to.
        move: samples that don't go where their own key puts them.

    Raises:
        DataError: input can't be read, or output can't be written.
    """
    quarantine = quarantine_file(folder, task.number)
    options: dict[str, Any] = {"shard_tokens": config.shard_tokens, "with_mask": config.kind == "sft"}
    writers = {s: SplitWriter(folder, s, task.number, **options) for s in SPLITS}
    done = Done(task.number, plan, Counts(), {}, {s: Edge() for s in SPLITS}, move, None)
    encoder = encoder_for(config)
    excluded = _exclusions_of(task, config)
    try:
        quarantine.unlink(missing_ok=True)
        for batch in in_batches(iter_task(task, config.sources, config.kind)):
            counts = Counts()
            wanted = _leave_out(batch, excluded, counts)
            for result in encoder.encode(wanted):
                counts.see(result)
                if isinstance(result, BadRow):
                    line = _quarantine_line(result)
                    append_jsonl(quarantine, line)
                    done.first_bad = done.first_bad or line
                for sample in result if isinstance(result, list) else ():
                    own_split = split_of(sample.key, config.validation_share)
                    done.edges[own_split].add(own_split, sample.key)
                    writers[split_of(sample.key, config.validation_share, move)].add(sample)
            done.counts.add(counts)
            report(Progress(task.number, counts, sum(map(num_chars, batch)), done.first_bad))
        done.splits = {s: writer.close() for s, writer in writers.items()}
        done.write(folder)
    except OSError as error:
        raise DataError(
            f"{folder} can't be written: {error.strerror or error}", "choose another out=FOLDER, or make room"
        ) from None
    finally:
        for writer in writers.values():
            writer.abandon()
    return done


def _exclusions_of(task: Task, config: DataPrepConfig) -> Exclusions:
    """What the exclusion lists say about the input of a task."""
    files = sorted({piece.file.path for piece in task.slices})
    return Exclusions.load(config.exclude, files or None)


def _leave_out(rows: list[Row], excluded: Exclusions, counts: Counts) -> list[Row]:
    wanted = []
    for row in rows:
        reason = excluded.reason(row.origin)
        if reason is None:
            wanted.append(row)
        else:
            counts.see(Dropped(reason))
    return wanted


def _quarantine_line(bad: BadRow) -> dict[str, Any]:
    file = bad.origin.file.encode("utf-8", errors="backslashreplace").decode()
    return {"file": file, "line": bad.origin.line, "at": bad.origin.at, "reason": bad.reason, "excerpt": bad.excerpt}


def _count(counters: dict[str, int], key: str, number: int = 1) -> None:
    counters[key] = counters.get(key, 0) + number
