"""Eval items, and where they stand in other text.

An item is found where a run of its words stands in the text, in the same order. Words are looked up in a table of the items' own
words, so that most text is passed over without being hashed; a hash of each run finds candidates, and the words decide.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data.files import find_files
from fp8ctl.data.formats import Refused
from fp8ctl.data.inspect_source import guess_format
from fp8ctl.data.raw_rows import raw_rows
from fp8ctl.data.words import extend_hashes, ngram_hashes, words
from fp8ctl.errors import DataError

FIELDS = ("question", "problem", "prompt", "instruction", "input", "query", "text", "content", "messages")
_SEPARATOR = b""
_SMALLEST_TABLE_BITS = 16
_LARGEST_TABLE_BITS = 26
_SLOTS_PER_RUN = 16


@dataclass(frozen=True)
class EvalItem:
    """One text of an eval set."""

    file: str
    number: int
    """Line or row, from 1."""
    field: str
    text: str


@dataclass(frozen=True)
class Hit:
    """An item that was found in a text."""

    text: int
    """Place of the text among those that were given."""
    item: int
    words: str
    """What they have in common, as far as it goes around the run that was found."""
    num_words: int
    how: str = "words"
    """words, or fuzzy."""


def read_items(paths: Sequence[str], fields: Sequence[str]) -> list[EvalItem]:
    """Texts of eval sets, in order.

    Args:
        fields: which fields of an item; empty: those of `FIELDS` that it has.

    Raises:
        DataError: no items, items without such fields, or files that can't be read.
    """
    items: list[EvalItem] = []
    for path in paths:
        before = len(items)
        for file in find_files(SourceConfig(kind=guess_format(path), paths=(path,))):
            for number, row in raw_rows(file):
                if isinstance(row, Refused):
                    raise DataError(f"eval set {file.path} line {number}: {row.reason}", "mend the eval set")
                for name, text in _texts(row, fields, f"{file.path} line {number}"):
                    items.append(EvalItem(file.path, number, name, text))
        if len(items) == before:
            raise DataError(f"the eval set {path} is empty", "nothing could be found with it: give another file")
    return items


@dataclass
class EvalIndex:
    """Looks for items in texts."""

    items: list[EvalItem]
    ngram_words: int
    min_words: int
    unprotected: list[int] = field(default_factory=list)
    """Items that are too short to be searched for."""
    _vocabulary: dict[bytes, int] = field(default_factory=dict)
    _values: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    _starts: list[int] = field(default_factory=list)
    _owners: list[int] = field(default_factory=list)
    _runs: dict[int, _Runs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values: list[int] = []
        by_length: dict[int, list[int]] = {}
        seen: set[bytes] = set()
        for number, item in enumerate(self.items):
            found = words(item.text)
            if len(found) < min(self.min_words, self.ngram_words):
                self.unprotected.append(number)
                continue
            whole = b" ".join(found)
            if whole in seen:
                continue  # the first one stands for all
            seen.add(whole)
            start = len(values)
            self._starts.append(start)
            self._owners.append(number)
            values.extend(self._vocabulary.setdefault(word, len(self._vocabulary) + 1) for word in found)
            values.append(0)
            length = min(len(found), self.ngram_words)
            by_length.setdefault(length, []).extend(range(start, start + len(found) - length + 1))
        self._values = np.array(values, dtype=np.uint64)
        for length in sorted(by_length):
            hashes = ngram_hashes(self._values, length)
            self._runs[length] = _Runs(hashes, np.array(by_length[length], dtype=np.int64))

    def find(self, texts: Sequence[str]) -> Iterator[Hit]:
        """Each item once for each text that it is found in, in order of the texts."""
        if not self._runs:
            return
        all_words: list[bytes] = []
        begins: list[int] = []
        for one in texts:
            begins.append(len(all_words))
            all_words += words(one)
            all_words.append(_SEPARATOR)
        values = np.fromiter(map(self._vocabulary.get, all_words, repeat(0)), np.uint64, len(all_words))
        found: dict[tuple[int, int], Hit] = {}
        for at, position, length in self._matches(values):
            text = bisect.bisect_right(begins, at) - 1
            item = bisect.bisect_right(self._starts, position) - 1
            if (text, item) not in found:
                start, end = self._common(values, at, position, length)
                shared = b" ".join(all_words[start:end]).decode("utf-8", errors="replace")
                found[text, item] = Hit(text, self._owners[item], shared, end - start)
        yield from (found[key] for key in sorted(found))

    def _matches(self, values: np.ndarray) -> Iterator[tuple[int, int, int]]:
        unknown = np.flatnonzero(values == 0)
        gaps = np.diff(np.concatenate([[-1], unknown, [len(values)]])) - 1
        longest = int(gaps.max(initial=0))
        hashes, length = values, 1
        for wanted, runs in self._runs.items():
            if wanted > longest:
                return
            while length < wanted:
                hashes = extend_hashes(hashes, values, length)
                length += 1
            for at, position in runs.candidates(hashes):
                if np.array_equal(values[at : at + wanted], self._values[position : position + wanted]):
                    yield at, position, wanted

    def _common(self, values: np.ndarray, at: int, position: int, length: int) -> tuple[int, int]:
        start, end, offset = at, at + length, position - at
        while (
            start > 0
            and values[start - 1]
            and start + offset > 0
            and values[start - 1] == self._values[start - 1 + offset]
        ):
            start -= 1
        while end < len(values) and values[end] and values[end] == self._values[end + offset]:
            end += 1
        return start, end


class _Runs:
    """Hashes of the runs of one length, with the place of the first run that has each."""

    def __init__(self, hashes: np.ndarray, places: np.ndarray) -> None:
        self._hashes, first = np.unique(hashes[places], return_index=True)
        self._places = places[first]
        bits = int(np.clip((_SLOTS_PER_RUN * len(places)).bit_length(), _SMALLEST_TABLE_BITS, _LARGEST_TABLE_BITS))
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(2**bits, bool)
        self._table[self._hashes >> self._shift] = True

    def candidates(self, hashes: np.ndarray) -> Iterator[tuple[int, int]]:
        """Where a hash of these is one of mine, and the place of my run."""
        at = np.flatnonzero(self._table[hashes >> self._shift])
        mine = np.minimum(np.searchsorted(self._hashes, hashes[at]), len(self._hashes) - 1)
        same = self._hashes[mine] == hashes[at]
        yield from zip(at[same].tolist(), self._places[mine[same]].tolist(), strict=True)


def _texts(row: Any, fields: Sequence[str], where: str) -> Iterator[tuple[str, str]]:
    if isinstance(row, str):
        yield "", row
        return
    if not isinstance(row, dict):
        raise DataError(f"eval set {where}: {type(row).__name__}, not an object", "each item must be an object")
    present = [name for name in fields or FIELDS if row.get(name) is not None]
    if not present:
        raise DataError(
            f"eval set {where} has no field {' or '.join(fields or FIELDS)}",
            f"set against_fields to fields that it has: {', '.join(map(str, row)) or 'none'}",
        )
    for name in present:
        text = _joined(row[name])
        if text is None:
            raise DataError(f"field {name} of eval set {where} holds no text", "set against_fields to fields of text")
        yield name, text


def _joined(value: Any) -> str | None:
    """A text; texts of a list behind each other; of turns those that are not the assistant's."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return None
    parts: list[str] = []
    for part in value:
        if isinstance(part, dict):
            if part.get("role", part.get("from")) in ("assistant", "gpt"):
                continue
            part = part.get("content", part.get("value"))
        if not isinstance(part, str):
            return None
        parts.append(part)
    return "\n".join(parts)
