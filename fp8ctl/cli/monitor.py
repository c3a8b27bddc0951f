"""fp8ctl monitor ..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8ctl.cli.console import stdout

app = typer.Typer(help="Look at a run's stability.", no_args_is_help=True)


@app.command()
def show(run: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Loss and gradient norm, quantisation health per layer, decisions."""
    from fp8ctl.monitor.show import render
    from fp8ctl.track.record import RunRecord

    render(RunRecord(run), stdout())
