"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[OVERRIDES]...", help="Hydra overrides: GROUP=CHOICE and SETTING=VALUE.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, show what would run, start nothing.")]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="Run folder; default: runs/<time>-<name>.", show_default=False)
]
