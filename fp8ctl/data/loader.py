"""Packed batches for one rank, straight from memory-mapped shards; the place in the data is one number."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8ctl.config.constants import IGNORE_INDEX
from fp8ctl.config.schema import BatchConfig, DataConfig
from fp8ctl.data.corpus import Corpus
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.packing import make_rows
from fp8ctl.errors import ConfigError, DataError


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: micro_batch_rows rows, one after another, T = rows * seq_len_tokens positions in all."""

    input_ids_T: torch.Tensor
    """int64; padding holds the end-of-text token (or 0)."""
    labels_T: torch.Tensor
    """int64, already shifted: position t holds token t + 1 of its own document, IGNORE_INDEX where nothing is trained."""
    position_ids_T: torch.Tensor
    """int64, from 0 in every segment."""
    cu_seqlens: torch.Tensor
    """int32: 0, the end of each segment, T. A segment is a document's piece within one row, or a row's padding."""
    max_seqlen: int
    """Longest segment in tokens."""
    num_trainable: int
    """Labels that are not IGNORE_INDEX."""
    num_tokens: int
    """Positions that are not padding."""
    row_ids: tuple[int, ...]
    """Global numbers of the rows; rows of pure padding have none."""

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on another device."""
        names = ("input_ids_T", "labels_T", "position_ids_T", "cu_seqlens")
        return dataclasses.replace(self, **{n: getattr(self, n).to(device, non_blocking=True) for n in names})


class Loader:
    """Gives each rank its share of every step.

    Step s holds the rows s * global_batch_rows and following; micro-batch m of rank r takes its rows from
    m * world_size * micro_batch_rows + r * micro_batch_rows. So neither the number of ranks nor a restart changes what a step
    holds.

    Raises:
        ConfigError: the batch does not divide, or conversations would be cut.
        DataError: no data set, an empty split, damaged shards, samples longer than a row.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        data: DataConfig,
        batch: BatchConfig,
        seed: int,
        rank: int,
        world_size: int,
        split: str = "train",
    ) -> None:
        assert 0 <= rank < world_size
        self.path = Path(path)
        self.split = split
        self.manifest = Manifest.read(self.path)
        self._batch = batch
        self._rank, self._world_size = rank, world_size
        self._next_row = 0
        self._identity = {
            "seed": seed,
            "fingerprint": self.manifest.fingerprint,
            "packing": data.packing,
            "seq_len_tokens": batch.seq_len_tokens,
        }
        rows_at_once = world_size * batch.micro_batch_rows
        if batch.global_batch_rows % rows_at_once:
            raise ConfigError(
                f"batch.global_batch_rows={batch.global_batch_rows} can't be shared by {world_size} ranks with "
                f"batch.micro_batch_rows={batch.micro_batch_rows}",
                f"use a multiple of {rows_at_once}, for example {-(-batch.global_batch_rows // rows_at_once) * rows_at_once}",
            )
        if self.manifest.kind == "sft" and data.packing == "stream":
            raise ConfigError(
                f"{self.path} holds conversations, and data.packing=stream would cut them at row ends",
                "set data.packing=best_fit",
            )
        self._corpus = Corpus(self.path, self.manifest, split)
        if data.packing == "best_fit":
            self._refuse_long_samples()
        self._rows = make_rows(data.packing, self._corpus.lengths, batch.seq_len_tokens, seed)

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold each document once."""
        return self._rows.rows_per_epoch

    def next_step(self) -> list[PackedBatch]:
        """This rank's micro-batches of the next optimizer step, for gradient accumulation."""
        first = self._next_row
        self._next_row += self._batch.global_batch_rows
        micro, world = self._batch.micro_batch_rows, self._world_size
        starts = range(first + self._rank * micro, first + self._batch.global_batch_rows, world * micro)
        return [self.batch_of_rows(range(start, start + micro)) for start in starts]

    def fixed_batches(self, num_rows: int) -> list[PackedBatch]:
        """This rank's share of the first `num_rows` rows of epoch 0 (fewer, where an epoch is shorter).

        Every rank gets equally many batches, filled up with padding, so that ranks stay together in collective operations.
        """
        num_rows = min(num_rows, self.rows_per_epoch)
        micro, world = self._batch.micro_batch_rows, self._world_size
        batches = []
        for first in range(0, num_rows, world * micro):
            start = first + self._rank * micro
            batches.append(self.batch_of_rows(range(start, max(start, min(start + micro, num_rows)))))
        return batches

    def batch_of_rows(self, numbers: range | tuple[int, ...]) -> PackedBatch:
        """A micro-batch of any rows, by their global numbers; missing rows are padding. It does not move the loader."""
        seq_len, rows = self._batch.seq_len_tokens, self._batch.micro_batch_rows
        assert len(numbers) <= rows
        filler = self.manifest.eos_id if self.manifest.eos_id is not None else 0
        ids = np.full(rows * seq_len, filler, dtype=np.int64)
        labels = np.full(rows * seq_len, IGNORE_INDEX, dtype=np.int64)
        positions = np.zeros(rows * seq_len, dtype=np.int64)
        ends, num_tokens = [0], 0
        for row in range(rows):
            at = row * seq_len
            for document, start, length in self._rows.row(numbers[row]) if row < len(numbers) else []:
                # one token of look-ahead gives the last position its label, unless the document ends there
                tokens = self._corpus.tokens(document, start, start + length + 1)
                targets = tokens[1:].astype(np.int64)
                if self._corpus.has_mask:
                    trained = self._corpus.mask(document, start, start + length + 1)[1:]
                    targets[trained == 0] = IGNORE_INDEX
                ids[at : at + length] = tokens[:length]
                labels[at : at + len(targets)] = targets
                positions[at : at + length] = np.arange(length)
                at += length
                num_tokens += length
                ends.append(at)
            row_end = (row + 1) * seq_len
            if at < row_end:
                positions[at:row_end] = np.arange(row_end - at)
                ends.append(row_end)
        return PackedBatch(
            input_ids_T=torch.from_numpy(ids),
            labels_T=torch.from_numpy(labels),
            position_ids_T=torch.from_numpy(positions),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32),
            max_seqlen=int(np.diff(ends).max()),
            num_trainable=int((labels != IGNORE_INDEX).sum()),
            num_tokens=num_tokens,
            row_ids=tuple(numbers),
        )

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is, and what must be the same when it goes on."""
        return {"next_row": self._next_row, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another loader was; ranks, micro-batch and global batch may be others than before.

        Raises:
            DataError: the order would be another one: other data, seed, row length or packing.
        """
        names = {
            "fingerprint": "data set",
            "seed": "seed",
            "seq_len_tokens": "batch.seq_len_tokens",
            "packing": "data.packing",
        }
        for key, name in names.items():
            if state.get(key) != self._identity[key]:
                raise DataError(
                    f"the checkpoint was reading with another {name}: {state.get(key)}, now {self._identity[key]}",
                    "resume with what the run began with, or start a new run from the checkpoint's weights",
                )
        self._next_row = int(state["next_row"])

    def describe(self) -> dict[str, Any]:
        """What a dry run shows; shares are of all positions of an epoch's rows."""
        positions = self.rows_per_epoch * self._batch.seq_len_tokens
        tokens = self.manifest.tokens(self.split)
        trained = sum(s.trained_tokens for s in self.manifest.splits[self.split])
        return {
            "split": self.split,
            "kind": self.manifest.kind,
            "packing": self._identity["packing"],
            "documents": len(self._corpus),
            "tokens": tokens,
            "trained_tokens": trained,
            "longest_document_tokens": int(self._corpus.lengths.max()),
            "rows_per_epoch": self.rows_per_epoch,
            "steps_per_epoch": self.rows_per_epoch / self._batch.global_batch_rows,
            "fill_share": tokens / positions,
            "trained_share": trained / tokens,
            "fingerprint": self.manifest.fingerprint,
        }

    def _refuse_long_samples(self) -> None:
        seq_len = self._batch.seq_len_tokens
        too_long = int((self._corpus.lengths > seq_len).sum())
        if too_long:
            longest = int(self._corpus.lengths.max())
            raise DataError(
                f"{too_long:,} of {len(self._corpus):,} samples in {self.path} are longer than a row of {seq_len:,} tokens; "
                f"the longest has {longest:,}",
                f"prepare the data with max_tokens={seq_len} (drops and counts them), or set "
                f"batch.seq_len_tokens={longest}",
            )
