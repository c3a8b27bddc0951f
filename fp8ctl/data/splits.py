"""Writing the two splits of a data set: shards of bounded size, and never a split that is empty by chance."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fp8ctl.data.encode import Sample
from fp8ctl.data.shards import ShardInfo, ShardReader, ShardWriter

_KEYS = 2**64


class SplitWriter:
    """Writes the samples of one split in the order given, into shards of about `shard_tokens` tokens.

    It remembers where the samples with the smallest (or largest) key went, so that they can be lent to an empty split.
    """

    def __init__(
        self, folder: Path, split: str, *, shard_tokens: int, with_mask: bool, choose: Callable[[int, int], int]
    ) -> None:
        self._folder = folder
        self._split = split
        self._shard_tokens = shard_tokens
        self._with_mask = with_mask
        self._choose = choose
        self._open: ShardWriter | None = None
        self._in_shard = 0
        self.shards: list[ShardInfo] = []
        self.documents = 0
        self.tokens = 0
        self._edge: int | None = None
        self._edge_places: list[tuple[int, int]] = []

    def add(self, sample: Sample) -> None:
        """Appends one sample."""
        if self._open is not None and self._open.tokens + len(sample.ids) > self._shard_tokens:
            self._close_shard()
        if self._open is None:
            name = f"{self._split}-{len(self.shards):05d}"
            self._open = ShardWriter(self._folder, name, with_mask=self._with_mask)
        if self._edge is None or self._choose(sample.key, self._edge) != self._edge:
            self._edge, self._edge_places = sample.key, []
        if sample.key == self._edge:
            self._edge_places.append((len(self.shards), self._in_shard))
        self._open.add(sample.ids, sample.mask)
        self._in_shard += 1
        self.documents += 1
        self.tokens += len(sample.ids)

    def close(self) -> None:
        """Finishes the last shard."""
        if self._open is not None:
            self._close_shard()

    def abandon(self) -> None:
        """Closes what is open without making it readable."""
        if self._open is not None:
            self._open.abandon()

    def lend(self, other: SplitWriter, *, keep_some: bool) -> None:
        """Moves the samples at the edge of this closed split to the other, and closes that.

        With `keep_some` nothing happens when they are all there is: copies of one sample can't be on both sides.
        """
        if not self.documents or (keep_some and len(self._edge_places) == self.documents):
            return
        assert self._edge is not None
        for number in sorted({shard for shard, _ in self._edge_places}):
            name = self.shards[number].name
            lent = {document for shard, document in self._edge_places if shard == number}
            reader = ShardReader(self._folder, name, with_mask=self._with_mask)
            rest = ShardWriter(self._folder, f"{name}-rest", with_mask=self._with_mask)
            for document in range(len(reader)):
                ids = reader.tokens(document)
                mask = reader.mask(document) if self._with_mask else None
                if document in lent:
                    other.add(Sample(ids, mask, self._edge))
                    self.documents -= 1
                    self.tokens -= len(ids)
                else:
                    rest.add(ids, mask)
            self._replace(number, rest.close())
        other.close()

    def _replace(self, number: int, rest: ShardInfo) -> None:
        name = self.shards[number].name
        for suffix in rest.sizes:
            os.replace(self._folder / f"{rest.name}.{suffix}", self._folder / f"{name}.{suffix}")
        self.shards[number] = ShardInfo(**{**rest.__dict__, "name": name})

    def _close_shard(self) -> None:
        assert self._open is not None
        self.shards.append(self._open.close())
        self._open = None
        self._in_shard = 0


def is_validation(key: int, share: float) -> bool:
    """Whether a sample is held out: by its own hash, so that more data never moves a sample to the other side."""
    return key < share * _KEYS
