from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8ctl.config.constants import IGNORE_INDEX
from fp8ctl.config.schema import BatchConfig, DataConfig
from fp8ctl.data.loader import Loader, PackedBatch
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.shards import ShardWriter
from fp8ctl.errors import ConfigError, DataError

X = IGNORE_INDEX


def make_data(
    folder: Path,
    train: list[list[int]],
    *,
    masks: list[list[int]] | None = None,
    validation: list[list[int]] | None = None,
    per_shard: int = 7,
) -> Path:
    folder.mkdir(exist_ok=True)
    splits = {}
    for split, documents in (("train", train), ("validation", validation or [])):
        splits[split] = []
        for first in range(0, len(documents), per_shard):
            writer = ShardWriter(folder, f"{split}-{first:05d}", with_mask=masks is not None)
            for i, ids in enumerate(documents[first : first + per_shard], start=first):
                mask = None if masks is None else np.array(masks[i], dtype=np.uint8)
                writer.add(np.array(ids, dtype=np.int32), mask)
            splits[split].append(writer.close())
    Manifest(
        kind="cpt" if masks is None else "sft",
        tokenizer_fingerprint="t",
        vocab_size=1000,
        max_token_id=max((s.max_token_id for shards in splits.values() for s in shards), default=-1),
        eos_id=1,
        splits=splits,
        counters={},
        prepared={},
        fp8ctl_version="test",
    ).write(folder)
    return folder


def documents(num: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 900, rng.integers(1, 30)).tolist() for _ in range(num)]


def loader(path: Path, *, rank: int = 0, world: int = 1, **changes: Any) -> Loader:
    values = {"packing": "stream", "seq_len": 16, "micro": 1, "rows": 8, "seed": 5, "split": "train", **changes}
    return Loader(
        path,
        data=DataConfig(path=str(path), packing=values["packing"]),
        batch=BatchConfig(
            seq_len_tokens=values["seq_len"], micro_batch_rows=values["micro"], global_batch_rows=values["rows"]
        ),
        seed=values["seed"],
        rank=rank,
        world_size=world,
        split=values["split"],
    )


def rows_of(batches: list[PackedBatch], seq_len: int = 16) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """Row number -> (ids, labels, positions)."""
    out = {}
    for batch in batches:
        for i, number in enumerate(batch.row_ids):
            part = slice(i * seq_len, (i + 1) * seq_len)
            out[number] = tuple(t[part].tolist() for t in (batch.input_ids_T, batch.labels_T, batch.position_ids_T))
    return out


def check(batch: PackedBatch) -> None:
    total = len(batch.input_ids_T)
    assert batch.cu_seqlens.dtype == torch.int32 and batch.input_ids_T.dtype == batch.labels_T.dtype == torch.int64
    assert batch.cu_seqlens[0] == 0 and batch.cu_seqlens[-1] == total
    sizes = np.diff(batch.cu_seqlens.numpy())
    assert (sizes > 0).all() and sizes.max() == batch.max_seqlen
    assert batch.position_ids_T.tolist() == [p for n in sizes for p in range(n)]
    assert batch.num_trainable == (batch.labels_T != X).sum()


# ------------------------------------------------------------ content of a batch


def test_stream_batch_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8ctl.data.packing.permutation", lambda size, *_: np.arange(size))
    path = make_data(tmp_path / "d", [[10, 11, 12], [20, 21, 22, 23, 24, 25], [30, 31]])
    (batch,) = loader(path, seq_len=4, micro=3, rows=3).next_step()
    assert batch.input_ids_T.tolist() == [10, 11, 12, 20, 21, 22, 23, 24, 25, 30, 31, 1]
    # the label of a row's last position is the next token of its document, which stands in the next row
    assert batch.labels_T.tolist() == [11, 12, X, 21, 22, 23, 24, 25, X, 31, X, X]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 0, 1, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8, 9, 11, 12]
    assert (batch.max_seqlen, batch.num_trainable, batch.num_tokens, batch.row_ids) == (4, 8, 11, (0, 1, 2))


