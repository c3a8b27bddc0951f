"""fp8ctl data ..."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8ctl.cli import data_inspect, data_lists, data_sft
from fp8ctl.cli.console import say, stdout
from fp8ctl.cli.options import AsJson, Overrides
from fp8ctl.cli.progress import progress
from fp8ctl.cli.terminal import shown

if TYPE_CHECKING:
    from fp8ctl.data.prepare import Status

app = typer.Typer(help="Prepare training data and look at it.", no_args_is_help=True)
PERCENTILES = (5, 50, 95, 100)
app.command("dedup")(data_lists.dedup)
app.command("decontaminate")(data_lists.decontaminate)
Folder = Annotated[Path, typer.Argument(help="Data set folder.")]


@app.command()
def prep(overrides: Overrides = None) -> None:
    """Text or conversations to token shards: fp8ctl data prep source=python_stdlib tokenizer=FOLDER out=FOLDER."""
    from fp8ctl.config.checks import check_data_prep
    from fp8ctl.config.compose import compose
    from fp8ctl.data.prepare import prepare, submit

    config = compose("data_prep", overrides or [])
    check_data_prep(config)
    if config.executor == "slurm":
        say(f"Slurm job {submit(config)} writes the manifest when all jobs before it are done")
        say(f"if a job failed: run this command again, or `fp8ctl data merge {config.out}` when all tasks are done")
        return
    try:
        with progress("MiB read") as report:
            manifest = prepare(config, lambda status: report(*_mebibytes(status), _counted(status)))
    except KeyboardInterrupt:
        say("stopped; the same command goes on with the tasks that are not done")
        raise
    _tell(manifest)


@app.command()
def merge(path: Folder) -> None:
    """Finishes a data set whose tasks were done on several machines: writes its manifest, copies no token."""
    from fp8ctl.data.prepare import finish

    _tell(finish(path))


@app.command()
def adopt(
    prefixes: Annotated[list[Path], typer.Argument(help="Shards: PREFIX.bin and PREFIX.idx, without the ending.")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="Folder of the tokenizer that made them.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the data set; it gets links, no copies.")],
    validation: Annotated[list[Path] | None, typer.Option("--validation", help="Shards held out.")] = None,
) -> None:
    """Takes shards of Megatron's own tools over: writes the manifest that training asks for."""
    from fp8ctl.data.adopt import adopt as adopt_shards

    _tell(adopt_shards(prefixes, out, tokenizer, validation=validation or (), progress=lambda p: say(f"reading {p}")))


def _tell(manifest: Path) -> None:
    from fp8ctl.data.manifest import QUARANTINE, Manifest

    found = Manifest.read(manifest.parent)
    for warning in found.warnings:
        say(f"warning: {warning}")
    of = found.counters
    if "rows" in of:
        dropped = "".join(f", {n:,} dropped: {reason}" for reason, n in of["dropped"].items())
        notes = "".join(f", {n:,} {note.replace('_', ' ')}" for note, n in of["notes"].items())
        bad = f", {of['bad']:,} bad: see {manifest.parent / QUARANTINE}" if of["bad"] else ""
        say(f"{of['rows']:,} rows: {of['kept']:,} kept{notes}{dropped}{bad}")
    tokens = ", ".join(
        f"{found.documents(s):,} documents with {found.tokens(s):,} tokens for {s}" for s in found.splits
    )
    say(f"data set written: {manifest.parent}: {tokens}")


def _mebibytes(status: Status) -> tuple[int, int | None]:
    return status.bytes_read >> 20, (status.total_bytes >> 20) or None


def _counted(status: Status) -> str:
    counts, first, left_s = status.counts, status.first_bad, status.seconds_left
    where = f" (the first: {first['file']} line {first['line']}: {first['reason']})" if first else ""
    return (
        f"{counts.documents:,} documents, {counts.tokens:,} tokens ({status.tokens_per_second:,.0f} a second)"
        + "".join(f", {n:,} dropped: {reason}" for reason, n in counts.dropped.items())
        + (f", {counts.bad:,} bad{where}" if counts.bad else "")
        + (f", {timedelta(seconds=round(left_s))} left" if left_s else "")
    )


