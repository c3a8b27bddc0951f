"""The results of `fp8ctl bench gemm` for people: tables, bars, notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fp8ctl.track.benchmark import Bar

QUANTIZER_SHARE = 80.0
"""Bar: least percentage of a copy's bandwidth that the two-direction quantiser of infir2 reaches."""
CPU_NOTE = (
    "Measured on a CPU, where FP8 is emulated: the times are real and say nothing about the speed of FP8 on a GPU."
)


def gemm_bars(result: dict[str, Any], case: str, reason: str) -> list[Bar]:
    """The quantiser's bar, for the largest activation; none on a CPU."""
    found = [r for r in result["rows"] if r["table"].startswith("quantisers") and r["precision"] == "infir2"]
    if not found or not result["is_gpu"]:
        return []
    largest = max(found, key=lambda r: r["k"])
    name = f"{case}: two-direction quantiser, {largest['m']} x {largest['k']}, of the bandwidth of a copy"
    why = reason or f"{largest['tb_s']:.2f} TB/s, a copy moves {largest['copy_tb_s']:.2f}"
    return [Bar(name, 100 * largest["share_of_copy"], QUANTIZER_SHARE, "%", "higher", why)]


def gemm_tables(result: dict[str, Any]) -> list[Table]:
    """Linears (all directions), sums of a block, quantisers."""
    return [_linears(result["rows"]), _blocks(result["rows"]), _quantizers(result)]


def gemm_notes(result: dict[str, Any]) -> list[str]:
    """What one must know to read the tables."""
    notes = [f"{name}: {reason}" for name, reason in result["backends"].items()]
    return notes if result["is_gpu"] else [CPU_NOTE, *notes]


def _linears(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="linears: TFLOP/s, and the ratio to BF16 with quantisation", box=None, pad_edge=False)
    table.add_column("linear")
    table.add_column("N x K")
    table.add_column("precision")
    for column in ("BF16", "fprop", "dgrad", "wgrad", "all", "all + quantise", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("pays")
    of = [r for r in rows if r["table"] == "linears"]
    for row in (r for r in of if r["direction"] == "all"):
        mine = {r["direction"]: r for r in of if (r["linear"], r["precision"]) == (row["linear"], row["precision"])}
        table.add_row(
            row["linear"],
            f"{row['n']} x {row['k']}",
            row["precision"],
            _tflops(row["bf16_tflops"]),
            *(_tflops(mine[d]["gemm_tflops"]) for d in ("fprop", "dgrad", "wgrad", "all")),
            _tflops(row["tflops"]),
            f"{row['ratio']:.2f}x",
            "yes" if row["pays"] else "no",
        )
    return table


def _blocks(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="all linears of a block, forward and backward", box=None, pad_edge=False)
    table.add_column("precision")
    for column in ("BF16 ms", "GEMMs ms", "quantise ms", "GEMMs only", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("does not pay for")
    for row in (r for r in rows if r["table"].startswith("one block")):
        table.add_row(
            row["precision"],
            f"{row['bf16_ms']:.3f}",
            f"{row['gemm_ms']:.3f}",
            f"{row['quantize_ms']:.3f}",
            f"{row['gemm_ratio']:.2f}x",
            f"{row['ratio']:.2f}x",
            row["linears_that_do_not"],
        )
    return table


def _quantizers(result: dict[str, Any]) -> Table:
    title = f"quantisers, both directions from one input; a copy moves {result['copy_tb_s']:.3g} TB/s"
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("precision")
    for column in ("M x K", "ms", "TB/s", "of a copy"):
        table.add_column(column, justify="right")
    for row in (r for r in result["rows"] if r["table"].startswith("quantisers")):
        table.add_row(
            row["precision"],
            f"{row['m']} x {row['k']}",
            f"{row['ms']:.4f}",
            f"{row['tb_s']:.3g}",
            f"{100 * row['share_of_copy']:.0f} %",
        )
    return table


def _tflops(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
