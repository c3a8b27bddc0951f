"""Token shards in Megatron's format: `<name>.bin` holds the tokens, `<name>.idx` where each document lies.

The index is, little-endian: `MMIDIDX\\x00\\x00`, uint64 version 1, uint8 code of the token type, uint64 number of
sequences S, uint64 number of document bounds D, S int32 lengths in tokens, S int64 pointers in bytes, D int64 sequence
numbers where a document starts (the last is S). Here a document is one sequence. For fine-tuning `<name>.mask.bin` lies
beside it: one byte per token, 1 where the token is trained.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from fp8ctl.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_INT32_CODE = 4
# Token types that Megatron's own tool writes; ours are always int32.
_TOKEN_TYPES: dict[int, np.dtype] = {_INT32_CODE: np.dtype("<i4"), 8: np.dtype("<u2")}
_CHUNK_BYTES = 2**24
_LONGEST = 2**31 - 1
_REMAKE = "the shard was cut short or changed; prepare the data again"


@dataclass(frozen=True)
class ShardInfo:
    """What the manifest keeps about one shard."""

    name: str
    documents: int
    tokens: int
    trained_tokens: int
    """Tokens that can carry loss: all but the first of each document; with a mask, only those with a 1."""
    max_token_id: int
    hashes: dict[str, str]
    """xxh3 (128 bits) of each file, by its suffix: `bin`, `idx`, and `mask.bin` for fine-tuning."""
    sizes: dict[str, int]
    """Size of each file in bytes, by the same suffixes."""


class ShardWriter:
    """Writes one shard document by document; `close` makes it readable and durable."""

    def __init__(self, folder: Path, name: str, *, with_mask: bool) -> None:
        self.folder = folder
        self.name = name
        self.tokens = 0
        self._lengths = array("i")
        self._trained_tokens = 0
        self._max_token_id = -1
        self._bin = _HashedFile(folder / f"{name}.bin")
        self._mask = _HashedFile(folder / f"{name}.mask.bin") if with_mask else None

    def add(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Appends a document: ids (int32, shape [T], T >= 1) and, for fine-tuning, its mask (uint8, shape [T])."""
        assert len(ids) > 0 and (mask is None) == (self._mask is None)
        if len(ids) > _LONGEST:
            raise DataError(
                f"a document has {len(ids):,} tokens, the format has room for {_LONGEST:,}",
                "cut it before the preparation",
            )
        self._bin.write(ids.astype("<i4", copy=False).tobytes())
        if self._mask is not None and mask is not None:
            assert len(mask) == len(ids)
            self._mask.write(mask.astype(np.uint8, copy=False).tobytes())
        self._lengths.append(len(ids))
        self._trained_tokens += count_trained(len(ids), mask)
        self._max_token_id = max(self._max_token_id, int(ids.max()))
        self.tokens += len(ids)

    def close(self) -> ShardInfo:
        """Writes the index, brings everything to disk and tells what the manifest must know."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        np.cumsum(lengths[:-1].astype(np.int64) * 4, out=pointers[1:])
        bounds = np.arange(len(lengths) + 1, dtype=np.int64)
        index = _HashedFile(self.folder / f"{self.name}.idx")
        index.write(_HEADER.pack(_MAGIC, 1, _INT32_CODE, len(lengths), len(bounds)))
        for values, kind in ((lengths, "<i4"), (pointers, "<i8"), (bounds, "<i8")):
            index.write(values.astype(kind, copy=False).tobytes())
        files = {"bin": self._bin, "idx": index, **({"mask.bin": self._mask} if self._mask is not None else {})}
        for file in files.values():
            file.close()
        return ShardInfo(
            name=self.name,
            documents=len(lengths),
            tokens=self.tokens,
            trained_tokens=self._trained_tokens,
            max_token_id=self._max_token_id,
            hashes={suffix: f.hash.hexdigest() for suffix, f in files.items()},
            sizes={suffix: f.size for suffix, f in files.items()},
        )

    def abandon(self) -> None:
        """Closes the files without an index: what was written stays unreadable."""
        for file in (self._bin, self._mask):
            if file is not None:
                file.handle.close()


class ShardReader:
    """Reads one shard by memory map; opening it reads the index only.

    Raises:
        DataError: a file is missing, is no shard, or its size does not fit its index.
    """

    def __init__(self, folder: Path, name: str, *, with_mask: bool) -> None:
        self.folder = folder
        self.name = name
        index = _map(folder / f"{name}.idx", np.dtype(np.uint8))
        tokens_type, sequences, bounds = _read_header(folder / f"{name}.idx", index)
        starts = list(accumulate([_HEADER.size, sequences * 4, sequences * 8, bounds * 8]))
        if starts[-1] != len(index) or bounds < 1:
            raise DataError(
                f"{folder / name}.idx has {len(index):,} bytes, its header asks for {starts[-1]:,}", _REMAKE
            )
        lengths = index[starts[0] : starts[1]].view("<i4")
        pointers = index[starts[1] : starts[2]].view("<i8")
        # A document of several sequences (Megatron's sentence splitting) is their concatenation.
        bounds_at = index[starts[2] : starts[3]].view("<i8")
        ends = np.zeros(sequences + 1, dtype=np.int64)
        np.cumsum(lengths, out=ends[1:])
        in_order = bounds_at[0] == 0 and bounds_at[-1] == sequences and (np.diff(bounds_at) >= 0).all()
        if not in_order or (lengths < 0).any() or not np.array_equal(pointers, ends[:-1] * tokens_type.itemsize):
            raise DataError(f"{folder / name}.idx points to places that do not follow each other", _REMAKE)
        self.starts = ends[bounds_at]
        """Token offset of each document, and the end of the last (int64, shape [documents + 1])."""
        self.all_tokens = _map(folder / f"{name}.bin", tokens_type)
        """Every id of the shard, documents end to end; a view into the file."""
        self.all_masks = _map(folder / f"{name}.mask.bin", np.dtype(np.uint8)) if with_mask else None
        """The mask of the same (uint8), for fine-tuning."""
        for file in (self.all_tokens, self.all_masks):
            if file is not None and len(file) != ends[-1]:
                raise DataError(f"{folder / name} holds {len(file):,} tokens, its index {ends[-1]:,}", _REMAKE)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Length of each document in tokens (int64)."""
        return np.diff(self.starts)

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Ids of a document, or of its tokens start..end; a view into the file."""
        return self.all_tokens[slice(*self._place(document, start, end))]

    def mask(self, document: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Mask of the same tokens (uint8)."""
        assert self.all_masks is not None
        return self.all_masks[slice(*self._place(document, start, end))]

    def _place(self, document: int, start: int, end: int | None) -> tuple[int, int]:
        first, last = int(self.starts[document]), int(self.starts[document + 1])
        return first + start, last if end is None else min(first + end, last)


