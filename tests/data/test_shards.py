from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from fp8ctl.data.packing import StreamRows
from fp8ctl.data.shards import ShardInfo, ShardReader, ShardWriter, read_lengths
from fp8ctl.errors import DataError

DOCUMENTS = [[5, 6, 7], [8], [70_000, 1, 2, 3]]


def write(folder: Path, documents: list[list[int]] = DOCUMENTS, masks: list[list[int]] | None = None) -> ShardInfo:
    writer = ShardWriter(folder, "train-00000", with_mask=masks is not None)
    for i, ids in enumerate(documents):
        writer.add(np.array(ids, dtype=np.int32), None if masks is None else np.array(masks[i], dtype=np.uint8))
    return writer.close()


def read_as_megatron_does(prefix: Path) -> list[list[int]]:
    """A reader of its own, from the description of the format and `struct` alone."""
    raw = prefix.with_suffix(".idx").read_bytes()
    assert raw[:9] == b"MMIDIDX\x00\x00"
    (version,) = struct.unpack("<Q", raw[9:17])
    (code,) = struct.unpack("<B", raw[17:18])
    sequences, bounds = struct.unpack("<QQ", raw[18:34])
    assert (version, code) == (1, 4)
    at = 34
    lengths = struct.unpack(f"<{sequences}i", raw[at : at + 4 * sequences])
    at += 4 * sequences
    pointers = struct.unpack(f"<{sequences}q", raw[at : at + 8 * sequences])
    at += 8 * sequences
    starts = struct.unpack(f"<{bounds}q", raw[at:])
    assert starts == tuple(range(sequences + 1))
    tokens = prefix.with_suffix(".bin").read_bytes()
    return [list(struct.unpack(f"<{n}i", tokens[p : p + 4 * n])) for n, p in zip(lengths, pointers, strict=True)]


def test_bytes_are_megatrons(tmp_path: Path) -> None:
    info = write(tmp_path)
    assert read_as_megatron_does(tmp_path / "train-00000") == DOCUMENTS
    assert (info.documents, info.tokens, info.trained_tokens, info.max_token_id) == (3, 8, 5, 70_000)
    assert info.sizes == {"bin": 32, "idx": 34 + 3 * 4 + 3 * 8 + 4 * 8}
    for suffix, digest in info.hashes.items():
        assert xxhash.xxh3_128_hexdigest((tmp_path / f"train-00000.{suffix}").read_bytes()) == digest


def test_reads_back(tmp_path: Path) -> None:
    write(tmp_path)
    shard = ShardReader(tmp_path, "train-00000", with_mask=False)
    assert len(shard) == 3
    assert shard.lengths.tolist() == [3, 1, 4]
    assert [shard.tokens(i).tolist() for i in range(3)] == DOCUMENTS
    assert shard.tokens(2, 1, 3).tolist() == [1, 2]
    assert shard.tokens(0, 2, 9).tolist() == [7], "never into the next document"


def test_mask_lies_beside_the_tokens(tmp_path: Path) -> None:
    info = write(tmp_path, masks=[[1, 0, 1], [1], [0, 0, 1, 1]])
    assert (tmp_path / "train-00000.mask.bin").read_bytes() == bytes([1, 0, 1, 1, 0, 0, 1, 1])
    # the first token of a document has nothing before it and can't be a target
    assert info.trained_tokens == 3
    shard = ShardReader(tmp_path, "train-00000", with_mask=True)
    assert shard.mask(2, 1).tolist() == [0, 1, 1]


def test_empty_shard(tmp_path: Path) -> None:
    info = write(tmp_path, documents=[])
    assert (info.documents, info.tokens, info.max_token_id) == (0, 0, -1)
    assert len(ShardReader(tmp_path, "train-00000", with_mask=False)) == 0


