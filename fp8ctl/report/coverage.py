"""What really ran in FP8, from the counts of executed GEMMs; the settings are no evidence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fp8ctl.report.load import Run, number

DIRECTIONS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Covered:
    """FP8's part in one run."""

    fp8_linears: int | None
    """Linears whose forward GEMMs all ran in FP8."""
    mixed_linears: int | None
    """Linears whose forward GEMMs ran in FP8 for a part of the run."""
    num_linears: int | None
    """All counted linears, head included."""
    shares: dict[str, float | None]
    """Direction -> share of its GEMM FLOPs executed in FP8."""
    total: float | None
    """Share of all linear GEMM FLOPs, head included."""
    source: str
    """File that `total` comes from."""


def summarize(run: Run) -> Covered | None:
    """Coverage of coverage.json, or at least its total from metrics.jsonl; None when neither says anything."""
    tree = run.coverage
    shares = tree.get("fp8_share") or {}
    total, source = number(shares.get("total")), "coverage.json"
    if total is None:
        logged = run.values("fp8_flops_share")
        logged = logged[np.isfinite(logged)]
        if not len(logged):
            return None
        total, source = float(np.mean(logged)), "metrics.jsonl"
    return Covered(
        fp8_linears=tree.get("fp8_linears"),
        mixed_linears=tree.get("mixed_linears"),
        num_linears=tree.get("num_linears"),
        shares={direction: number(shares.get(direction)) for direction in DIRECTIONS},
        total=total,
        source=source,
    )
