"""Which tokens stand in which row: indices over documents, a pure function of (seed, epoch, row number).

Nothing here touches a token. Rows are numbered through all epochs: row r belongs to epoch r // rows_per_epoch. Neither the
number of ranks nor of workers enters, so a run may go on with other ones.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class Segment(NamedTuple):
    """Tokens start .. start + length of one document, standing together in a row."""

    document: int
    start: int
    length: int


class Rows(Protocol):
    """An order of packed rows."""

    rows_per_epoch: int

    def row(self, number: int) -> list[Segment]:
        """What stands in a row, in order; the rest of the row is padding."""
        ...


class StreamRows:
    """Pre-training: the epoch's documents in random order, end to end, cut at every row end; the rows shuffled once more.

    Each token of each epoch stands in exactly one row; only the epoch's last piece of stream is padded. The second shuffle
    keeps the pieces of one long document from filling a whole step.
    """

    def __init__(self, lengths: np.ndarray, seq_len_tokens: int, seed: int) -> None:
        self._lengths = lengths
        self._seq_len = seq_len_tokens
        self._seed = seed
        self._total = int(lengths.sum(dtype=np.int64))
        self.rows_per_epoch = -(-self._total // seq_len_tokens)
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def row(self, number: int) -> list[Segment]:
        """See `Rows.row`."""
        epoch, place = divmod(number, self.rows_per_epoch)
        at = int(self._epoch(epoch)[2][place]) * self._seq_len
        return self.segments(epoch, at, min(at + self._seq_len, self._total))

    def segments(self, epoch: int, at: int, stop: int) -> list[Segment]:
        """Tokens at .. stop of an epoch's stream."""
        order, ends, _ = self._epoch(epoch)
        segments = []
        index = int(np.searchsorted(ends, at, side="right"))
        while at < stop:
            length = int(self._lengths[order[index]])
            start = at - (int(ends[index]) - length)
            taken = min(length - start, stop - at)
            if taken:
                segments.append(Segment(int(order[index]), start, taken))
            at += taken
            index += 1
        return segments

    def unread(self, epoch: int, rows_read: int) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends (int64, shape [pieces]) of what an epoch's rows after the first `rows_read` hold, in the order of its stream."""
        left = np.sort(self._epoch(epoch)[2][rows_read:].astype(np.int64))
        follows = np.diff(left, prepend=-2) == 1
        starts = left[~follows] * self._seq_len
        ends = (left[np.append(~follows[1:], [True] if len(left) else [])] + 1) * self._seq_len
        return starts, np.minimum(ends, self._total)

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if epoch not in self._epochs:
            _forget_all_but_one(self._epochs)
            order = permutation(len(self._lengths), self._seed, epoch, 0)
            rows = permutation(self.rows_per_epoch, self._seed, epoch, 1)
            self._epochs[epoch] = (order, np.cumsum(self._lengths[order], dtype=np.int64), rows)
        return self._epochs[epoch]


class BestFitRows:
    """Fine-tuning: whole samples share rows, packed by best-fit decreasing; no sample is cut or left out.

    How samples of equal length are spread over the packs, and the order of the packs, change with the epoch. The number of
    packs does not: best fit sees only lengths.
    """

    def __init__(self, lengths: np.ndarray, seq_len_tokens: int, seed: int) -> None:
        self._lengths = lengths.astype(np.int64)
        self._seed = seed
        pack_of = best_fit_decreasing(np.sort(self._lengths)[::-1], seq_len_tokens)
        self.rows_per_epoch = int(pack_of.max(initial=-1)) + 1
        self._members = np.argsort(pack_of, kind="stable")
        self._bounds = np.searchsorted(pack_of[self._members], np.arange(self.rows_per_epoch + 1))
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def row(self, number: int) -> list[Segment]:
        """See `Rows.row`."""
        epoch, place = divmod(number, self.rows_per_epoch)
        by_length, packs = self._epoch(epoch)
        pack = int(packs[place])
        documents = by_length[self._members[self._bounds[pack] : self._bounds[pack + 1]]]
        return [Segment(int(d), 0, int(self._lengths[d])) for d in documents if self._lengths[d]]

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if epoch not in self._epochs:
            _forget_all_but_one(self._epochs)
            ties = permutation(len(self._lengths), self._seed, epoch, 0)
            by_length = np.lexsort((ties, -self._lengths))
            self._epochs[epoch] = (by_length, permutation(self.rows_per_epoch, self._seed, epoch, 1))
        return self._epochs[epoch]


def make_rows(packing: str, lengths: np.ndarray, seq_len_tokens: int, seed: int) -> Rows:
    """The order for `data.packing`: stream or best_fit (whose lengths must all fit in a row)."""
    return (StreamRows if packing == "stream" else BestFitRows)(lengths, seq_len_tokens, seed)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Pack number of each length: each goes into the fullest pack that still has room, else into a new one.

    Args:
        lengths: int64, falling, none above capacity.

    Returns:
        int64, shape [len(lengths)]; packs are numbered from 0 in the order in which they were opened.
    """
    assert not len(lengths) or lengths[0] <= capacity
    packs_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit c is set when some pack has room for exactly c tokens: the lowest set bit at or above a length is the best fit.
    rooms = 0
    num_packs = 0
    pack_of = []
    for length in lengths.tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            pack = packs_with_room[room].pop()
            if not packs_with_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, num_packs
            num_packs += 1
        room -= length
        if room:
            if not packs_with_room[room]:
                rooms |= 1 << room
            packs_with_room[room].append(pack)
        pack_of.append(pack)
    return np.array(pack_of, dtype=np.int64)


def permutation(size: int, seed: int, epoch: int, salt: int) -> np.ndarray:
    """A random order of 0..size-1 (uint32, or int64 where that is too small: with 80 million documents memory counts).

    Made from the raw bits of PCG64, which numpy promises never to change; `Generator.permutation` may change with a version,
    and with it the order of a run that is resumed.
    """
    bits = np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch, salt])).random_raw(size)
    order = np.argsort(bits, kind="stable")
    return order.astype(np.uint32) if size <= 2**32 else order


def row_cost(segments: list[Segment]) -> int:
    """What grows with the square of lengths: the attention of a row, up to a factor. All rows cost the same besides."""
    return sum(segment.length**2 for segment in segments)


def _forget_all_but_one(epochs: dict) -> None:
    # a step at the turn of an epoch needs two of them
    while len(epochs) > 1:
        epochs.pop(next(iter(epochs)))
