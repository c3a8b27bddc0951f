"""One split of a data set: the documents of all its shards under one numbering."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fp8ctl.data.manifest import Manifest
from fp8ctl.data.shards import ShardInfo, ShardReader, read_lengths
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
        self._infos = manifest.splits[split]
        self._readers: dict[int, ShardReader] = {}
        lengths = [self._lengths(info) for info in self._infos]
        self.lengths = np.concatenate(lengths)
        """Length of each document in tokens (int32)."""
        self._firsts = np.cumsum([0, *map(len, lengths)])

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

    def _lengths(self, info: ShardInfo) -> np.ndarray:
        """From the index alone: thousands of shards are not opened before something is read from them."""
        lengths = read_lengths(self.folder, info.name)
        if (len(lengths), int(lengths.sum(dtype=np.int64))) != (info.documents, info.tokens):
            raise DataError(
                f"shard {info.name} in {self.folder} holds {len(lengths):,} documents and "
                f"{lengths.sum(dtype=np.int64):,} tokens, the manifest says {info.documents:,} and {info.tokens:,}",
                "it is another data set's shard; prepare the data again",
            )
        for suffix, size in info.sizes.items():
            file = self.folder / f"{info.name}.{suffix}"
            found = file.stat().st_size if file.is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found:,} bytes, the manifest says {size:,}"
                raise DataError(f"{file} {what}", "copy the whole data set folder, or prepare the data again")
        return lengths

    def _find(self, document: int) -> tuple[ShardReader, int]:
        number = int(np.searchsorted(self._firsts, document, side="right")) - 1
        if number not in self._readers:
            self._readers[number] = ShardReader(self.folder, self._infos[number].name, with_mask=self.has_mask)
        return self._readers[number], document - int(self._firsts[number])
