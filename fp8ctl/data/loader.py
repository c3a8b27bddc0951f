"""Packed batches for one rank, straight from memory-mapped shards; the place in the data is one number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fp8ctl.config.constants import IGNORE_INDEX
from fp8ctl.config.schema import BatchConfig, DataConfig
from fp8ctl.data.corpus import Corpus
from fp8ctl.data.leftover import LeftoverRows, read_before, rows_read
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.mixing import make_mixture, source_paths, too_many_epochs
from fp8ctl.data.packing import Rows, Segment, make_rows, row_cost
from fp8ctl.data.prefetch import Ahead
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

    def pinned(self) -> PackedBatch:
        """The same batch in memory that a GPU can copy from without waiting."""
        return self._mapped(torch.Tensor.pin_memory)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on another device."""
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def _mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedBatch:
        return dataclasses.replace(
            self,
            input_ids_T=function(self.input_ids_T),
            labels_T=function(self.labels_T),
            position_ids_T=function(self.position_ids_T),
            cu_seqlens=function(self.cu_seqlens),
        )


class Source:
    """One data set of a run: its documents, and their rows through all epochs."""

    def __init__(self, path: str, data: DataConfig, batch: BatchConfig, seed: int, split: str) -> None:
        self.path = path
        self.rows: Rows
        self.manifest = Manifest.read(path)
        if self.manifest.kind == "sft" and data.packing == "stream":
            raise ConfigError(
                f"{path} holds conversations, and data.packing=stream would cut them at row ends",
                "set data.packing=best_fit",
            )
        self.corpus = Corpus(path, self.manifest, split)
        if data.packing == "best_fit":
            self._refuse_long_samples(batch.seq_len_tokens)
        before = read_before(data.after) if data.after else None
        read = rows_read(before).get(self.manifest.fingerprint) if before else None
        self.was_read = read is not None
        """Whether the run of `data.after` has it among its data sets."""
        if before and read:
            self.rows = LeftoverRows(
                self.corpus.lengths,
                batch.seq_len_tokens,
                seed,
                before_seq_len_tokens=before["seq_len_tokens"],
                before_seed=before["seed"],
                rows_read=read,
            )
        else:
            self.rows = make_rows(data.packing, self.corpus.lengths, batch.seq_len_tokens, seed)

    def _refuse_long_samples(self, seq_len: int) -> None:
        too_long = int((self.corpus.lengths > seq_len).sum())
        if too_long:
            longest = int(self.corpus.lengths.max())
            raise DataError(
                f"{too_long:,} of {len(self.corpus):,} samples in {self.path} are longer than a row of {seq_len:,} tokens; "
                f"the longest has {longest:,}",
                f"prepare the data with max_tokens={seq_len} (drops and counts them), or set "
                f"batch.seq_len_tokens={longest}",
            )


