"""fp8ctl model ..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8ctl.cli.console import say
from fp8ctl.cli.progress import progress

app = typer.Typer(help="Bring models in.", no_args_is_help=True)


@app.command("import")
def import_(
    src: Annotated[
        str,
        typer.Argument(
            help="GGUF file, Hugging Face folder, or package:NAME of an installed package that holds a GGUF."
        ),
    ],
    dst: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    """Turns a GGUF file or a Hugging Face folder into a training-ready Hugging Face folder."""
    from fp8ctl.model.gguf import import_model

    with progress("import") as report:
        import_model(src, dst, progress=report)
    say(f"model written to {dst}")