def test_reads_megatrons_own_layout(tmp_path: Path) -> None:
    """uint16 tokens, and documents that are several sequences long."""
    (tmp_path / "m.bin").write_bytes(struct.pack("<6H", 1, 2, 3, 4, 5, 65_000))
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    index += struct.pack("<3i", 1, 2, 3) + struct.pack("<3q", 0, 2, 6) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "m.idx").write_bytes(index)
    shard = ShardReader(tmp_path, "m", with_mask=False)
    assert [shard.tokens(i).tolist() for i in range(len(shard))] == [[1, 2, 3], [4, 5, 65_000]]


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("bin", lambda b: b[:-4], "holds 7 tokens, its index 8"),
        ("bin", lambda b: b[:-1], "has 31 bytes, no multiple of 4"),
        ("bin", lambda b: b"", "holds 0 tokens, its index 8"),
        ("bin", None, r"no file .*train-00000\.bin"),
        ("idx", lambda b: b[:-8], "has 94 bytes, its header asks for 102"),
        ("idx", lambda b: b[:20], "is no token index"),
        ("idx", lambda b: b"", "is no token index"),
        ("idx", lambda b: b"X" + b[1:], "is no token index"),
        ("idx", lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "has version 2 and token type 4"),
        ("idx", lambda b: b[:17] + b"\x05" + b[18:], "has version 1 and token type 5"),
        ("idx", lambda b: b[:18] + struct.pack("<Q", 2**63) + b[26:], "its header asks for"),
        ("idx", lambda b: b[:34] + struct.pack("<i", 2) + b[38:], "do not follow each other"),
        ("idx", lambda b: b[:-8] + struct.pack("<q", 2**40), "do not follow each other"),
        ("mask.bin", lambda b: b[:-1], "holds 7 tokens, its index 8"),
        ("mask.bin", None, r"no file .*mask\.bin"),
    ],
)
def test_damaged_files(tmp_path: Path, suffix: str, change, message: str) -> None:
    write(tmp_path, masks=[[0, 1, 1], [1], [0, 0, 1, 1]])
    path = tmp_path / f"train-00000.{suffix}"
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        ShardReader(tmp_path, "train-00000", with_mask=True)


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Three documents of almost 2^31 tokens: 25.8 GB, of which only the last few tokens are on the disk."""
    longest = 2**31 - 2
    lengths = np.full(3, longest, dtype="<i4")
    pointers = np.arange(3, dtype="<i8") * longest * 4
    bounds = np.arange(4, dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 3, 4)
    (tmp_path / "s.idx").write_bytes(header + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())
    total = 3 * longest
    assert total > 2**32
    with open(tmp_path / "s.bin", "wb") as f:
        f.truncate(4 * total)
        f.seek(4 * (total - 3))
        f.write(np.array([7, 8, 9], dtype="<i4").tobytes())
        f.seek(4 * (2 * longest))
        f.write(np.array([5], dtype="<i4").tobytes())
    shard = ShardReader(tmp_path, "s", with_mask=False)
    assert shard.starts.tolist() == [0, longest, 2 * longest, total]
    assert shard.tokens(2, longest - 3).tolist() == [7, 8, 9] and shard.tokens(2, 0, 2).tolist() == [5, 0]
    rows = StreamRows(read_lengths(tmp_path, "s"), 2**20, seed=0)
    assert rows.rows_per_epoch == -(-total // 2**20)
    seen = sorted((s for n in range(rows.rows_per_epoch) for s in rows.row(n)), key=lambda s: (s.document, s.start))
    for document in range(3):
        pieces = [s for s in seen if s.document == document]
        ends = [s.start + s.length for s in pieces]
        assert [s.start for s in pieces] == [0, *ends[:-1]] and ends[-1] == longest


def test_a_document_too_long_for_the_format(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "s", with_mask=False)
    ids = np.broadcast_to(np.zeros(1, dtype=np.int32), (2**31,))  # takes no memory
    with pytest.raises(DataError, match="a document has 2,147,483,648 tokens, the format has room for 2,147,483,647"):
        writer.add(ids)
    writer.abandon()
