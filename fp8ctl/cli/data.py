"""fp8ctl data ..."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8ctl.cli.console import say, stdout
from fp8ctl.cli.options import AsJson, Overrides

app = typer.Typer(help="Prepare training data and look at it.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Data set folder.")]


@app.command()
def prep(overrides: Overrides = None) -> None:
    """Text or conversations to token shards: fp8ctl data prep source=python_stdlib tokenizer=FOLDER out=FOLDER."""
    from fp8ctl.config.checks import check_data_prep
    from fp8ctl.config.compose import compose
    from fp8ctl.data.prepare import prepare

    config = compose("data_prep", overrides or [])
    check_data_prep(config)
    manifest = prepare(config, progress=say)
    say(f"data set written: {manifest}")


@app.command()
def verify(path: Folder) -> None:
    """Checks hashes, sizes and token ids against the manifest."""
    from fp8ctl.data.inspect import verify as verify_data

    for line in verify_data(path):
        stdout().print(line, highlight=False, markup=False)


@app.command()
def stats(path: Folder, as_json: AsJson = False) -> None:
    """Documents, tokens and lengths of a data set."""
    import json

    from fp8ctl.data.inspect import stats as data_stats

    figures = data_stats(path)
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        stdout().print(f"{name}: {value}", highlight=False, markup=False)


@app.command()
def cat(
    path: Folder,
    doc: Annotated[int, typer.Option("--doc", help="Number of the document, from 0.")] = 0,
    split: Annotated[str, typer.Option("--split", help="train or validation.")] = "train",
) -> None:
    """Decodes one document; in a fine-tuning set the trained tokens are marked."""
    from fp8ctl.data.inspect import show_document

    stdout().print(show_document(path, doc, split=split), highlight=False, markup=False)
