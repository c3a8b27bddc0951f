"""What a preparation would make of conversations, without writing anything: what is dropped and why, lengths, packs, one sample."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from fp8ctl.config.data_schema import DataPrepConfig
from fp8ctl.data.encode import encoder_for
from fp8ctl.data.inspect import pieces_of
from fp8ctl.data.packing import make_rows
from fp8ctl.data.prep_task import Counts
from fp8ctl.data.rows import BadRow, Row, Sample
from fp8ctl.data.sources import iter_rows

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

PERCENTILES = (5, 25, 50, 75, 95, 99, 100)
_MOST_REASONS = 10
_SHOWN_CHARS = 1000


@dataclass
class BadRows:
    """Rows that are bad for one reason."""

    rows: int
    first: str
    """File and line of the first of them."""


@dataclass
class SftReport:
    """What was found."""

    seq_len_tokens: int
    counts: Counts = field(default_factory=Counts)
    bad: dict[str, BadRows] = field(default_factory=dict)
    """By reason, numbers in it left out."""
    trained_tokens: int = 0
    percentiles: dict[int, int] = field(default_factory=dict)
    """Lengths of samples in tokens."""
    longer_than_a_row: int = 0
    """Samples that fit into no row of seq_len_tokens."""
    packs: int = 0
    """Rows that hold every sample once."""
    fill_share: float = 0.0
    """Of the positions of these rows."""
    sample: list[tuple[str, bool]] = field(default_factory=list)
    """The first sample as text, cut where training begins and ends."""


def inspect_conversations(config: DataPrepConfig, seq_len_tokens: int, max_rows: int | None = None) -> SftReport:
    """Encodes the conversations of all sources, in this process, and counts.

    Args:
        seq_len_tokens: length of the rows that samples would be packed into.
        max_rows: rows to read at most; default: all.

    Raises:
        DataError: files, tokenizer or template that can't be used, or `over_length=error` and a conversation is too long.
    """
    encoder, report = encoder_for(config), SftReport(seq_len_tokens)
    lengths = []
    for row in islice(_rows(config), max_rows):
        (result,) = encoder.encode([row])
        report.counts.see(result)
        if isinstance(result, BadRow):
            reason = re.sub(r"\d[\d,.]*", "N", result.reason)
            seen = report.bad.setdefault(reason, BadRows(0, f"{result.origin.file} line {result.origin.line}"))
            seen.rows += 1
        for sample in result if isinstance(result, list) else ():
            lengths.append(len(sample.ids))
            report.trained_tokens += int(_mask(sample).sum())
            if not report.sample:
                report.sample = pieces_of(sample.ids, _mask(sample), encoder.tokenizer)
    if lengths:
        _measure(report, np.array(lengths, dtype=np.int64))
    return report


def _rows(config: DataPrepConfig) -> Iterator[Row]:
    for source in config.sources:
        yield from iter_rows(source, config.kind)


def _mask(sample: Sample) -> np.ndarray:
    assert sample.mask is not None, "samples of conversations have one"
    return sample.mask


def _measure(report: SftReport, lengths: np.ndarray) -> None:
    report.percentiles = length_percentiles(lengths)
    fitting = lengths[lengths <= report.seq_len_tokens]
    report.longer_than_a_row = len(lengths) - len(fitting)
    if len(fitting):
        report.packs = make_rows("best_fit", fitting, report.seq_len_tokens, seed=0).rows_per_epoch
        report.fill_share = float(fitting.sum()) / (report.packs * report.seq_len_tokens)


def length_percentiles(lengths: np.ndarray) -> dict[int, int]:
    """Lengths in tokens below which so many percent of the samples are."""
    return {p: int(np.percentile(lengths, p, method="lower")) for p in PERCENTILES}


# ------------------------------------------------------------ shown


def render(report: SftReport) -> RenderableType:
    """The report for a terminal."""
    from rich.console import Group

    table = _table()
    counts = report.counts
    table.add_row("rows", f"{counts.rows:,} in, {counts.kept:,} kept as {counts.documents:,} samples")
    add_outcomes(table, vars(counts), counts.tokens)
    for reason, bad in sorted(report.bad.items(), key=lambda item: -item[1].rows)[:_MOST_REASONS]:
        table.add_row("bad", f"{bad.rows:,}: {reason} (the first: {bad.first})")
    if len(report.bad) > _MOST_REASONS:
        table.add_row("bad", f"{len(report.bad) - _MOST_REASONS:,} more reasons")
    if not report.percentiles:
        table.add_row("samples", "none")
        return table
    add_lengths(table, report.percentiles)
    table.add_row(
        "trained",
        f"{report.trained_tokens:,} of {counts.tokens:,} tokens ({report.trained_tokens / counts.tokens:.1%})",
    )
    table.add_row(
        "packs", f"{report.packs:,} rows of {report.seq_len_tokens:,} tokens an epoch, {report.fill_share:.2%} full"
    )
    if report.longer_than_a_row:
        table.add_row(
            "warning",
            f"{report.longer_than_a_row:,} samples are longer than a row: set max_tokens={report.seq_len_tokens}",
        )
    return Group(
        table, "", "the first sample, what is trained in green between >>> and <<<:", marked_text(report.sample)
    )


def _table() -> Table:
    from rich.table import Table

    return Table(show_header=False, box=None, pad_edge=False)


def add_outcomes(table: Table, counters: dict, kept_tokens: int) -> None:
    """A line for each way in which rows or tokens got lost or were changed.

    Args:
        counters: dropped, dropped_tokens, notes and bad, as a manifest has them.
    """
    lost = counters.get("dropped_tokens", {})
    all_tokens = max(1, kept_tokens + sum(lost.values()))

    def tokens(reason: str) -> str:
        return f", {lost[reason]:,} tokens ({lost[reason] / all_tokens:.1%})" if reason in lost else ""

    for reason, rows in counters.get("dropped", {}).items():
        table.add_row("dropped", f"{rows:,} rows: {reason}{tokens(reason)}")
    for note, samples in counters.get("notes", {}).items():
        table.add_row("changed", f"{samples:,} samples: {note}{tokens(note) and tokens(note) + ' cut off'}")
    if bad := counters.get("bad"):
        table.add_row("bad", f"{bad:,} rows in quarantine")


def add_lengths(table: Table, percentiles: dict[int, int]) -> None:
    """A line with the lengths of samples."""
    table.add_row("lengths", ", ".join(f"p{p} {length:,}" for p, length in percentiles.items()) + " tokens")


def marked_text(pieces: list[tuple[str, bool]], most_chars: int = _SHOWN_CHARS) -> Text:
    """Decoded text with what is trained in green, and between >>> and <<< for where there is no colour.

    Args:
        most_chars: of a longer piece only the beginning and the end are shown, since that is where masks go wrong.
    """
    from rich.text import Text

    text = Text()
    for piece, trained in pieces:
        shown, half = piece, most_chars // 2
        if len(piece) > most_chars:
            shown = f"{piece[:half]}\n[... {len(piece) - 2 * half:,} characters ...]\n{piece[-half:]}"
        text.append(f">>>{shown}<<<" if trained else shown, style="green" if trained else "")
    return text
