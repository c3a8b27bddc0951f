"""Shards of Megatron's own writer in, ours into Megatron's own reader."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8ctl.config.schema import BatchConfig, DataConfig
from fp8ctl.data.adopt import adopt
from fp8ctl.data.corpus import Corpus
from fp8ctl.data.inspect import verify
from fp8ctl.data.loader import Loader
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.shards import ShardWriter
from fp8ctl.errors import DataError


@pytest.fixture(scope="module")
def megatron() -> Any:
    """Megatron's module of indexed data sets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


def texts(num: int, largest: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, largest, rng.integers(1, 50)).tolist() for _ in range(num)]


def write(megatron: Any, prefix: Path, documents: list[list[list[int]]], dtype: type) -> None:
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sentences in documents:
        for sentence in sentences:
            builder.add_item(torch.tensor(sentence, dtype=torch.int32))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_what_megatron_writes_is_read(megatron: Any, tmp_path: Path, tokenizer_folder: Path, dtype: type) -> None:
    sentences = texts(60, 300)
    documents = [sentences[i : i + 1 + i % 3] for i in range(0, 57, 3)]
    write(megatron, tmp_path / "a", documents[:12], dtype)
    write(megatron, tmp_path / "b", documents[12:], dtype)
    manifest = adopt([tmp_path / "a.bin", tmp_path / "b"], tmp_path / "out", tokenizer_folder)
    assert manifest == tmp_path / "out" / "manifest.json" and verify(tmp_path / "out") == []
    corpus = Corpus(tmp_path / "out", Manifest.read(tmp_path / "out"), "train")
    expected = [[token for sentence in d for token in sentence] for d in documents]
    assert [corpus.tokens(i).tolist() for i in range(len(corpus))] == expected
    loader = Loader(
        DataConfig(path=str(tmp_path / "out")),
        batch=BatchConfig(seq_len_tokens=32, global_batch_rows=1),
        seed=1,
        rank=0,
        world_size=1,
    )
    read = [
        t
        for _ in range(loader.rows_per_epoch)
        for b in loader.next_step()
        for t in b.input_ids_T[: b.num_tokens].tolist()
    ]
    loader.close()
    assert sorted(read) == sorted(t for d in expected for t in d)


def test_what_is_written_here_megatron_reads(megatron: Any, tmp_path: Path) -> None:
    documents = texts(40, 50_000)
    writer = ShardWriter(tmp_path, "train-00000", with_mask=False)
    for ids in documents:
        writer.add(np.array(ids, dtype=np.int32))
    writer.close()
    theirs = megatron.IndexedDataset(str(tmp_path / "train-00000"))
    assert len(theirs) == len(documents)
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
    assert theirs.document_indices.tolist() == list(range(len(documents) + 1))


def test_refusals(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match=r"no file .*a\.idx"):
        adopt([tmp_path / "a"], tmp_path / "out", tokenizer_folder)
    writer = ShardWriter(tmp_path, "a", with_mask=False)
    writer.add(np.array([5, 400_000], dtype=np.int32))
    writer.close()
    with pytest.raises(DataError, match=r"hold token 400,000, the tokenizer in .* has 373") as error:
        adopt([tmp_path / "a"], tmp_path / "out", tokenizer_folder)
    assert error.value.hint == "give the folder of the tokenizer that they were made with"
    good = ShardWriter(tmp_path, "b", with_mask=False)
    good.add(np.array([5, 6, 7], dtype=np.int32))
    good.close()
    for twice in (
        {"prefixes": [tmp_path / "b", tmp_path / "b.bin"]},
        {"prefixes": [tmp_path / "b"], "validation": [tmp_path / "b"]},
    ):
        with pytest.raises(DataError, match="b is named twice") as error:
            adopt(out=tmp_path / "out", tokenizer=tokenizer_folder, **twice)  # type: ignore[arg-type]
        assert error.value.hint == "name each shard once, for training or for validation"
    other = ShardWriter(tmp_path, "c", with_mask=False)
    other.add(np.array([8, 9], dtype=np.int32))
    other.close()
    adopt([tmp_path / "b"], tmp_path / "out", tokenizer_folder, validation=[tmp_path / "c"])
    assert Manifest.read(tmp_path / "out").has_split("validation")
    with pytest.raises(DataError, match="holds a data set already"):
        adopt([tmp_path / "b"], tmp_path / "out", tokenizer_folder)
