"""Going on with a corpus where another run stopped, in rows of another length: no token twice, none left out.

A run that reads rows of 8k and one that goes on with rows of 32k (or with the same length, in another mixture) see the same
stream of documents. What the first has not read of its epoch are pieces of that stream; put together in the order of the stream
they are cut into the new rows. Where the first run had read most of an epoch the pieces are short, and so are the documents in
the new rows; a length is best changed early in an epoch, or at its end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fp8ctl.data.mixing import Mixture, Phase
from fp8ctl.data.packing import Segment, StreamRows, permutation
from fp8ctl.errors import DataError

_SALT = 2


class LeftoverRows:
    """First what is left of the epoch that another run was in, then whole epochs."""

    def __init__(
        self,
        lengths: np.ndarray,
        seq_len_tokens: int,
        seed: int,
        *,
        before_seq_len_tokens: int,
        before_seed: int,
        rows_read: int,
    ) -> None:
        """
        Args:
            lengths: of the documents, in tokens.
            before_seq_len_tokens, before_seed, rows_read: how the other run read, and how many of its rows it read.
        """
        self._before = StreamRows(lengths, before_seq_len_tokens, before_seed)
        self._whole = StreamRows(lengths, seq_len_tokens, seed)
        self.rows_per_epoch = self._whole.rows_per_epoch
        self._seq_len = seq_len_tokens
        self._epoch, place = divmod(rows_read, self._before.rows_per_epoch)
        self._starts, self._ends = self._before.unread(self._epoch, place)
        sizes = self._ends - self._starts
        self._firsts = np.concatenate([[0], np.cumsum(sizes)])
        self._total = int(self._firsts[-1])
        num_rows = -(-self._total // seq_len_tokens)
        self._rows = permutation(num_rows, seed, self._epoch, _SALT)

    @property
    def left_tokens(self) -> int:
        """Tokens of the epoch that the other run has not read."""
        return self._total

    def row(self, number: int) -> list[Segment]:
        """See `Rows.row`."""
        if number >= len(self._rows):
            return self._whole.row((self._epoch + 1) * self.rows_per_epoch + number - len(self._rows))
        at = int(self._rows[number]) * self._seq_len
        stop = min(at + self._seq_len, self._total)
        segments: list[Segment] = []
        piece = int(np.searchsorted(self._firsts, at, side="right")) - 1
        while at < stop:
            start = int(self._starts[piece]) + at - int(self._firsts[piece])
            length = min(int(self._ends[piece]) - start, stop - at)
            segments += self._before.segments(self._epoch, start, start + length)
            at += length
            piece += 1
        return segments


def read_before(path: str) -> dict[str, Any]:
    """The state of another run's loader, from the JSON file where its checkpoint keeps it.

    Raises:
        DataError: the file is missing or holds no such state.
    """
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
        state = state.get("loader", state)
        if not {"next_row", "seed", "packing", "seq_len_tokens"} <= state.keys():
            raise ValueError("it says nothing of what was read")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(
            f"{path} is no checkpoint's record: {error}", "set data.after to a run or to one of its checkpoints"
        ) from None
    return state


def rows_read(state: dict[str, Any]) -> dict[str, int]:
    """Rows that another run read of each data set, by its fingerprint."""
    if "fingerprint" in state:  # written before there were mixtures
        return {state["fingerprint"]: state["next_row"]}
    fingerprints = list(dict.fromkeys(s["fingerprint"] for phase in state["phases"] for s in phase["sources"]))
    phases = []
    for phase in state["phases"]:
        shares = {s["fingerprint"]: s["share"] for s in phase["sources"]}
        phases.append(Phase(phase["start_row"], tuple(shares.get(f, 0.0) for f in fingerprints)))
    return dict(zip(fingerprints, Mixture(phases).counts(state["next_row"]), strict=True))
