"""What really ran in FP8, from counters at the executed GEMM calls; never from settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.counter import DIRECTIONS, PRECISIONS, Direction, GemmCounter, Precision
from fp8ctl.precision.plan import PrecisionPlan

Flops = Mapping[Direction, Mapping[Precision, int]]


@dataclass(frozen=True)
class Coverage:
    """Executed FLOPs of every counted module (linears and head) of one rank."""

    linears: Mapping[str, Flops]
    """FQN -> direction -> precision -> FLOPs."""
    padding_flops: int = 0
    """FLOPs spent beside those on rows and columns that only fill up what FP8 GEMMs ask for."""

    @property
    def num_linears(self) -> int:
        """Counted modules, those that never ran included."""
        return len(self.linears)

    @property
    def fp8_linears(self) -> int:
        """Linears whose forward GEMMs all ran in FP8, at least one of them."""
        return sum(f["fprop"]["fp8"] > 0 and f["fprop"]["bf16"] == 0 for f in self.linears.values())

    @property
    def mixed_linears(self) -> int:
        """Linears whose forward ran in FP8 for a part of the time."""
        return sum(f["fprop"]["fp8"] > 0 and f["fprop"]["bf16"] > 0 for f in self.linears.values())

    def flops(self, precision: Precision, direction: Direction | None = None) -> int:
        """FLOPs of all linears in one precision, of one direction or of all three."""
        directions = DIRECTIONS if direction is None else (direction,)
        return sum(f[d][precision] for f in self.linears.values() for d in directions)

    def fp8_share(self, direction: Direction | None = None) -> float | None:
        """Share of the executed FLOPs that ran in FP8, of one direction or in total; None if nothing ran."""
        fp8, bf16 = self.flops("fp8", direction), self.flops("bf16", direction)
        return fp8 / (fp8 + bf16) if fp8 + bf16 else None

    @property
    def padding_share(self) -> float:
        """Share of all that the GEMMs computed that was padding."""
        total = self.flops("fp8") + self.flops("bf16") + self.padding_flops
        return self.padding_flops / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Content of coverage.json."""
        return {
            "schema": 1,
            "num_linears": self.num_linears,
            "fp8_linears": self.fp8_linears,
            "mixed_linears": self.mixed_linears,
            "fp8_share": {**{d: self.fp8_share(d) for d in DIRECTIONS}, "total": self.fp8_share()},
            "padding_share": self.padding_share,
            "flops": {d: {p: self.flops(p, d) for p in PRECISIONS} for d in DIRECTIONS},
            "linears": {fqn: {d: dict(f[d]) for d in DIRECTIONS} for fqn, f in self.linears.items()},
        }


def coverage(model: nn.Module) -> Coverage:
    """What the model's counters say now."""
    counters = _counters(model)
    linears = {fqn: {d: dict(c.flops[d]) for d in DIRECTIONS} for fqn, c in counters.items()}
    return Coverage(linears, sum(c.padding_flops for c in counters.values()))


def flops_by_precision(model: nn.Module) -> dict[str, float]:
    """FLOPs executed so far per precision, all linears and directions; cheap enough for every step."""
    counters = list(_counters(model).values())
    return {p: float(sum(c.flops[d][p] for c in counters for d in DIRECTIONS)) for p in PRECISIONS}


def reset_counters(model: nn.Module) -> None:
    """Sets all counters back to zero."""
    for counter in _counters(model).values():
        counter.reset()


def save_counters(model: nn.Module) -> dict[str, Any]:
    """All counters as plain data, for a checkpoint."""
    return {
        fqn: {**{d: dict(c.flops[d]) for d in DIRECTIONS}, "padding": c.padding_flops}
        for fqn, c in _counters(model).items()
    }


def load_counters(model: nn.Module, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Inverse of `save_counters`, so that coverage tells about the whole run across resumes.

    Raises:
        PrecisionError: the saved counters are of another model.
    """
    counters = _counters(model)
    if counters.keys() != saved.keys():
        differing = sorted(counters.keys() ^ saved.keys())
        raise PrecisionError(
            f"saved counters are of another model: {differing[0]!r} is in one of the two", "resume the same model"
        )
    for fqn, counter in counters.items():
        counter.flops = {d: {p: int(saved[fqn][d][p]) for p in PRECISIONS} for d in DIRECTIONS}
        counter.padding_flops = int(saved[fqn].get("padding", 0))


def check_required(plan: PrecisionPlan, done: Coverage) -> None:
    """Refuses a run in which less ran in FP8 than its plan says.

    Every linear that the plan runs in FP8 must have run, with all FLOPs of every direction that the recipe has in FP8.
    What the share should have been is computed from the executed FLOPs, so recomputation and evaluation don't blur it.

    Raises:
        PrecisionError: names the linears that fell short, the share and the plan's.
    """
    short = []
    expected = 0
    for planned in plan.fp8_linears:
        flops = done.linears.get(planned.fqn)
        if flops is None or not sum(flops["fprop"].values()):
            short.append(f"{planned.fqn} never ran")
            continue
        directions = _fp8_directions(plan)
        expected += sum(sum(flops[d].values()) for d in directions)
        short += [f"{planned.fqn} {d} ran in BF16" for d in directions if flops[d]["bf16"]]
    if not short:
        return
    total = done.flops("fp8") + done.flops("bf16")
    fp8_percent, planned_percent = (100 * flops / max(total, 1) for flops in (done.flops("fp8"), expected))
    ran = f"{fp8_percent:.1f} % of the GEMM FLOPs instead of {planned_percent:.1f} %"
    listed = ", ".join(short[:3]) + (f" and {len(short) - 3} more" if len(short) > 3 else "")
    raise PrecisionError(
        f"less ran in FP8 than planned: {ran if total else 'no GEMM ran'} ({listed})",
        "coverage.json has the counts of every linear; set precision.require_fp8=false to accept them",
    )


def _fp8_directions(plan: PrecisionPlan) -> tuple[Direction, ...]:
    return DIRECTIONS if plan.recipe.wgrad == "fp8" else ("fprop", "dgrad")


def _counters(model: nn.Module) -> dict[str, GemmCounter]:
    found = {fqn: getattr(module, "counter", None) for fqn, module in model.named_modules()}
    return {fqn: counter for fqn, counter in found.items() if isinstance(counter, GemmCounter)}
