from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from fp8ctl.config.data_schema import DataPrepConfig, SourceConfig
from fp8ctl.data.inspect import decode_some, show_document, stats, verify
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.prepare import prepare
from fp8ctl.errors import DataError


@pytest.fixture
def sft(tmp_path: Path, tokenizer_folder: Path) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a" * (i + 1)}]}
        for i in range(9)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(
        DataPrepConfig(
            kind="sft",
            out=str(tmp_path / "sft"),
            tokenizer=str(tokenizer_folder),
            sources=(SourceConfig(kind="jsonl", paths=(str(tmp_path / "a.jsonl"),)),),
            validation_share=1e-9,
        )
    )
    return tmp_path / "sft"


def test_whole_data_set(sft: Path) -> None:
    seen: list[str] = []
    assert verify(sft, seen.append) == []
    assert seen == ["train-00000", "validation-00000"]


def test_one_flipped_bit_is_found(sft: Path) -> None:
    for name in ("train-00000.bin", "train-00000.idx", "train-00000.mask.bin", "validation-00000.bin"):
        good = (sft / name).read_bytes()
        (sft / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert verify(sft) == [f"{name} was changed: its hash is not the manifest's"]
        (sft / name).write_bytes(good[:-1])
        assert verify(sft) == [f"{name} has {len(good) - 1:,} bytes, the manifest says {len(good):,}"]
        (sft / name).unlink()
        assert verify(sft) == [f"{name} is missing"]
        (sft / name).write_bytes(good)
    assert verify(sft) == []


def rewrite(folder: Path, name: str, content: bytes) -> None:
    """Replaces a file and its hash, as a preparation that went wrong would have written them."""
    suffix = name.split(".", 1)[1]
    (folder / name).write_bytes(content)
    manifest = Manifest.read(folder)
    first, *others = manifest.splits["train"]
    changed = dataclasses.replace(
        first,
        hashes={**first.hashes, suffix: xxhash.xxh3_128_hexdigest(content)},
        sizes={**first.sizes, suffix: len(content)},
    )
    manifest.model_copy(update={"splits": {**manifest.splits, "train": [changed, *others]}}).write(folder)


def test_content_that_was_wrong_from_the_start(sft: Path) -> None:
    tokens = np.fromfile(sft / "train-00000.bin", dtype="<i4")
    mask = (sft / "train-00000.mask.bin").read_bytes()
    rewrite(sft, "train-00000.mask.bin", b"\x02" + mask[1:])
    assert verify(sft) == ["the mask of train-00000 holds values other than 0 and 1"]
    rewrite(sft, "train-00000.mask.bin", mask)
    for bad in (10**6, -1):
        tokens[3] = bad
        rewrite(sft, "train-00000.bin", tokens.tobytes())
        (problem,) = verify(sft)
        assert problem.startswith("train-00000 holds a token outside the vocabulary of ")
    index = (sft / "train-00000.idx").read_bytes()
    rewrite(sft, "train-00000.idx", b"X" + index[1:])
    assert "is no token index" in verify(sft)[0]


def test_stats(sft: Path) -> None:
    found = stats(sft)
    train, validation = found["splits"]["train"], found["splits"]["validation"]
    assert train["documents"] + validation["documents"] == 9 and validation["documents"] == 1
    assert train["length_percentiles"]["100"] >= train["length_percentiles"]["50"] >= train["length_percentiles"]["5"]
    assert train["mean_length"] == pytest.approx(train["tokens"] / 8)
    assert 0 < train["trained_tokens"] < train["tokens"]
    assert found["fingerprint"] == Manifest.read(sft).fingerprint
    json.dumps(found)


def test_document_with_its_trained_part(sft: Path, tokenizer_folder: Path) -> None:
    shown = show_document(sft, 2)
    (prompt, untrained), (answer, trained), (tail, _) = shown.pieces
    assert not untrained and trained
    assert prompt.startswith("<|im_start|>user\nq") and prompt.endswith("<|im_start|>assistant\n")
    assert set(answer.removesuffix("<|im_end|>")) == {"a"} and tail == "\n"
    assert show_document(sft, 2, tokenizer=tokenizer_folder) == shown
    assert show_document(sft, 0, split="validation").pieces[0][0].startswith("<|im_start|>user\nq")


def test_document_that_is_not_there(sft: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match="has no train document 8") as error:
        show_document(sft, 8)
    assert error.value.hint == "it has documents 0 to 7"
    with pytest.raises(DataError, match="has no train document -1"):
        show_document(sft, -1)
    (tmp_path / "tok").mkdir()
    raw = (tokenizer_folder / "tokenizer.json").read_text()
    (tmp_path / "tok" / "tokenizer.json").write_text(raw + "\n")
    with pytest.raises(DataError, match="is not the tokenizer that .* was prepared with"):
        show_document(sft, 0, tokenizer=tmp_path / "tok")


def test_some_documents_are_decoded(sft: Path, tokenizer_folder: Path) -> None:
    decoded = decode_some(sft)
    assert decoded is not None and len(decoded) == 3 and decoded == decode_some(sft)
    for document in decoded:
        whole = "".join(text for text, _ in show_document(sft, document.number, split=document.split).pieces)
        assert document.text and whole.startswith(document.text)
    every = decode_some(sft, count=99)
    assert every is not None
    assert [(d.split, d.number) for d in every] == [*(("train", i) for i in range(8)), ("validation", 0)]
    assert {d.number for d in decode_some(sft, seed=5) or ()} != {d.number for d in decoded}
    manifest = Manifest.read(sft)
    manifest.model_copy(update={"prepared": {**manifest.prepared, "tokenizer": "/nowhere"}}).write(sft)
    assert decode_some(sft) is None
    manifest.model_copy(update={"tokenizer_fingerprint": "other"}).write(sft)
    assert decode_some(sft) is None