@app.command("import")
def import_(
    source: Annotated[
        str, typer.Argument(help="Name of a data set on the Hugging Face hub, or a folder saved by `datasets`.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the Parquet files.")],
    name: Annotated[str | None, typer.Option("--name", help="Configuration, of data sets that have several.")] = None,
    split: Annotated[str | None, typer.Option("--split", help="The only split to copy.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Commit or tag on the hub.")] = None,
) -> None:
    """Copies a data set of the library `datasets` into Parquet files that data prep reads."""
    from fp8ctl.data.hub import import_dataset

    with progress("rows") as report:
        rows = import_dataset(
            source, out, name=name, split=split, revision=revision, progress=lambda n: report(n, None, "")
        )
    counted = ", ".join(f"{n:,} in {of}" for of, n in rows.items())
    say(f"{counted}; read them with sources.0.kind=parquet sources.0.paths=[{out}]")


@app.command()
def verify(path: Folder) -> None:
    """Checks every byte, size and token id against the manifest; exits 1 when something is wrong.

    Shows the beginnings of three documents, where the tokenizer is still there.
    """
    from fp8ctl.data.inspect import decode_some
    from fp8ctl.data.inspect import verify as verify_data

    problems = verify_data(path, progress=lambda shard: say(f"reading {shard}"))
    for line in problems or [f"{path}: all is as the manifest says"]:
        stdout().print(shown(line), highlight=False, markup=False)
    if problems:
        raise typer.Exit(1)
    decoded = decode_some(path)
    if decoded is None:
        say("no document was decoded: the tokenizer is not where it was when the data set was prepared")
    for document in decoded or ():
        text = shown(" ".join(document.text.split()))
        stdout().print(f"{document.split} {document.number:,}: {text}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def stats(path: Folder, as_json: AsJson = False) -> None:
    """Documents, tokens and lengths of a data set."""
    import json

    from rich.table import Table

    from fp8ctl.data.inspect import stats as data_stats

    figures = data_stats(path)
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    table = Table("split", "documents", "tokens", "trained", "mean", *(f"p{p}" for p in PERCENTILES), box=None)
    for split, of in figures["splits"].items():
        lengths = (f"{of['length_percentiles'][str(p)]:,}" for p in PERCENTILES)
        row = (f"{of['documents']:,}", f"{of['tokens']:,}", f"{of['trained_tokens']:,}", f"{of['mean_length']:,.0f}")
        table.add_row(split, *row, *lengths)
    stdout().print(f"{figures['kind']} data set, fingerprint {figures['fingerprint']}", highlight=False)
    stdout().print(table)
    for warning in figures["warnings"]:
        stdout().print(f"warning: {shown(warning)}", markup=False, highlight=False)


@app.command()
def inspect(
    words: data_sft.Words = None,
    sft: data_sft.Sft = False,
    seq_len: data_sft.SeqLen = 32_768,
    rows: data_sft.MaxRows = None,
    as_json: AsJson = False,
) -> None:
    """What raw files hold, before anything is prepared: fp8ctl data inspect FILES tokenizer=FOLDER; exits 1 where text is missing.

    With --sft, what a preparation would make of conversations: fp8ctl data inspect --sft FILES tokenizer=FOLDER max_tokens=32768.
    """
    if sft:
        data_sft.inspect_sft(words or [], seq_len, rows, as_json)
    else:
        data_inspect.inspect_raw(words or [], as_json)


@app.command()
def cat(
    path: Folder,
    doc: Annotated[int, typer.Option("--doc", help="Number of the document, from 0.")] = 0,
    split: Annotated[str, typer.Option("--split", help="train or validation.")] = "train",
) -> None:
    """Decodes one document; in a fine-tuning set the trained tokens stand in green, between >>> and <<<."""
    from rich.text import Text

    from fp8ctl.data.inspect import show_document

    document = show_document(path, doc, split=split)
    marked = 0 < document.trained_tokens < document.tokens
    text = Text()
    for raw, trained in document.pieces:
        piece = shown(raw)
        text.append(f">>>{piece}<<<" if marked and trained else piece, style="green" if marked and trained else "")
    stdout().print(text, soft_wrap=True)
    say(f"document {document.number}: {document.tokens:,} tokens, {document.trained_tokens:,} trained")
