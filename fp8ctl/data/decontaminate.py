"""`fp8ctl data decontaminate`: which rows hold items of eval sets."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from fp8ctl.config.checks import check_decontaminate
from fp8ctl.config.data_schema import DecontaminateConfig
from fp8ctl.data.eval_index import EvalIndex, EvalItem, read_items
from fp8ctl.data.exclude import ExclusionWriter, new_list
from fp8ctl.data.files import Slice
from fp8ctl.data.fuzzy import ShortItems, require
from fp8ctl.data.rows import Conversation, Document
from fp8ctl.data.scan import (
    LineNumbers,
    RowCounts,
    as_dict,
    lines_in_slices,
    refuse_nothing,
    refuse_twice,
    rows_of,
    run_scan,
)
from fp8ctl.data.tasks import Report, Task, input_sizes, plan_tasks
from fp8ctl.errors import DataError

CONTAMINATED = "contaminated"
MATCHES = "matches.jsonl"
_NGRAM_WORDS = {"cpt": 13, "sft": 8}
_MIN_WORDS = {"cpt": 8, "sft": 5}
_BATCH_CHARS = 200_000
_SHOWN = 20
_TEXT_CHARS = 300
_NEARLY_EVERYTHING = 0.5

Progress = Callable[[int, int, int], None]


@dataclass
class Searched:
    """What a task found; its matches lie in a scratch file."""

    counts: RowCounts
    without_text: int = 0
    """Rows that hold tokens only."""
    lines: list[tuple[Slice, int]] = field(default_factory=list)


def decontaminate(config: DecontaminateConfig, progress: Progress = lambda done, total, rows: None) -> dict[str, Any]:
    """Looks for eval items in all rows, writes what `config.mode` asks for, and returns the report.

    Args:
        progress: see `scan.run_scan`.

    Raises:
        ConfigError: settings that are missing or don't fit together.
        DataError: an eval set that is empty or can't be used, no rows, files that can't be read or written.
        MissingPackageError: fuzzy comparison without rapidfuzz.
    """
    check_decontaminate(config)
    if config.kind == "sft" and config.fuzzy_ratio is not None:
        require()
    stamp = _stamp(read_items(config.against, config.against_fields))
    index = _index_for(config, stamp)[0]
    if len(index.unprotected) == len(index.items):
        raise DataError(
            f"none of the {len(index.items):,} eval items is long enough to be searched for",
            f"the longest has less than min_words words; the first is {_name(index.items[0])}: {index.items[0].text[:80]!r}",
        )
    tasks = plan_tasks(config.sources, config.task_mb * 2**20 if config.task_mb else None)
    refuse_twice(tasks)
    with _folder(config) as (scratch, out):
        found = _Found(index)
        work = functools.partial(search_task, config=config, scratch=scratch, stamp=stamp)
        for task, searched in zip(tasks, run_scan(work, tasks, config.num_workers, progress), strict=True):
            found.add(searched, task, scratch)
        refuse_nothing(found.counts, found.numbers)
        found.write(scratch, out if config.mode == "drop" else None)
        report = {"command": "data decontaminate", "mode": config.mode, **found.report()}
        report["settings"] = config.model_dump(mode="json", exclude={"out", "num_workers"})
        if out is None:
            return report
        os.replace(scratch / MATCHES, scratch.parent / MATCHES)
        if config.mode == "drop":
            return out.finish(report, input_sizes(tasks, config.sources))
        return out.finish_without_list(report)


def search_task(task: Task, report: Report, *, config: DecontaminateConfig, scratch: Path, stamp: str) -> Searched:
    """Writes what a task's rows have in common with eval items to a scratch file.

    Args:
        stamp: hash of the eval items.
    """
    index, short = _index_for(config, stamp)
    searched = Searched(RowCounts())
    with open(scratch / f"{task.number:05d}.matches", "w") as f:
        batch: list[Document | Conversation] = []
        texts: list[str] = []
        chars = 0

        def search() -> None:
            hits = list(index.find(texts))
            if short is not None:
                hits += short.find(texts, {(h.text, h.item) for h in hits})
            for hit in sorted(hits, key=lambda h: (h.text, h.item)):
                origin = batch[hit.text].origin
                line = (origin.file, origin.at, origin.line, hit.item, hit.how, hit.num_words, hit.words[:_TEXT_CHARS])
                f.write(json.dumps(line) + "\n")

        for row in rows_of(task, config.sources, config.kind, report, searched.counts):
            text = searched_text(row)
            if not text:
                searched.without_text += 1
                continue
            batch.append(row)
            texts.append(text)
            chars += len(text)
            if chars >= _BATCH_CHARS:
                search()
                batch, texts, chars = [], [], 0
        search()
    searched.lines = lines_in_slices(task)
    return searched


def searched_text(row: Document | Conversation) -> str:
    """Where eval items are looked for: a document; of a conversation the turns that are not the assistant's."""
    if isinstance(row, Document):
        return row.text
    return "\n".join(str(m["content"]) for m in row.messages if m["role"] != "assistant")