def test_best_fit_batch_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8ctl.data.packing.permutation", lambda size, *_: np.arange(size))
    path = make_data(
        tmp_path / "d",
        [[10, 11, 12, 13], [20, 21, 22], [30, 31]],
        masks=[[0, 0, 1, 1], [0, 1, 0], [1, 1]],
    )
    (batch,) = loader(path, packing="best_fit", seq_len=6, micro=2, rows=2).next_step()
    assert batch.input_ids_T.tolist() == [10, 11, 12, 13, 30, 31, 20, 21, 22, 1, 1, 1]
    assert batch.labels_T.tolist() == [X, 12, 13, X, 31, X, 21, X, X, X, X, X]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 9, 12]
    assert (batch.max_seqlen, batch.num_trainable, batch.num_tokens) == (4, 4, 9)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_every_token_is_trained_once_an_epoch(tmp_path: Path, packing: str) -> None:
    texts = documents()
    path = make_data(tmp_path / "d", texts)
    data = loader(path, packing=packing, seq_len=32, rows=1)
    pairs, tokens = [], 0
    for _ in range(data.rows_per_epoch):
        (batch,) = data.next_step()
        check(batch)
        keep = batch.labels_T != X
        pairs += zip(batch.input_ids_T[keep].tolist(), batch.labels_T[keep].tolist(), strict=True)
        tokens += batch.num_tokens
    assert tokens == sum(map(len, texts))
    assert sorted(pairs) == sorted(p for t in texts for p in zip(t[:-1], t[1:], strict=True))


def test_sft_data_trains_only_what_the_mask_says(tmp_path: Path) -> None:
    texts = documents()
    masks = [[(token + i) % 2 for i, token in enumerate(t)] for t in texts]
    path = make_data(tmp_path / "d", texts, masks=masks)
    data = loader(path, packing="best_fit", seq_len=32, rows=1)
    labels = []
    for _ in range(data.rows_per_epoch):
        (batch,) = data.next_step()
        check(batch)
        labels += batch.labels_T[batch.labels_T != X].tolist()
    assert sorted(labels) == sorted(
        t for ids, mask in zip(texts, masks, strict=True) for t, m in zip(ids[1:], mask[1:], strict=True) if m
    )
    assert len(labels) == data.describe()["trained_tokens"]


