"""Writing one split of one task: shards of bounded size, and what is needed so that no split is empty by chance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fp8ctl.data.rows import Sample
from fp8ctl.data.shards import ShardInfo, ShardWriter

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

_KEYS = 2**64


class SplitWriter:
    """Writes the samples of one split of one task in the order given, into shards of about `shard_tokens` tokens."""

    def __init__(self, folder: Path, split: Split, task: int, *, shard_tokens: int, with_mask: bool) -> None:
        self._folder = folder
        self._name = f"{split}-{task:05d}"
        self._shard_tokens = shard_tokens
        self._with_mask = with_mask
        self._open: ShardWriter | None = None
        self.shards: list[ShardInfo] = []

    def add(self, sample: Sample) -> None:
        """Appends one sample."""
        if self._open is not None and self._open.tokens + len(sample.ids) > self._shard_tokens:
            self._close_shard()
        if self._open is None:
            name = self._name + (f"-{len(self.shards):03d}" if self.shards else "")
            self._open = ShardWriter(self._folder, name, with_mask=self._with_mask)
        self._open.add(sample.ids, sample.mask)

    def close(self) -> list[ShardInfo]:
        """Finishes the last shard and describes all of them."""
        if self._open is not None:
            self._close_shard()
        return self.shards

    def abandon(self) -> None:
        """Closes what is open without making it readable."""
        if self._open is not None:
            self._open.abandon()

    def _close_shard(self) -> None:
        assert self._open is not None
        self.shards.append(self._open.close())
        self._open = None


@dataclass
class Edge:
    """The samples of a split that lie nearest to the other one; copies share a key and are counted."""

    samples: int = 0
    key: int | None = None
    copies: int = 0

    def add(self, split: Split, key: int) -> None:
        """Sees a sample that its own key put into `split`."""
        self.merge(split, Edge(1, key, 1))

    def merge(self, split: Split, other: Edge) -> None:
        """Takes in the edge of another part of the same split."""
        self.samples += other.samples
        if other.key is None:
            return
        choose = min if split == "train" else max
        if self.key is None or choose(self.key, other.key) != self.key:
            self.key, self.copies = other.key, 0
        if self.key == other.key:
            self.copies += other.copies


@dataclass(frozen=True)
class Move:
    """All samples with one key go into `split`, wherever the key would put them."""

    split: Split
    key: int

    def to_json(self) -> dict[str, Any]:
        """As a dict."""
        return asdict(self)


def split_of(key: int, validation_share: float, move: Move | None = None) -> Split:
    """The split of a sample: by its own hash, so that more data never moves a sample to the other side."""
    if move is not None and key == move.key:
        return move.split
    return "validation" if key < validation_share * _KEYS else "train"


def move_for(train: Edge, validation: Edge, validation_share: float) -> Move | None:
    """What must move so that neither split is empty; None when nothing must, or nothing can.

    Copies of one sample can't be on both sides: when there is nothing else, they are for training.
    """
    if not train.samples and validation.key is not None:
        return Move("train", validation.key)
    if not validation.samples and validation_share > 0 and train.key is not None and train.copies < train.samples:
        return Move("validation", train.key)
    return None
