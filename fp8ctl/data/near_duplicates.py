"""Rows that share most of their word sequences: MinHash finds candidates, their text decides.

Hashes of one band that agree make candidates; in such a group each row is compared with the first one and with the one before
it, which keeps the work linear. Pairs at or above the threshold join a cluster, of which the first row stays.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from fp8ctl.config.data_schema import DedupConfig
from fp8ctl.data.scan import RowCounts, rows_of, run_scan, text_of
from fp8ctl.data.tasks import Report, Task
from fp8ctl.data.words import ngram_hashes, words
from fp8ctl.errors import DataError, MissingPackageError

_BATCH_ROWS = 1024
_MOST_ROWS = 2**32
_ROWS_SORTED_AT_ONCE = 2**23


def require() -> None:
    """Raises MissingPackageError when rensa is not there."""
    try:
        import rensa  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "method=minhash needs the package rensa", "pip install 'fp8ctl[dedup]', or set method=exact"
        ) from None


def shingles(text: str, ngram_words: int) -> np.ndarray:
    """Hashes (uint64, sorted, unique) of the word sequences of a text; of a shorter text, the hash of all its words."""
    found = words(text)
    values = np.fromiter(map(xxhash.xxh3_64_intdigest, found), np.uint64, len(found))
    return np.unique(ngram_hashes(values, min(ngram_words, len(found)) or 1))


class Sketcher:
    """Band hashes of the rows of one task."""

    def __init__(self, config: DedupConfig) -> None:
        if multiprocessing.parent_process() is not None:
            os.environ["RAYON_NUM_THREADS"] = "1"  # one process, one core; read when rensa is first used
        self._config = config
        self._waiting: list[np.ndarray] = []
        self._done: list[np.ndarray] = []

    def add(self, text: str) -> None:
        """The next row."""
        self._waiting.append(shingles(text, self._config.ngram_words))
        if len(self._waiting) == _BATCH_ROWS:
            self._flush()

    def bands(self) -> np.ndarray:
        """uint64, shape [num_bands, rows]; 0 where a row holds no word, which is never a candidate."""
        self._flush()
        return (
            np.ascontiguousarray(np.concatenate(self._done).T)
            if self._done
            else np.empty((self._config.num_bands, 0), np.uint64)
        )

    def _flush(self) -> None:
        from rensa import RMinHash

        if not self._waiting:
            return
        config, count = self._config, len(self._waiting)
        offsets = np.concatenate([[0], np.cumsum([len(s) for s in self._waiting])]).astype(np.uint64)
        matrix = RMinHash.digest_matrix_from_flat_token_hashes(
            np.concatenate(self._waiting), offsets, config.num_bands * config.rows_per_band, config.seed
        )
        digests = np.array(matrix.to_rows(), dtype=np.uint64).reshape(count, config.num_bands, config.rows_per_band)
        bands = digests[:, :, 0].copy()
        for i in range(1, config.rows_per_band):
            bands = bands * np.uint64(0x9E3779B97F4A7C15) + digests[:, :, i]
            bands ^= bands >> np.uint64(32)
        bands[np.diff(offsets.astype(np.int64)) == 0] = 0
        self._done.append(bands)
        self._waiting = []


def join(
    first: np.ndarray,
    offsets: np.ndarray,
    tasks: Sequence[Task],
    config: DedupConfig,
    scratch: Path,
    progress: Callable[[int, int, int], None],
) -> tuple[np.ndarray, dict[str, int]]:
    """Joins clusters of equal rows to clusters of near-duplicates, in place.

    Args:
        first: for each row the first row of its cluster.
        offsets: number of the first row of each task, and at the end of all rows.

    Returns:
        Which rows are named for being near-duplicates (bool), and counts for the report.
    """
    if len(first) >= _MOST_ROWS:
        raise DataError(f"{len(first):,} rows are too many for MinHash", "give the sources in parts")
    pairs = _candidates(first, tasks, config, scratch)
    if not len(pairs):
        return np.zeros(len(first), bool), {"candidates": 0, "verified": 0}
    wanted = np.unique(np.concatenate([pairs >> np.uint64(32), pairs & np.uint64(_MOST_ROWS - 1)])).astype(np.int64)
    for task in tasks:
        low, high = np.searchsorted(wanted, offsets[task.number : task.number + 2])
        np.save(scratch / f"{task.number:05d}.wanted.npy", wanted[low:high] - offsets[task.number])
    work = functools.partial(shingle_task, config=config, scratch=scratch)
    lengths = list(run_scan(work, tasks, config.num_workers, progress))
    stored = _Shingles(wanted, lengths, [scratch / f"{task.number:05d}.shingles" for task in tasks])
    parent, verified = _verified(pairs, stored, config.threshold)
    is_near = np.zeros(len(first), bool)
    for row in sorted(parent):
        root = _root(parent, row)
        is_near[row] = root != row
        first[row] = root
    # copies of a row that is named now go with it to its cluster; they stay plain duplicates
    np.take(first, first, out=first)
    return is_near, {"candidates": len(pairs), "verified": verified}


def shingle_task(task: Task, report: Report, *, config: DedupConfig, scratch: Path) -> list[int]:
    """Writes the word sequences of wanted rows to a scratch file; gives the number of sequences of each."""
    wanted = np.load(scratch / f"{task.number:05d}.wanted.npy")
    lengths: list[int] = []
    with open(scratch / f"{task.number:05d}.shingles", "wb") as f:
        if not len(wanted):
            return lengths
        for number, row in enumerate(rows_of(task, config.sources, config.kind, report, RowCounts())):
            if len(lengths) == len(wanted):
                break
            if number == wanted[len(lengths)]:
                found = shingles(text_of(row), config.ngram_words)
                found.tofile(f)
                lengths.append(len(found))
    return lengths


class _Shingles:
    def __init__(self, rows: np.ndarray, lengths: list[list[int]], files: list[Path]) -> None:
        self._rows = rows
        self._places: list[tuple[int, int, int]] = []
        self._files = [np.memmap(f, np.uint64, "r") if f.stat().st_size else np.empty(0, np.uint64) for f in files]
        for number, of_task in enumerate(lengths):
            at = 0
            for length in of_task:
                self._places.append((number, at, at + length))
                at += length

    def of(self, row: int) -> np.ndarray:
        file, start, end = self._places[int(np.searchsorted(self._rows, row))]
        return np.asarray(self._files[file][start:end])


def _candidates(first: np.ndarray, tasks: Sequence[Task], config: DedupConfig, scratch: Path) -> np.ndarray:
    """Pairs (earlier << 32 | later, uint64, sorted, unique) of first rows whose hashes agree in a band."""
    bands = [np.load(scratch / f"{task.number:05d}.bands.npy", mmap_mode="r") for task in tasks]
    firsts = np.flatnonzero(first == np.arange(len(first), dtype=first.dtype))
    pairs = np.empty(0, np.uint64)
    bits = max(0, (len(firsts) - 1) // _ROWS_SORTED_AT_ONCE).bit_length()
    for band in range(config.num_bands):
        values = np.concatenate([b[band] for b in bands])[firsts]
        for rows in _parts(values, bits):
            hashes = values[rows]
            order = np.argsort(hashes, kind="stable")
            hashes, numbers = hashes[order], firsts[rows[order]].astype(np.uint64)
            same = np.flatnonzero(hashes[1:] == hashes[:-1]) + 1
            begins = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]])) if len(hashes) else same
            group = begins[np.searchsorted(begins, same, side="right") - 1] if len(same) else same
            for other in (same - 1, group):
                pairs = np.union1d(pairs, (numbers[other] << np.uint64(32)) | numbers[same])
    return pairs


def _parts(values: np.ndarray, bits: int) -> Iterator[np.ndarray]:
    for part in range(2**bits):
        here = values != 0
        if bits:
            here &= (values >> np.uint64(64 - bits)) == part
        yield np.flatnonzero(here)


def _verified(pairs: np.ndarray, stored: _Shingles, threshold: float) -> tuple[dict[int, int], int]:
    """Clusters (row -> an earlier row of its cluster, or itself), and how many pairs were at or above the threshold."""
    parent: dict[int, int] = {}
    verified = 0
    for pair in pairs.tolist():
        a, b = pair >> 32, pair & (_MOST_ROWS - 1)
        a_root, b_root = _root(parent, a), _root(parent, b)
        if a_root == b_root:
            continue  # joined by other pairs
        mine, other = stored.of(a), stored.of(b)
        # lengths alone can rule it out
        if min(len(mine), len(other)) < threshold * max(len(mine), len(other)):
            continue
        common = len(np.intersect1d(mine, other, assume_unique=True))
        if common >= threshold * (len(mine) + len(other) - common):
            verified += 1
            low, high = sorted((a_root, b_root))
            parent[low], parent[high] = low, low
            parent.setdefault(a, low)
            parent.setdefault(b, low)
    return parent, verified


def _root(parent: dict[int, int], row: int) -> int:
    root = row
    while parent.get(root, root) != root:
        root = parent[root]
    while parent.get(row, root) != root:
        parent[row], row = root, parent[row]
    return root