# ------------------------------------------------------------ ranks, steps, resume


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_world_size_does_not_change_a_step(tmp_path: Path, packing: str) -> None:
    path = make_data(tmp_path / "d", documents(20))
    contents = []
    for world, micro in ((1, 1), (1, 4), (2, 2), (4, 1), (4, 2), (8, 1)):
        ranks = [loader(path, packing=packing, seq_len=32, micro=micro, rank=r, world=world) for r in range(world)]
        steps = []
        for _ in range(5):  # passes the end of an epoch
            batches = [rank.next_step() for rank in ranks]
            assert {len(b) for b in batches} == {8 // (world * micro)}
            for m in range(len(batches[0])):  # micro-batch m of all ranks holds neighbouring rows
                numbers = [n for b in batches for n in b[m].row_ids]
                assert numbers == list(range(numbers[0], numbers[0] + world * micro))
            steps.append(rows_of([b for rank in batches for b in rank], 32))
        assert [sorted(s) for s in steps] == [list(range(8 * i, 8 * i + 8)) for i in range(5)]
        contents.append(steps)
    assert all(c == contents[0] for c in contents)


def test_resume_twice_and_on_other_ranks(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", documents())
    straight = loader(path)
    expected = [rows_of(straight.next_step()) for _ in range(12)]

    first = loader(path)
    seen = [rows_of(first.next_step()) for _ in range(3)]
    second = loader(path, micro=2)
    second.load_state_dict(first.state_dict())
    seen += [rows_of(second.next_step()) for _ in range(4)]
    ranks = [loader(path, rank=r, world=2) for r in range(2)]
    for rank in ranks:
        rank.load_state_dict(second.state_dict())
    seen += [rows_of(ranks[0].next_step() + ranks[1].next_step()) for _ in range(5)]
    assert seen == expected
    assert ranks[0].state_dict() == ranks[1].state_dict() == straight.state_dict()


def test_batch_of_rows_gives_any_batch_again(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", documents())
    data = loader(path, micro=4)
    batch = [data.next_step() for _ in range(3)][2][1]
    state = data.state_dict()
    again = data.batch_of_rows(batch.row_ids)
    assert torch.equal(again.input_ids_T, batch.input_ids_T) and torch.equal(again.labels_T, batch.labels_T)
    assert data.state_dict() == state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 6}, "another seed: 5, now 6"),
        ({"seq_len": 32}, "another batch.seq_len_tokens: 16, now 32"),
        ({"packing": "best_fit", "seq_len": 32}, "another batch.seq_len_tokens"),
    ],
)
def test_resume_refuses_another_order(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = make_data(tmp_path / "d", documents())
    with pytest.raises(DataError, match=message) as error:
        loader(path, **changes).load_state_dict(loader(path).state_dict())
    assert error.value.hint is not None and "resume with what the run began with" in error.value.hint


def test_resume_refuses_other_data(tmp_path: Path) -> None:
    state = loader(make_data(tmp_path / "d", documents())).state_dict()
    other = loader(make_data(tmp_path / "e", documents(seed=1)))
    with pytest.raises(DataError, match="another data set"):
        other.load_state_dict(state)


# ------------------------------------------------------------ validation


def test_fixed_batches_are_the_same_rows_for_any_ranks(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", documents(3), validation=documents(25, seed=3))
    contents = []
    for world, micro in ((1, 1), (2, 2), (4, 1), (8, 1)):
        ranks = [
            loader(path, split="validation", world=world, rank=r, micro=micro).fixed_batches(11) for r in range(world)
        ]
        assert {len(r) for r in ranks} == {-(-11 // (world * micro))}, "every rank runs equally often"
        for batch in (b for rank in ranks for b in rank):
            check(batch)
            assert batch.input_ids_T.numel() == micro * 16
        contents.append(rows_of([b for rank in ranks for b in rank]))
    assert all(c == contents[0] for c in contents)
    assert sorted(contents[0]) == list(range(11))
    whole = loader(path, split="validation")
    assert sum(b.num_tokens for b in whole.fixed_batches(10**6)) == whole.describe()["tokens"]


# ------------------------------------------------------------ description and refusals


def test_describe(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", [[2] * 20, [3] * 12, [4] * 8])
    seen = loader(path, seq_len=16, rows=2).describe()
    assert seen["tokens"] == 40 and seen["documents"] == 3 and seen["longest_document_tokens"] == 20
    assert seen["rows_per_epoch"] == 3 and seen["steps_per_epoch"] == 1.5
    assert seen["fill_share"] == pytest.approx(40 / 48) and seen["trained_share"] == pytest.approx(37 / 40)


def test_batch_that_does_not_divide(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", documents())
    with pytest.raises(
        ConfigError, match="global_batch_rows=8 can't be shared by 3 ranks with batch.micro_batch_rows=2"
    ) as e:
        loader(path, micro=2, world=3)
    assert e.value.hint == "use a multiple of 6, for example 12"


def test_samples_longer_than_a_row(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", [[2] * 20, [3] * 40, [4] * 8], masks=[[1] * 20, [1] * 40, [1] * 8])
    with pytest.raises(
        DataError, match="2 of 3 samples in .* are longer than a row of 16 tokens; the longest has 40"
    ) as e:
        loader(path, packing="best_fit")
    assert e.value.hint is not None and "max_tokens=16" in e.value.hint and "batch.seq_len_tokens=40" in e.value.hint


def test_conversations_are_never_cut(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", [[2, 3]], masks=[[0, 1]])
    with pytest.raises(ConfigError, match="holds conversations, and data.packing=stream would cut them") as error:
        loader(path)
    assert error.value.hint == "set data.packing=best_fit"


def test_missing_splits(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", documents(3))
    with pytest.raises(DataError, match="has no validation split") as error:
        loader(path, split="validation")
    assert error.value.hint == "prepare it with validation_share above 0"
    with pytest.raises(DataError, match="has no train split"):
        loader(make_data(tmp_path / "e", []))
    with pytest.raises(DataError, match="no data set in"):
        loader(tmp_path / "absent")


def test_damaged_shards(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", [[2, 3, 4, 5]])
    shard = path / "train-00000.bin"
    shard.write_bytes(np.array([2, 3, 999_999, 5], dtype="<i4").tobytes())
    with pytest.raises(
        DataError, match="train-00000 in .* holds a token outside the vocabulary in document 0"
    ) as error:
        loader(path, rows=1).next_step()
    assert error.value.hint is not None and "fp8ctl data verify" in error.value.hint
    make_data(tmp_path / "other", [[2, 3, 4]])
    for suffix in ("bin", "idx"):
        (path / f"train-00000.{suffix}").write_bytes((tmp_path / "other" / f"train-00000.{suffix}").read_bytes())
    with pytest.raises(DataError, match="holds 1 documents and 3 tokens, the manifest says 1 and 4"):
        loader(path)


def test_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds token 1,000, its tokenizer has 1,000"):
        loader(make_data(tmp_path / "d", [[2, 1000, 3]]))


def test_to_moves_every_tensor(tmp_path: Path) -> None:
    (batch, *_) = loader(make_data(tmp_path / "d", documents())).next_step()
    moved = batch.to("meta")
    for name in ("input_ids_T", "labels_T", "position_ids_T", "cu_seqlens"):
        assert getattr(moved, name).device.type == "meta"
    assert moved.row_ids == batch.row_ids