class _Found:
    """Matches of all tasks, put together."""

    def __init__(self, index: EvalIndex) -> None:
        self._index = index
        self.counts, self.numbers = RowCounts(), LineNumbers()
        self._without_text = 0
        self._files: list[Path] = []
        self._rows = 0
        self._by_file: Counter[str] = Counter()
        self._by_item: Counter[int] = Counter()
        self._examples: list[dict[str, Any]] = []

    def add(self, searched: Searched, task: Task, scratch: Path) -> None:
        self.counts.add(searched.counts)
        self._without_text += searched.without_text
        for piece, lines in searched.lines:
            self.numbers.add(piece, lines)
        self._files.append(scratch / f"{task.number:05d}.matches")

    def write(self, scratch: Path, out: ExclusionWriter | None) -> None:
        """Matches with line numbers of the whole files, and the exclusion list."""
        last = None
        with open(scratch / MATCHES, "w") as f:
            for path in self._files:
                for raw in open(path):  # noqa: SIM115
                    file, at, line, number, how, num_words, shared = json.loads(raw)
                    line = self.numbers.line(file, at, line)
                    item = self._index.items[number]
                    match = {
                        "file": file, "line": line, "at": at, "eval_file": item.file, "eval_item": item.number,
                        "eval_field": item.field, "how": how, "num_words": num_words, "text": shared,
                    }  # fmt: skip
                    f.write(json.dumps(match) + "\n")
                    self._by_item[number] += 1
                    if len(self._examples) < _SHOWN:
                        self._examples.append(match)
                    if last != (file, at):  # the first match of a row names it
                        last = (file, at)
                        self._rows += 1
                        self._by_file[file] += 1
                        if out is not None:
                            out.add(file, at, line, CONTAMINATED, f"{_name(item)}: {shared}")

    def report(self) -> dict[str, Any]:
        index, share = self._index, self._rows / self.counts.documents
        evals: dict[str, dict[str, int]] = {}
        for number, item in enumerate(index.items):
            counts = evals.setdefault(item.file, {"items": 0, "unprotected": 0, "found": 0, "matches": 0})
            counts["items"] += 1
            counts["found"] += number in self._by_item
            counts["matches"] += self._by_item[number]
        for number in index.unprotected:
            evals[index.items[number].file]["unprotected"] += 1
        most = sorted(self._by_item.items(), key=lambda pair: (-pair[1], pair[0]))[:_SHOWN]
        return {
            **as_dict(self.counts),
            "contaminated": self._rows,
            "contaminated_share": share,
            "without_text": self._without_text,
            "by_file": dict(sorted(self._by_file.items())),
            "by_eval_file": evals,
            "unprotected": [_shown(index.items[n]) for n in index.unprotected[:_SHOWN]],
            "most_found": [{**_shown(index.items[n]), "rows": rows} for n, rows in most],
            "examples": self._examples,
            "warnings": list(self._warnings(share, most)),
        }

    def _warnings(self, share: float, most: Sequence[tuple[int, int]]) -> Iterator[str]:
        index = self._index
        if share > _NEARLY_EVERYTHING:
            item = index.items[most[0][0]]
            yield (
                f"{share:.0%} of the rows match, most often {_name(item)}: an eval item that is a common phrase, or an eval "
                "set that was made from this data"
            )
        if index.unprotected:
            first = index.items[index.unprotected[0]]
            yield (
                f"{len(index.unprotected):,} of {len(index.items):,} eval items are too short to be searched for, "
                f"the first is {_name(first)}: {first.text[:60]!r}"
            )
        if self._without_text:
            yield f"{self._without_text:,} rows hold tokens only and were not searched"


def _stamp(items: Sequence[EvalItem]) -> str:
    return xxhash.xxh3_128_hexdigest(repr(items).encode("utf-8", errors="surrogatepass"))


@functools.lru_cache(maxsize=1)
def _index_for(config: DecontaminateConfig, stamp: str) -> tuple[EvalIndex, ShortItems | None]:
    # each process makes it once, from the files: that takes less than handing it over
    items = read_items(config.against, config.against_fields)
    if _stamp(items) != stamp:
        raise DataError("an eval set changed while it was searched for", "leave the files alone and begin again")
    ngram_words = config.ngram_words or _NGRAM_WORDS[config.kind]
    min_words = min(config.min_words or _MIN_WORDS[config.kind], ngram_words)
    index = EvalIndex(items, ngram_words, min_words)
    if config.kind == "cpt" or config.fuzzy_ratio is None:
        return index, None
    short = ShortItems(items, config.fuzzy_ratio, config.fuzzy_max_chars, but=set(index.unprotected))
    return index, short


@contextlib.contextmanager
def _folder(config: DecontaminateConfig) -> Iterator[tuple[Path, ExclusionWriter | None]]:
    if config.out:
        with new_list(Path(config.out)) as out:
            yield out.scratch, out
    else:
        with tempfile.TemporaryDirectory(prefix="fp8ctl-") as scratch:
            yield Path(scratch), None


def _name(item: EvalItem) -> str:
    return f"{item.file} item {item.number}" + (f" ({item.field})" if item.field else "")


def _shown(item: EvalItem) -> dict[str, Any]:
    return {
        "eval_file": item.file,
        "eval_item": item.number,
        "eval_field": item.field,
        "text": item.text[:_TEXT_CHARS],
    }
