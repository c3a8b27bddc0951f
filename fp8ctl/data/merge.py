"""Finished tasks to one data set: only metadata is written, no token is copied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import fp8ctl
from fp8ctl.data.encode import encoder_for
from fp8ctl.data.formats import lines_before
from fp8ctl.data.manifest import QUARANTINE, Manifest
from fp8ctl.data.plan import Plan, refuse_changed_input
from fp8ctl.data.prep_task import Counts, Done, quarantine_file, run_task
from fp8ctl.data.splits import SPLITS, Edge, Move, Split, move_for
from fp8ctl.errors import DataError
from fp8ctl.track.record import append_jsonl, read_jsonl


def merge(plan: Plan, folder: Path, max_bad_rate: float) -> Path:
    """Writes the manifest of a data set whose tasks are done, and returns its path.

    Raises:
        DataError: tasks are not done, the input changed meanwhile, too many rows are bad, or there is nothing to train on.
    """
    done = _all_done(plan, folder)
    refuse_changed_input(plan)
    counts = Counts()
    for task in done:
        counts.add(task.counts)
    _merge_quarantine(plan, folder)
    _refuse_too_many_bad_rows(counts, done, max_bad_rate, folder)
    done = _move_samples(plan, folder, done)
    return _manifest(plan, done, counts).write(folder)


def _all_done(plan: Plan, folder: Path) -> list[Done]:
    found = [Done.read(folder, task.number, plan.fingerprint) for task in plan.tasks]
    missing = [n for n, done in enumerate(found) if done is None]
    if missing:
        raise DataError(
            f"{len(missing):,} of {len(found):,} tasks in {folder} are not done, the first is task {missing[0]}",
            "run `fp8ctl data prep` with the same settings again: it does what is missing",
        )
    return [done for done in found if done is not None]


def _refuse_too_many_bad_rows(counts: Counts, done: list[Done], max_bad_rate: float, folder: Path) -> None:
    if counts.bad > max_bad_rate * counts.rows:
        with open(folder / QUARANTINE, encoding="utf-8") as f:
            first = json.loads(f.readline())
        raise DataError(
            f"{counts.bad:,} of {counts.rows:,} rows are bad ({counts.bad / counts.rows:.2%}, allowed are "
            f"{max_bad_rate:.2%}); the first is {first['file']} line {first['line']}: {first['reason']}",
            f"see {folder / QUARANTINE} for all of them; raise max_bad_rate to go on without these rows",
        )
    if not counts.documents:
        dropped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.dropped.items()))
        for task in done:
            Done.path(folder, task.task).unlink()  # nothing worth going on with
        raise DataError(
            f"nothing to train on: {counts.rows:,} rows in the sources" + (f", dropped: {dropped}" if dropped else ""),
            "check the files that sources.*.paths name, text_field, and max_tokens",
        )


def _move_samples(plan: Plan, folder: Path, done: list[Done]) -> list[Done]:
    """Runs the tasks again that hold samples which must change sides, lest a split be empty by chance."""
    edges: dict[Split, Edge] = {split: Edge() for split in SPLITS}
    for task in done:
        for split in SPLITS:
            edges[split].merge(split, task.edges[split])
    move = move_for(edges["train"], edges["validation"], plan.config.validation_share)
    return [_with_move(plan, folder, task, move) for task in done]


def _with_move(plan: Plan, folder: Path, task: Done, move: Move | None) -> Done:
    concerned = move is not None and any(edge.key == move.key for edge in task.edges.values())
    wanted = move if concerned else None
    if task.move == wanted:
        return task
    return run_task(
        plan.tasks[task.task],
        lambda update: None,
        config=plan.config,
        plan=plan.fingerprint,
        folder=folder,
        move=wanted,
    )


def _merge_quarantine(plan: Plan, folder: Path) -> None:
    """One list of bad rows, with line numbers that count from the beginning of each file."""
    merged = folder / QUARANTINE
    merged.unlink(missing_ok=True)
    for task in plan.tasks:
        sliced = {piece.file.path for piece in task.slices if piece.file.format == "jsonl" and piece.start}
        skipped: dict[str, int] = {}
        for line in read_jsonl(quarantine_file(folder, task.number)):
            file = line["file"]
            if file in sliced and file not in skipped:
                skipped[file] = lines_before(file, line["at"]) + 1 - line["line"]
            append_jsonl(merged, {**line, "line": line["line"] + skipped.get(file, 0)})


def _manifest(plan: Plan, done: list[Done], counts: Counts) -> Manifest:
    shards = {split: list(chain.from_iterable(task.splits[split] for task in done)) for split in SPLITS}
    tokenizer = encoder_for(plan.config).tokenizer
    documents = {split: sum(s.documents for s in shards[split]) for split in SPLITS}
    return Manifest(
        kind=plan.config.kind,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        max_token_id=max(s.max_token_id for s in chain.from_iterable(shards.values())),
        eos_id=tokenizer.eos_id,
        splits=shards,
        counters={
            "rows": counts.rows,
            "kept": counts.kept,
            "documents": documents,
            "dropped": dict(sorted(counts.dropped.items())),
            "dropped_tokens": dict(sorted(counts.dropped_tokens.items())),
            "notes": dict(sorted(counts.notes.items())),
            "bad": counts.bad,
            "damaged": counts.damaged,
        },
        prepared=plan.prepared,
        fp8ctl_version=fp8ctl.__version__,
        warnings=list(_warnings(plan, documents, counts)),
    )


def _warnings(plan: Plan, documents: dict[Split, int], counts: Counts) -> Iterator[str]:
    if counts.damaged:
        yield f"files are damaged in {counts.damaged:,} places, rows behind them are lost: see {QUARANTINE}"
    if plan.config.validation_share > 0 and not documents["validation"]:
        yield "no validation split: all documents are copies of one, which can't be on both sides"
    yield from sorted({piece.file.note for task in plan.tasks for piece in task.slices if piece.file.note})
