"""fp8ctl doctor"""

from __future__ import annotations

import typer

from fp8ctl.cli.console import stdout
from fp8ctl.cli.options import AsJson

_STYLE = {"ok": "green", "note": "cyan", "absent": "yellow", "broken": "bold red"}


def doctor(as_json: AsJson = False) -> None:
    """What this machine can run, and one line for each thing it can't. Exits 1 when training can't run."""
    import json

    from rich.markup import escape
    from rich.table import Table

    from fp8ctl.doctor.checks import examine, faults, recipes, to_json

    findings = examine()
    if as_json:
        print(json.dumps(to_json(findings), indent=2))
    else:
        table = Table(box=None, pad_edge=False)
        for column in ("check", "state", "detail"):
            table.add_column(column)
        for f in findings:
            table.add_row(f.name, f"[{_STYLE[f.state]}]{f.state}[/]", escape(f.detail))
        stdout().print(table)
        can = Table(box=None, pad_edge=False)
        for column in ("recipe", "backend", "runs here", "reason"):
            can.add_column(column)
        for row in recipes(findings):
            can.add_row(row["recipe"], row["backend"], row["runs"], row["reason"])
        stdout().print()
        stdout().print(can)
        for f in findings:
            if f.fix and f.state != "ok":
                stdout().print(f"fix: {f.name}: {f.fix}", markup=False, highlight=False)
    if faults(findings):
        raise typer.Exit(1)