class Loader:
    """Gives each rank its share of every step.

    Step s holds the rows s * global_batch_rows and following, whatever the number of ranks and restarts. Within a step the rows
    are dealt out by the cost of their attention, so that no rank has to wait for another: the dearest first, in rounds of one
    row for each rank, in each round the dearest to the rank that has least.

    Raises:
        ConfigError: the batch does not divide, the mixture can't be, or conversations would be cut.
        DataError: no data set, an empty split, damaged shards, samples longer than a row.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        batch: BatchConfig,
        seed: int,
        rank: int,
        world_size: int,
        split: str = "train",
        pin_memory: bool = False,
    ) -> None:
        assert 0 <= rank < world_size
        self.split = split
        self._batch = batch
        self._rank, self._world_size = rank, world_size
        self._pin_memory = pin_memory
        self._next_row = 0
        rows_at_once = world_size * batch.micro_batch_rows
        if batch.global_batch_rows % rows_at_once:
            raise ConfigError(
                f"batch.global_batch_rows={batch.global_batch_rows} can't be shared by {world_size} ranks with "
                f"batch.micro_batch_rows={batch.micro_batch_rows}",
                f"use a multiple of {rows_at_once}, for example {-(-batch.global_batch_rows // rows_at_once) * rows_at_once}",
            )
        self.sources = [Source(path, data, batch, seed, split) for path in source_paths(data)]
        if data.after and not any(source.was_read for source in self.sources):
            raise DataError(
                "the run that data.after names read other data than this run",
                "name the data that it read, or leave data.after out",
            )
        self._after = data.after
        self.mixture = make_mixture(
            data,
            [s.path for s in self.sources],
            [s.rows.rows_per_epoch for s in self.sources],
            batch.global_batch_rows,
        )
        self._order = {"seed": seed, "packing": data.packing, "seq_len_tokens": batch.seq_len_tokens}
        self._ahead = Ahead(self._make_step, data.prefetch_steps)

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold each document of each source once."""
        return sum(source.rows.rows_per_epoch for source in self.sources)

    def next_step(self) -> list[PackedBatch]:
        """This rank's micro-batches of the next optimizer step, for gradient accumulation."""
        first = self._next_row
        self._next_row += self._batch.global_batch_rows
        return self._ahead.take(first, self._batch.global_batch_rows)

    def close(self) -> None:
        """Ends the thread that makes batches ahead."""
        self._ahead.close()

    def _make_step(self, first: int) -> list[PackedBatch]:
        mine = self._share_of(range(first, first + self._batch.global_batch_rows))
        micro = self._batch.micro_batch_rows
        batches = [self.batch_of_rows(tuple(mine[i : i + micro])) for i in range(0, len(mine), micro)]
        return [batch.pinned() for batch in batches] if self._pin_memory else batches

    def _share_of(self, numbers: range) -> list[int]:
        world = self._world_size
        if world == 1:
            return list(numbers)
        costs = {number: row_cost(self.segments(number)[1]) for number in numbers}
        dearest_first = sorted(numbers, key=lambda number: (-costs[number], number))
        shares: list[list[int]] = [[] for _ in range(world)]
        loads = [0] * world
        for start in range(0, len(numbers), world):
            least_first = sorted(range(world), key=lambda rank: (loads[rank], rank))
            for rank, number in zip(least_first, dearest_first[start : start + world], strict=True):
                shares[rank].append(number)
                loads[rank] += costs[number]
        return shares[self._rank]

    def segments(self, number: int) -> tuple[Source, list[Segment]]:
        """The source of a row, by its global number, and what stands in it."""
        place, local = self.mixture.locate(number)
        source = self.sources[place]
        return source, source.rows.row(local)

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
        eos_id = self.sources[0].manifest.eos_id
        filler = eos_id if eos_id is not None else 0
        ids = np.full(rows * seq_len, filler, dtype=np.int64)
        labels = np.full(rows * seq_len, IGNORE_INDEX, dtype=np.int64)
        positions = np.zeros(rows * seq_len, dtype=np.int64)
        ends, num_tokens = [0], 0
        for row in range(rows):
            at = row * seq_len
            source, segments = self.segments(numbers[row]) if row < len(numbers) else (self.sources[0], [])
            for document, start, length in segments:
                # one token of look-ahead gives the last position its label, unless the document ends there
                tokens = source.corpus.tokens(document, start, start + length + 1)
                targets = tokens[1:].astype(np.int64)
                if source.corpus.has_mask:
                    trained = source.corpus.mask(document, start, start + length + 1)[1:]
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
        return {"next_row": self._next_row, **self._order, "phases": self._phases()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where another loader was; ranks, micro-batch and later phases may be others than before.

        Raises:
            DataError: the order would be another one: other data, mixture, seed, row length or packing.
        """
        names = {"seed": "seed", "seq_len_tokens": "batch.seq_len_tokens", "packing": "data.packing"}
        for key, name in names.items():
            if state.get(key) != self._order[key]:
                raise DataError(
                    f"the checkpoint was reading with another {name}: {state.get(key)}, now {self._order[key]}",
                    "resume with what the run began with, or start a new run from the checkpoint's weights",
                )
        next_row = int(state["next_row"])
        # Checkpoints from before there were mixtures name their one data set
        read = state.get("phases") or [
            {"start_row": 0, "sources": [{"fingerprint": state["fingerprint"], "share": 1.0}]}
        ]
        self._refuse_another_past(read, next_row)
        self._next_row = next_row
        self._ahead.forget()

    def _phases(self) -> list[dict[str, Any]]:
        return [
            {
                "start_row": phase.start_row,
                "sources": [
                    {"fingerprint": source.manifest.fingerprint, "share": share}
                    for source, share in zip(self.sources, phase.shares, strict=True)
                    if share
                ],
            }
            for phase in self.mixture.phases
        ]

    def _refuse_another_past(self, read: list[dict[str, Any]], next_row: int) -> None:
        """What has been read must be what these settings would have read; what comes after `next_row` is free."""
        before = [p for p in read if p["start_row"] < next_row or p["start_row"] == 0]
        now = [p for p in self._phases() if p["start_row"] < next_row or p["start_row"] == 0]
        if before == now:
            return
        fingerprints = [[s["fingerprint"] for phase in phases for s in phase["sources"]] for phases in (before, now)]
        if len(before) == len(now) == 1 and len(fingerprints[0]) == len(fingerprints[1]) == 1:
            raise DataError(
                f"the checkpoint was reading with another data set: {fingerprints[0][0]}, now {fingerprints[1][0]}",
                "resume with what the run began with, or start a new run from the checkpoint's weights",
            )
        step = next_row // self._batch.global_batch_rows
        raise DataError(
            f"up to step {step} the checkpoint was reading another mixture than these settings say",
            f"leave data.phases as they were and add one with from_step={step} or later, see docs/data.md",
        )

    def shares(self) -> list[float]:
        """Share of each source in the phase that the loader is in."""
        return list(self.mixture.phases[self.mixture.phase_of(self._next_row)].shares)

    def describe(self, num_steps: int) -> dict[str, Any]:
        """What a dry run shows of the data; shares of fill and training are of all positions of an epoch's rows."""
        num_rows = num_steps * self._batch.global_batch_rows
        taken = self.mixture.counts(num_rows)
        tokens = sum(s.manifest.tokens(self.split) for s in self.sources)
        trained = sum(i.trained_tokens for s in self.sources for i in s.manifest.splits[self.split])
        positions = self.rows_per_epoch * self._batch.seq_len_tokens
        return {
            "split": self.split,
            "kind": self.sources[0].manifest.kind,
            "packing": self._order["packing"],
            "documents": sum(len(s.corpus) for s in self.sources),
            "tokens": tokens,
            "trained_tokens": trained,
            "longest_document_tokens": max(int(s.corpus.lengths.max()) for s in self.sources),
            "rows_per_epoch": self.rows_per_epoch,
            "steps_per_epoch": self.rows_per_epoch / self._batch.global_batch_rows,
            "fill_share": tokens / positions,
            "trained_share": trained / tokens,
            "fingerprint": ", ".join(s.manifest.fingerprint for s in self.sources),
            "sources": [
                {
                    "path": source.path,
                    "tokens": source.manifest.tokens(self.split),
                    "share": rows / num_rows,
                    "epochs": rows / source.rows.rows_per_epoch,
                    "tokens_left": source.rows.left_tokens if isinstance(source.rows, LeftoverRows) else None,
                }
                for source, rows in zip(self.sources, taken, strict=True)
            ],
        }

    def warnings(self, num_steps: int) -> Iterator[str]:
        """What the user should know about the mixture before the run begins."""
        for source, of in zip(self.sources, self.describe(num_steps)["sources"], strict=True):
            if (warning := too_many_epochs(source.path, of["epochs"])) is not None:
                yield warning
            if of["tokens"] < self._batch.seq_len_tokens:
                yield f"{source.path} has {of['tokens']:,} tokens, less than one row of {self._batch.seq_len_tokens:,}: the rest is padding"
            if self._after and not source.was_read:
                yield f"{source.path} was not read by the run that data.after names: it begins at its start"
            if not of["epochs"]:
                yield f"{source.path} is never read in {num_steps:,} steps: raise its weight"
