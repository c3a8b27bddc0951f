"""fp8ctl doctor"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fp8ctl.cli.console import stderr, stdout
from fp8ctl.cli.options import AsJson

if TYPE_CHECKING:
    from rich.table import Table

    from fp8ctl.doctor.checks import Examination

_STYLE = {"ok": "green", "note": "cyan", "skipped": "dim", "absent": "yellow", "broken": "bold red"}


def doctor(as_json: AsJson = False) -> None:
    """What this machine can run, and one line for each thing it can't. Exits 1 when training can't run."""
    import json

    from fp8ctl.doctor.checks import examine, to_json

    with stderr().status("trying things out (a minute or so on a GPU, where kernels are compiled)"):
        examination = examine()
    if as_json:
        print(json.dumps(to_json(examination), indent=2))
    else:
        _show(examination)
    if examination.faults:
        raise typer.Exit(1)


def _show(examination: Examination) -> None:
    stdout().print(_findings(examination))
    _line()
    for why, names in _skipped(examination).items():
        _line(f"not tried, {why}: {', '.join(names)}")
    _line()
    stdout().print(_recipes(examination))
    _line()
    _show_reasons(examination)
    for f in examination.findings:
        if f.fix and f.state != "ok":
            _line(f"fix: {f.name}: {f.fix}")


def _line(text: str = "") -> None:
    stdout().print(text, markup=False, highlight=False, soft_wrap=True)


def _skipped(examination: Examination) -> dict[str, list[str]]:
    """Names of the checks that could not be tried, by reason."""
    by_reason: dict[str, list[str]] = {}
    for f in examination.findings:
        if f.state == "skipped":
            by_reason.setdefault(f.detail, []).append(f.name)
    return by_reason


def _show_reasons(examination: Examination) -> None:
    from fp8ctl.doctor.recipes import reasons

    fp8 = list(dict.fromkeys(r.recipe for r in examination.recipes if r.recipe not in ("bf16", "all")))
    for r in reasons(examination.recipes):
        recipes = "every FP8 recipe" if list(r.recipes) == fp8 else ", ".join(r.recipes)
        _line(f"{'yes' if r.runs else 'no'}: {', '.join(r.places)}: {recipes}: {r.reason}")
        if r.fix:
            _line(f"    fix: {r.fix}")


def _findings(examination: Examination) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("check", "state", "detail"):
        table.add_column(column, no_wrap=column != "detail")
    for f in examination.findings:
        if f.state != "skipped":
            table.add_row(f.name, f"[{_STYLE[f.state]}]{f.state}[/]", escape(f.detail))
    return table


def _recipes(examination: Examination) -> Table:
    from rich.table import Table

    from fp8ctl.doctor.recipes import auto_takes, place

    rows = examination.recipes
    places = list(dict.fromkeys((r.backend, r.gemm) for r in rows))
    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "auto takes", *(place(*p) for p in places)):
        table.add_column(column, no_wrap=True)
    for recipe in dict.fromkeys(r.recipe for r in rows):
        runs = {(r.backend, r.gemm): r.runs for r in rows if r.recipe == recipe}
        cells = ["-" if p not in runs else "[green]yes[/]" if runs[p] else "[yellow]no[/]" for p in places]
        table.add_row(recipe, auto_takes(rows, recipe) or "-", *cells)
    return table
