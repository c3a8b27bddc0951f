"""One split of a data set: the documents of all its shards under one numbering."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fp8ctl.data.manifest import Manifest
from fp8ctl.data.shards import ShardReader
from fp8ctl.errors import DataError


class Corpus:
    """Documents 0..n-1 of a split, read by memory map.

    Raises:
        DataError: the split holds no documents, or a shard is missing or does not fit the manifest.
    """

    def __init__(self, folder: Path | str, manifest: Manifest, split: str) -> None:
        self.folder = Path(folder)
        self.has_mask = manifest.kind == "sft"
        self._max_token_id = manifest.max_token_id
        if not manifest.has_split(split):
            raise DataError(
                f"{self.folder} has no {split} split",
                "prepare it with validation_share above 0" if split == "validation" else "prepare the data again",
            )
        if manifest.max_token_id >= manifest.vocab_size:
            raise DataError(
                f"{self.folder} holds token {manifest.max_token_id:,}, its tokenizer has {manifest.vocab_size:,}",
                "prepare the data again, with the tokenizer of the model",
            )
        self._shards = []
        for info in manifest.splits[split]:
            shard = ShardReader(self.folder, info.name, with_mask=self.has_mask)
            if (len(shard), int(shard.starts[-1])) != (info.documents, info.tokens):
                raise DataError(
                    f"shard {info.name} in {self.folder} holds {len(shard):,} documents and {shard.starts[-1]:,} tokens, "
                    f"the manifest says {info.documents:,} and {info.tokens:,}",
                    "it is another data set's shard; prepare the data again",
                )
            self._shards.append(shard)
        self.lengths = np.concatenate([s.lengths for s in self._shards])
        """Length of each document in tokens (int64)."""
        self._firsts = np.cumsum([0, *(len(s) for s in self._shards)])

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Ids of a document, or of its tokens start..end.

        Raises:
            DataError: the shard holds an id that the manifest rules out: it was damaged.
        """
        shard, place = self._find(document)
        ids = shard.tokens(place, start, end)
        if len(ids) and (ids.min() < 0 or ids.max() > self._max_token_id):
            raise DataError(
                f"shard {shard.name} in {self.folder} holds a token outside the vocabulary in document {place}",
                f"the file was damaged: see `fp8ctl data verify {self.folder}`",
            )
        return ids

    def mask(self, document: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Mask of the same tokens (uint8, 1 = trained); all ones where the data set has none."""
        shard, place = self._find(document)
        if not self.has_mask:
            return np.ones(len(shard.tokens(place, start, end)), dtype=np.uint8)
        return shard.mask(place, start, end)

    def _find(self, document: int) -> tuple[ShardReader, int]:
        number = int(np.searchsorted(self._firsts, document, side="right")) - 1
        return self._shards[number], document - int(self._firsts[number])
