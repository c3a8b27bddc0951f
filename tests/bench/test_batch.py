"""Random batches are what training sees."""

from __future__ import annotations

import torch
from bench_cases import step_config

from fp8ctl.bench.batch import make_batch
from fp8ctl.config.constants import IGNORE_INDEX

CPU = torch.device("cpu")


def test_a_row_is_one_document() -> None:
    batch = make_batch(step_config(), 199, CPU)
    assert batch.cu_seqlens.tolist() == [0, 64, 128]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.position_ids_T.tolist() == [*range(64), *range(64)]
    assert (batch.num_tokens, batch.max_seqlen, batch.num_labels) == (128, 64, 126)
    assert batch.input_ids_T.min() >= 0 and batch.input_ids_T.max() < 199
    assert batch.labels_T[:63].tolist() == batch.input_ids_T[1:64].tolist()
    assert (batch.labels_T == IGNORE_INDEX).nonzero().flatten().tolist() == [63, 127]


def test_packed_documents_end_with_their_row() -> None:
    config = step_config(documents="packed", seq_len_tokens=4096, rows=3)
    batch = make_batch(config, 199, CPU)
    bounds = batch.cu_seqlens.tolist()
    assert {4096, 8192, 12288} < set(bounds) and bounds == sorted(set(bounds))
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert max(lengths) == batch.max_seqlen < 4096 and len(lengths) > 6
    assert batch.position_ids_T.tolist() == [i for n in lengths for i in range(n)]
    assert int((batch.labels_T != IGNORE_INDEX).sum()) == batch.num_labels


def test_the_seed_decides() -> None:
    same, other = make_batch(step_config(), 199, CPU), make_batch(step_config(seed=2), 199, CPU)
    assert torch.equal(make_batch(step_config(), 199, CPU).input_ids_T, same.input_ids_T)
    assert not torch.equal(other.input_ids_T, same.input_ids_T)
