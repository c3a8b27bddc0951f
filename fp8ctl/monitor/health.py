"""From rows of layers.parquet to a picture: how well each tensor survives FP8, by block, linear and role."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from fp8ctl.monitor.layer_table import LayerRow

ROLES = ("input", "weight", "grad_output")


class Level(IntEnum):
    """Health of one tensor; the higher, the worse."""

    GOOD = 0
    FAIR = 1
    POOR = 2
    BAD = 3
    BROKEN = 4


SQNR_DB = {Level.BAD: 12.0, Level.POOR: 22.0, Level.FAIR: 28.0}
"""Below so many dB the level is reached. E4M3 gives about 31 dB on anything well scaled, E5M2 about 25."""
UNDERFLOW_SHARE = {Level.BAD: 0.5, Level.POOR: 0.2, Level.FAIR: 0.05}
"""From this share of values lost to zero on, the level is reached."""


def level(row: LayerRow) -> Level:
    """The worse of what SQNR and underflow say; broken where a value is not finite."""
    if math.isnan(row.sqnr_db) or not math.isfinite(row.amax):
        return Level.BROKEN
    for reached, limit in SQNR_DB.items():
        if row.sqnr_db < limit or row.underflow_share >= UNDERFLOW_SHARE[reached]:
            return reached
    return Level.GOOD


@dataclass(frozen=True)
class HeatMap:
    """Levels of one step. A cell is what one linear of one block (or of a few neighbouring blocks) says, by role."""

    kinds: tuple[str, ...]
    """Columns: names of linears inside a block, in the model's order."""
    blocks: tuple[str, ...]
    """Rows: block numbers, ranges where blocks share a row, `-` for what is in no block."""
    cells: dict[tuple[str, str], dict[str, Level]]
    """(block, kind) -> role -> worst level."""
    bf16: frozenset[tuple[str, str]]
    """Cells of which at least one linear ran in BF16."""


def heat_map(rows: Iterable[LayerRow], *, max_blocks: int = 32) -> HeatMap:
    """Arranges the rows of one step; more than `max_blocks` blocks share rows evenly."""
    placed = [(*_place(row.fqn), row) for row in rows]
    numbers = sorted({number for number, _, _ in placed if number is not None})
    labels: dict[int | None, str] = {None: "-"} | _labels(numbers, max_blocks)
    cells: dict[tuple[str, str], dict[str, Level]] = {}
    bf16 = set()
    for number, kind, row in placed:
        cell = cells.setdefault((labels[number], kind), {})
        cell[row.role] = max(level(row), cell.get(row.role, Level.GOOD))
        if row.precision == "bf16":
            bf16.add((labels[number], kind))
    in_order = [*numbers, *([None] if any(number is None for number, _, _ in placed) else [])]
    return HeatMap(
        kinds=tuple(dict.fromkeys(kind for _, kind, _ in placed)),
        blocks=tuple(dict.fromkeys(labels[number] for number in in_order)),
        cells=cells,
        bf16=frozenset(bf16),
    )


def worst(rows: Iterable[LayerRow], count: int) -> list[LayerRow]:
    """The tensors in the worst health, worst first."""
    return sorted(rows, key=lambda r: (-level(r), r.sqnr_db if math.isfinite(r.sqnr_db) else math.inf))[:count]


def _place(fqn: str) -> tuple[int | None, str]:
    """Block number and name inside the block: `model.layers.3.mlp.down_proj` -> 3, `down`."""
    match = re.search(r"(?:^|\.)(\d+)\.(.+)", fqn)
    name = (match[2] if match else fqn).rpartition(".")[2]
    return (int(match[1]) if match else None), name.removesuffix("_proj")


def _labels(numbers: Sequence[int], max_blocks: int) -> dict[int, str]:
    size = max(1, math.ceil(len(numbers) / max_blocks))
    groups = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    return {n: str(g[0]) if len(g) == 1 else f"{g[0]}-{g[-1]}" for g in groups for n in g}