def read_lengths(folder: Path, name: str) -> np.ndarray:
    """Length of each document of a shard in tokens (int32), from its index alone.

    Raises:
        DataError: the index is missing or is none.
    """
    path = folder / f"{name}.idx"
    if not path.is_file():
        raise DataError(f"no file {path}", "copy the whole data set folder, or prepare the data again")
    with open(path, "rb") as f:
        header = np.frombuffer(f.read(_HEADER.size), dtype=np.uint8)
        _, sequences, bounds = _read_header(path, header)
        content = f.read()
    if len(content) != sequences * 12 + bounds * 8 or bounds < 1:
        raise DataError(f"{path} has {_HEADER.size + len(content):,} bytes, its header asks for others", _REMAKE)
    lengths = np.frombuffer(content, dtype="<i4", count=sequences)
    if bounds == sequences + 1:
        return lengths
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.diff(ends[np.frombuffer(content, dtype="<i8", count=bounds, offset=sequences * 12)])


def hash_file(path: Path) -> str:
    """xxh3 (128 bits) of a file, as hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as f:
        while chunk := f.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def count_trained(length: int, mask: np.ndarray | None) -> int:
    """Tokens of a document that can carry loss: the first has nothing before it to be predicted from."""
    return length - 1 if mask is None else int(mask[1:].sum())


class _HashedFile:
    """A file that is written once, front to back, and hashed on the way."""

    def __init__(self, path: Path) -> None:
        self.handle: BinaryIO = open(path, "wb")  # noqa: SIM115 - closed by close()
        self.hash = xxhash.xxh3_128()
        self.size = 0

    def write(self, data: bytes) -> None:
        self.handle.write(data)
        self.hash.update(data)
        self.size += len(data)

    def close(self) -> None:
        self.handle.flush()
        os.fsync(self.handle.fileno())
        self.handle.close()


def _map(path: Path, kind: np.dtype) -> np.ndarray:
    if not path.is_file():
        raise DataError(f"no file {path}", "copy the whole data set folder, or prepare the data again")
    size = path.stat().st_size
    if size % kind.itemsize:
        raise DataError(f"{path} has {size:,} bytes, no multiple of {kind.itemsize}", _REMAKE)
    # numpy can't map an empty file
    return np.memmap(path, dtype=kind, mode="r") if size else np.zeros(0, dtype=kind)


def _read_header(path: Path, index: np.ndarray) -> tuple[np.dtype, int, int]:
    if len(index) < _HEADER.size or bytes(index[:9]) != _MAGIC:
        raise DataError(f"{path} is no token index", "it must start with MMIDIDX")
    _, version, code, sequences, bounds = _HEADER.unpack(bytes(index[: _HEADER.size]))
    if version != 1 or code not in _TOKEN_TYPES:
        raise DataError(
            f"{path} has version {version} and token type {code}", "only version 1 with int32 or uint16 is read"
        )
    return _TOKEN_TYPES[code], sequences, bounds
