"""Which recipe runs on which backend here, and which one `auto` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fp8ctl.doctor.apart import Failed, Job, run_apart

ALL_ROWS = Job("fp8ctl.doctor.recipes:all_rows")
_CASES = Job("fp8ctl.doctor.recipes:cases")
_ROW = "fp8ctl.doctor.recipes:row"
_AUTO = (("torch", ""), ("native", "cublas"), ("native", "triton"), ("reference", ""))
"""In the order of `fp8.backend.choose_backend`."""


class RecipeRow(NamedTuple):
    """A recipe (a name for `precision=`) on a backend, with the GEMM where there is a choice; `fix` where it does not run."""

    recipe: str
    backend: str
    gemm: str
    runs: bool
    reason: str
    fix: str


class Reason(NamedTuple):
    """Why recipes run, or don't, on backends; the same for all of them."""

    runs: bool
    places: tuple[str, ...]
    recipes: tuple[str, ...]
    reason: str
    fix: str


def all_rows() -> list[list[Any]]:
    """Every row, asked in this process; for a process apart.

    Raises RuntimeError if a trial left the GPU unusable, which makes all the answers after it worthless.
    """
    import torch

    from fp8ctl.fp8.backend import what_runs

    rows = [list(r) for r in what_runs("cuda")]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return rows


def cases() -> list[list[str]]:
    """What tells the rows apart: recipe, backend, GEMM."""
    from fp8ctl.fp8.backend import CASES

    return [list(case) for case in CASES]


def row(recipe: str, backend: str, gemm: str) -> list[Any]:
    """One row."""
    from fp8ctl.fp8.backend import runs_here

    return list(runs_here(recipe, backend, gemm, "cuda"))


def to_rows(result: Any) -> list[RecipeRow]:
    """The rows that `all_rows` gave; if a trial took its process down, each again in a process that it can't take others with."""
    if not isinstance(result, Failed):
        return [RecipeRow(*r) for r in result]
    [[known]] = run_apart([_CASES])
    if isinstance(known, Failed):
        return [RecipeRow("all", "all", "", False, known.how, "mend what is broken above")]
    [asked] = run_apart([Job(_ROW, tuple(case)) for case in known])
    return [_to_row(case, found) for case, found in zip(known, asked, strict=True)]


def _to_row(case: list[str], found: Any) -> RecipeRow:
    if not isinstance(found, Failed):
        return RecipeRow(*found)
    recipe, backend, gemm = case
    return RecipeRow(recipe, backend, gemm, False, f"trying it out failed: {found.how}", "see what is broken above")


def auto_takes(rows: Sequence[RecipeRow], recipe: str) -> str:
    """The backend of `precision.backend=auto` for a recipe, in words; empty if none runs."""
    running = {(r.backend, r.gemm) for r in rows if r.recipe == recipe and r.runs}
    return next((place(*p) for p in _AUTO if p in running), "")


def place(backend: str, gemm: str) -> str:
    """A backend in words, with its GEMM."""
    return f"{backend} {gemm}".strip()


def reasons(rows: Sequence[RecipeRow]) -> list[Reason]:
    """The rows gathered by reason, those that run first."""
    by_place: dict[tuple[bool, str, str, str], list[str]] = {}
    for r in rows:
        by_place.setdefault((r.runs, place(r.backend, r.gemm), r.reason, r.fix), []).append(r.recipe)
    by_recipes: dict[tuple[bool, tuple[str, ...], str, str], list[str]] = {}
    for (runs, where, reason, fix), recipes in by_place.items():
        by_recipes.setdefault((runs, tuple(recipes), reason, fix), []).append(where)
    found = [Reason(runs, tuple(places), recipes, *why) for (runs, recipes, *why), places in by_recipes.items()]
    return sorted(found, key=lambda r: not r.runs)
