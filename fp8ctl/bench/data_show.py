"""The results of `fp8ctl bench data` for people: tables and bars."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from fp8ctl.track.benchmark import Bar

MEMORY_GIB = 1.5
FILL = 0.995
PACKING_S = 10.0
_BESIDE = (
    ("bare", 0.95, "encode_batch_fast alone"),
    ("datatrove", 1.2, "datatrove"),
    ("megatron", 1.5, "Megatron's way"),
)


def data_bars(rows: list[dict[str, Any]], reason: str) -> list[Bar]:
    """The bars that were measured; ratios are of medians, process by process."""
    rates = {
        (r["key"], r["processes"]): r["tokens_per_second_per_core"] for r in rows if "tokens_per_second_per_core" in r
    }
    bars = []
    for (arm, workers), rate in rates.items():
        if arm != "fp8ctl":
            continue
        of = "1 process" if workers == 1 else f"{workers} processes"
        for other, target, name in _BESIDE:
            base = rates.get((other, workers if other == "datatrove" else 1))
            if base is not None:
                bars.append(Bar(f"tokens/s per core, {of}, to {name}", rate / base, target, "x", "higher", reason))
    memory = {r["input"]: r["peak_gib_per_process"] for r in rows if r["table"] == "memory"}
    bars += [
        Bar(f"peak memory per process, {name}", v, MEMORY_GIB, "GiB", "lower", reason) for name, v in memory.items()
    ]
    sizes = [v for name, v in memory.items() if "document" not in name]
    if len(sizes) > 1:
        bars.append(Bar("peak memory, largest to smallest input", max(sizes) / min(sizes), 1.1, "x", "lower", reason))
    for row in (r for r in rows if r["table"] == "packing"):
        name = f"packing of {row['samples']:,} samples"
        bars.append(Bar(f"{name}, fill", row["fill"], FILL, "", "higher", reason))
        if row["samples"] >= 1_000_000:
            bars.append(Bar(name, row["seconds"], PACKING_S, "s", "lower", reason))
    return bars


def data_tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Speed, memory, packing."""
    speed = Table("arm", "processes", "tokens/s per core", "+-", "seconds", "peak GiB", title="speed", box=None)
    for r in (r for r in rows if r["table"] == "speed"):
        if "skipped" in r:
            speed.add_row(r["arm"], str(r["processes"]), f"skipped: {r['skipped']}")
            continue
        figures = (r["tokens_per_second_per_core"], r["half_quartile_distance"])
        speed.add_row(
            r["arm"],
            str(r["processes"]),
            *(f"{f:,.0f}" for f in figures),
            f"{r['seconds']:.1f}",
            f"{r['peak_gib']:.2f}",
        )
    columns = ("input", "file MiB", "processes", "tokens", "seconds", "peak GiB per process")
    memory = Table(*columns, title="memory", box=None)
    for r in (r for r in rows if r["table"] == "memory"):
        sizes = [r[key] for key in ("file_mib", "processes", "tokens", "seconds")]
        memory.add_row(r["input"], *(f"{size:,.0f}" for size in sizes), f"{r['peak_gib_per_process']:.2f}")
    packing = Table("samples", "mean length", "packs", "fill", "seconds", title="packing into rows of 32,768", box=None)
    for r in (r for r in rows if r["table"] == "packing"):
        packing.add_row(
            f"{r['samples']:,}",
            f"{r['mean_length']:,.0f}",
            f"{r['packs']:,}",
            f"{r['fill']:.3%}",
            f"{r['seconds']:.2f}",
        )
    return [table for table in (speed, memory, packing) if table.row_count]
