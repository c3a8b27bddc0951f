from __future__ import annotations

import collections
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fp8ctl.config.constants import IGNORE_INDEX
from fp8ctl.config.schema import BatchConfig, DataConfig, MixSource, PhaseConfig
from fp8ctl.data.leftover import read_before, rows_read
from fp8ctl.data.loader import Loader, PackedBatch
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.packing import row_cost
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
    values = {
        "packing": "stream",
        "seq_len": 16,
        "micro": 1,
        "rows": 8,
        "seed": 5,
        "split": "train",
        "prefetch": 0,
        **changes,
    }
    return Loader(
        DataConfig(path=str(path), packing=values["packing"], prefetch_steps=values["prefetch"]),
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
    assert len(labels) == data.describe(2)["trained_tokens"]


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
            steps.append(rows_of([b for rank in batches for b in rank], 32))
        assert [sorted(s) for s in steps] == [list(range(8 * i, 8 * i + 8)) for i in range(5)]
        contents.append(steps)
    assert all(c == contents[0] for c in contents)


def test_no_rank_waits_for_another(tmp_path: Path) -> None:
    """Rows of very different attention cost, dealt out: the dearest rank stays near the mean, the order given does not."""
    rng = np.random.default_rng(3)
    lengths = [int(n) for n in rng.choice([2, 5, 11, 30, 60], size=400, p=[0.4, 0.3, 0.15, 0.1, 0.05])]
    path = make_data(tmp_path / "d", [[7] * n for n in lengths], masks=[[1] * n for n in lengths])
    world, worst_dealt, worst_in_order = 4, [], []
    ranks = [loader(path, packing="best_fit", seq_len=64, rows=32, world=world, rank=r) for r in range(world)]
    for step in range(3):
        costs = np.array(
            [[row_cost(rank.segments(n)[1]) for b in rank.next_step() for n in b.row_ids] for rank in ranks]
        )
        in_order = np.array([row_cost(ranks[0].segments(n)[1]) for n in range(32 * step, 32 * step + 32)])
        worst_dealt.append(costs.sum(1).max() / costs.sum(1).mean())
        worst_in_order.append(in_order.reshape(-1, world).sum(0).max() / costs.sum(1).mean())
        # and those that run at the same time are alike, for ranks that wait for each other in every micro-batch
        assert costs.max(0).sum() < in_order.reshape(-1, world).max(1).sum()
    assert max(worst_dealt) < 1.08 < 1.15 < max(worst_in_order)


# ------------------------------------------------------------ mixtures


def mixed(data: DataConfig, *, rows: int = 8, seq_len: int = 16, seed: int = 5, **options: Any) -> Loader:
    batch = BatchConfig(seq_len_tokens=seq_len, global_batch_rows=rows)
    return Loader(data, batch=batch, seed=seed, **{"rank": 0, "world_size": 1, **options})


def mix(*sources: tuple[Path, float]) -> tuple[MixSource, ...]:
    return tuple(MixSource(path=str(path), weight=weight) for path, weight in sources)


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Data sets whose tokens tell where they come from: 100 to 199, 200 to 299, 300 to 399."""
    rng = np.random.default_rng(0)
    return [
        make_data(
            tmp_path / str(n),
            [rng.integers(100 * n, 100 * n + 100, rng.integers(5, 40)).tolist() for _ in range(30 * n)],
            validation=[[100 * n] * 20],
        )
        for n in (1, 2, 3)
    ]


def origin(batch: PackedBatch) -> list[int]:
    return [int(row[0]) // 100 for row in batch.input_ids_T.reshape(-1, 16)]


def test_a_mixture_keeps_its_shares_at_every_row(three: list[Path]) -> None:
    data = mixed(DataConfig(sources=mix((three[0], 5), (three[1], 3), (three[2], 2))))
    seen = np.zeros(4)
    for step in range(40):
        for batch in data.next_step():
            seen[origin(batch)[0]] += 1
            assert (np.abs(seen[1:] - seen.sum() * np.array([0.5, 0.3, 0.2])) < 1.5).all()
        assert data.mixture.counts(8 * (step + 1)) == seen[1:].tolist()


def test_each_source_of_a_mixture_is_read_as_if_it_were_alone(three: list[Path]) -> None:
    data = mixed(DataConfig(sources=mix((three[0], 1), (three[2], 3))))
    rows: dict[int, list[list[int]]] = {1: [], 3: []}
    for _ in range(30):
        for batch in data.next_step():
            rows[origin(batch)[0]].append(batch.input_ids_T.tolist())
    for number, path in ((1, three[0]), (3, three[2])):
        alone = mixed(DataConfig(path=str(path)))
        assert rows[number] == [alone.batch_of_rows((n,)).input_ids_T.tolist() for n in range(len(rows[number]))]


def phases(three: list[Path], decay_from: int = 5) -> DataConfig:
    return DataConfig(
        phases=(
            PhaseConfig(from_step=0, sources=mix((three[0], 1), (three[1], 1))),
            PhaseConfig(from_step=decay_from, sources=mix((three[1], 1), (three[2], 3))),
        )
    )


def test_a_source_goes_on_in_the_next_phase(three: list[Path]) -> None:
    data = mixed(phases(three))
    taken = [batch for _ in range(12) for batch in data.next_step()]
    assert {origin(b)[0] for b in taken[:40]} == {1, 2} and {origin(b)[0] for b in taken[40:]} == {2, 3}
    second = [b.input_ids_T.tolist() for b in taken if origin(b)[0] == 2]
    alone = mixed(DataConfig(path=str(three[1])))
    assert second == [alone.batch_of_rows((n,)).input_ids_T.tolist() for n in range(len(second))]


def test_a_phase_can_be_added_where_a_run_stands(three: list[Path]) -> None:
    stable = DataConfig(sources=mix((three[0], 2), (three[1], 2)))  # the same shares as weights 1 and 1
    first = mixed(stable)
    seen = [b.input_ids_T.tolist() for _ in range(5) for b in first.next_step()]
    state = first.state_dict()
    second = mixed(phases(three))
    second.load_state_dict(state)
    seen += [b.input_ids_T.tolist() for _ in range(4) for b in second.next_step()]
    third = mixed(phases(three))
    third.load_state_dict(second.state_dict())
    seen += [b.input_ids_T.tolist() for _ in range(3) for b in third.next_step()]
    straight = mixed(phases(three))
    assert seen == [b.input_ids_T.tolist() for _ in range(12) for b in straight.next_step()]
    for other in (DataConfig(sources=mix((three[0], 2), (three[1], 1))), phases(three, decay_from=4)):
        with pytest.raises(DataError) as error:
            mixed(other).load_state_dict(state)
        assert error.value.message == "up to step 5 the checkpoint was reading another mixture than these settings say"
        assert error.value.hint is not None and "from_step=5 or later" in error.value.hint


def test_epochs_instead_of_weights(three: list[Path]) -> None:
    sources = tuple(MixSource(path=str(p), epochs=e) for p, e in zip(three, (2.0, 1.0, 0.5), strict=True))
    data = mixed(DataConfig(sources=sources))
    sizes = [s.rows.rows_per_epoch for s in data.sources]
    total = 2 * sizes[0] + sizes[1] + 0.5 * sizes[2]
    found = [s["epochs"] for s in data.describe(round(total / 8))["sources"]]
    assert found == pytest.approx([2.0, 1.0, 0.5], abs=0.1)


def test_warnings_about_a_mixture(three: list[Path], tmp_path: Path) -> None:
    tiny = make_data(tmp_path / "tiny", [[2] * 9])
    data = mixed(DataConfig(sources=mix((three[0], 10), (three[1], 0.001), (tiny, 1))))
    steps = 5 * data.sources[0].rows.rows_per_epoch // 8
    told = list(data.warnings(steps))
    assert (
        told[0].startswith(f"{three[0]} is read 4.5 times; beyond 4 repetitions text teaches little")
        or "is read" in told[0]
    )
    assert f"{three[1]} is never read in {steps:,} steps: raise its weight" in told
    assert f"{tiny} has 9 tokens, less than one row of 16: the rest is padding" in told
    assert any(t.startswith(f"{tiny} is read ") for t in told)


def test_mixtures_that_can_not_be(three: list[Path]) -> None:
    with pytest.raises(ConfigError, match="stands twice in one mixture") as error:
        mixed(DataConfig(sources=mix((three[0], 1), (three[0], 2))))
    assert error.value.hint == "name it once, with the sum of the weights"
    both = (MixSource(path=str(three[0]), epochs=1.0), MixSource(path=str(three[1]), weight=2.0))
    with pytest.raises(ConfigError, match="weights for some sources and epochs for others"):
        mixed(DataConfig(sources=both))
    for weight in (0, -1, math.nan, math.inf):
        with pytest.raises(ValidationError):
            MixSource(path="x", weight=weight)


def test_a_checkpoint_from_before_mixtures(three: list[Path]) -> None:
    data = mixed(DataConfig(path=str(three[0])))
    old = {
        "next_row": 16,
        "seed": 5,
        "packing": "stream",
        "seq_len_tokens": 16,
        "fingerprint": Manifest.read(three[0]).fingerprint,
    }
    data.load_state_dict(old)
    expected = mixed(DataConfig(path=str(three[0])))
    expected.next_step(), expected.next_step()
    assert rows_of(data.next_step()) == rows_of(expected.next_step())
    with pytest.raises(DataError, match="reading with another data set"):
        mixed(DataConfig(path=str(three[1]))).load_state_dict(old)


# ------------------------------------------------------------ going on after another run


@pytest.mark.parametrize(("before", "after"), [(16, 64), (16, 16), (64, 16), (16, 24)])
@pytest.mark.parametrize("steps", [0, 1, 7, 30])
def test_another_row_length_reads_what_was_not_read(tmp_path: Path, before: int, after: int, steps: int) -> None:
    """Each token of the epoch once: with what the first run read, and then whole epochs."""
    texts = documents(60)
    path = make_data(tmp_path / "d", [[2 + i] * len(t) for i, t in enumerate(texts)])
    first = loader(path, seq_len=before, rows=2)
    read = [b for _ in range(steps) for b in first.next_step()]
    (tmp_path / "client_state.json").write_text(json.dumps({"loader": first.state_dict(), "step": steps}))
    data = DataConfig(path=str(path), after=str(tmp_path / "client_state.json"))
    second = mixed(data, rows=1, seq_len=after, seed=9)
    epochs = steps * 2 // first.rows_per_epoch
    whole = collections.Counter(t for i, text in enumerate(texts) for t in [2 + i] * len(text))
    seen: collections.Counter[int] = collections.Counter()
    for b in read:
        seen.update(b.input_ids_T[: b.num_tokens].tolist())
    rows = len(second.sources[0].rows._rows) if steps else 0  # type: ignore[attr-defined]
    for _ in range(rows + second.rows_per_epoch):
        (b,) = second.next_step()
        check(b)
        seen.update(b.input_ids_T[: b.num_tokens].tolist())
    second.close()
    expected = epochs + (2 if steps else 1)
    assert seen == collections.Counter({token: expected * number for token, number in whole.items()})


def test_a_mixture_goes_on_with_each_source(three: list[Path], tmp_path: Path) -> None:
    first = mixed(phases(three))
    for _ in range(7):
        first.next_step()
    (tmp_path / "s.json").write_text(json.dumps(first.state_dict()))
    taken = dict(zip((s.manifest.fingerprint for s in first.sources), first.mixture.counts(56), strict=True))
    assert rows_read(read_before(str(tmp_path / "s.json"))) == taken
    second = mixed(DataConfig(sources=mix((three[2], 1), (three[0], 1)), after=str(tmp_path / "s.json")), seq_len=32)
    for source in second.sources:
        left = source.rows.row(0)
        before = first.sources[[s.path for s in first.sources].index(source.path)]
        read = {
            (d, t)
            for n in range(taken[before.manifest.fingerprint])
            for d, at, k in before.rows.row(n)
            for t in range(at, at + k)
        }
        assert left and not any((d, t) in read for d, at, k in left for t in range(at, at + k))


def test_data_that_the_other_run_did_not_read(three: list[Path], tmp_path: Path) -> None:
    first = mixed(DataConfig(path=str(three[0])))
    first.next_step()
    (tmp_path / "s.json").write_text(json.dumps(first.state_dict()))
    after = str(tmp_path / "s.json")
    with pytest.raises(DataError, match="the run that data.after names read other data than this run"):
        mixed(DataConfig(path=str(three[1]), after=after))
    both = mixed(DataConfig(sources=mix((three[0], 1), (three[1], 1)), after=after))
    assert f"{three[1]} was not read by the run that data.after names: it begins at its start" in both.warnings(4)
    left = [s["tokens_left"] for s in both.describe(4)["sources"]]
    assert left == [Manifest.read(three[0]).tokens("train") - 8 * 16, None]


def test_what_is_no_record_of_reading(three: list[Path], tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("{}")
    for path, reason in (
        (tmp_path / "s.json", "it says nothing of what was read"),
        (tmp_path / "absent", "No such file"),
    ):
        with pytest.raises(DataError, match=f"is no checkpoint's record: .*{reason}"):
            mixed(DataConfig(path=str(three[0]), after=str(path)))


# ------------------------------------------------------------ making batches ahead


def test_batches_made_ahead_are_the_same(three: list[Path]) -> None:
    threads = set(threading.enumerate())
    plain, ahead = (mixed(phases(three).model_copy(update={"prefetch_steps": n})) for n in (0, 3))
    for _ in range(6):
        assert rows_of(ahead.next_step()) == rows_of(plain.next_step())
    state = ahead.state_dict()
    assert state == plain.state_dict(), "what was made ahead is not counted as read"
    ahead.next_step()
    ahead.load_state_dict(state)
    assert rows_of(ahead.next_step()) == rows_of(plain.next_step())
    ahead.close()
    assert set(threading.enumerate()) == threads


def test_damage_found_ahead_comes_up_in_its_step(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", documents(200), per_shard=200)
    data = loader(path, prefetch=2)
    data.next_step()
    np.memmap(path / "train-00000.bin", dtype="<i4", mode="r+")[:] = 999_999
    with pytest.raises(DataError, match="holds a token outside the vocabulary"):
        for _ in range(5):
            data.next_step()
    data.close()


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
    assert sum(b.num_tokens for b in whole.fixed_batches(10**6)) == whole.describe(2)["tokens"]


# ------------------------------------------------------------ description and refusals


def test_describe(tmp_path: Path) -> None:
    path = make_data(tmp_path / "d", [[2] * 20, [3] * 12, [4] * 8])
    seen = loader(path, seq_len=16, rows=2).describe(2)
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
