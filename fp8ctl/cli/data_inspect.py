"""fp8ctl data inspect, for files as they are: what is in them, and what they will become."""

from __future__ import annotations

import json
import re
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import typer

from fp8ctl.cli.console import say, stdout
from fp8ctl.cli.source_words import is_path, quoted, with_sources
from fp8ctl.cli.terminal import shown

if TYPE_CHECKING:
    from fp8ctl.data.inspect_source import Inspection

_FIELDS_SHOWN = 20
_BAR = 40


def inspect_raw(words: list[str], as_json: bool) -> None:
    """Prints what raw files hold; exits with 1 when too many rows hold no text."""
    from fp8ctl.config.compose import compose
    from fp8ctl.data.inspect_source import inspect_source

    config = compose("data_inspect", with_sources(words))
    found = inspect_source(config)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found)
    for warning in found.warnings:
        say(f"warning: {shown(warning)}")
    if not found.tokens_per_second:
        say("tokens are estimated from characters: set tokenizer=FOLDER to count them and to learn the time to prepare")
    if found.missing_share > config.max_missing_share:
        say(
            f"{found.missing_share:.2%} of the sampled rows hold no text (allowed are {config.max_missing_share:.2%}); "
            "set text_field to the field that holds it"
        )
        raise typer.Exit(1)
    if not as_json:
        say(f"to prepare: {shown(_next_command(found, words))}")


def _show(found: Inspection) -> None:
    from rich.table import Table

    out = stdout()
    table = Table(show_header=False, box=None)
    for name, counts in found.by_format.items():
        table.add_row(name, f"{counts['files']:,} files, {_size(counts['bytes'])}")
    about = "" if found.rows_are_exact else "about "
    table.add_row("rows", f"{about}{found.rows:,} ({found.sampled_rows:,} looked at)")
    table.add_row("holds", shown(_holds(found)))
    table.add_row("without text", f"{found.missing_share:.2%} of the rows looked at")
    table.add_row("tokens", f"about {found.tokens:,} ({found.tokens_are}), {found.mean_tokens:,.0f} a row")
    if found.prep_seconds is not None and found.tokens_per_second is not None:
        time = timedelta(seconds=round(found.prep_seconds))
        table.add_row("time to prepare", f"about {time} ({found.tokens_per_second:,.0f} tokens a second and process)")
    table.add_row("disk", f"about {_size(found.disk_bytes)} of shards")
    out.print(table)
    _show_fields(out, found)
    _show_histogram(out, found)
    for reason, bad in found.bad.items():
        text = f"{bad['rows']:,} rows: {reason} (the first: {bad['first']})"
        out.print(shown(text), markup=False, highlight=False, soft_wrap=True)
    for example in found.examples:
        text = " ".join(example["text"].split())
        out.print(shown(f"{example['place']}: {text}"), markup=False, highlight=False, soft_wrap=True)


def _show_fields(out: Any, found: Inspection) -> None:
    from rich.table import Table
    from rich.text import Text

    if not found.fields:
        return
    table = Table("field", "in rows", "types", "mean characters", box=None)
    for name, of in list(found.fields.items())[:_FIELDS_SHOWN]:
        mean = f"{of['mean_chars']:,.0f}" if of["mean_chars"] is not None else ""
        table.add_row(Text(shown(name)), f"{of['share']:.1%}", ", ".join(of["types"]), mean)
    out.print(table)
    if len(found.fields) > _FIELDS_SHOWN:
        out.print(f"and {len(found.fields) - _FIELDS_SHOWN:,} more fields", highlight=False)


def _show_histogram(out: Any, found: Inspection) -> None:
    from rich.table import Table

    most = max(found.histogram.values(), default=0)
    if not most:
        return
    table = Table("tokens", "rows", "", box=None)
    for bucket, rows in found.histogram.items():
        table.add_row(bucket, f"{rows:,}", "#" * round(_BAR * rows / most))
    out.print(table)


def _holds(found: Inspection) -> str:
    if found.kind == "sft":
        return f"conversations ({found.schema})"
    if found.kind == "cpt":
        return f"text in field {found.schema!r}" if found.schema else "text"
    return "nothing that can be trained on"


def _next_command(found: Inspection, words: list[str]) -> str:
    paths = [quoted(word) if re.search(r"[^\w./*?:-]", word) else word for word in words if is_path(word)]
    kind = next(iter(found.by_format)).split(".")[0]
    command = [
        "source=sft_local" if found.kind == "sft" else "source=cpt_local",
        f"sources.0.kind={kind}",
        f"sources.0.paths=[{','.join(paths)}]",
    ]
    if found.kind == "cpt" and found.schema not in ("", "text"):
        command.append(f"sources.0.text_field={found.schema}")
    tokenizer = next((word for word in words if word.startswith("tokenizer=")), "tokenizer=FOLDER")
    return shlex.join(["fp8ctl", "data", "prep", *command, tokenizer, "out=FOLDER"])


def _size(num_bytes: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024  # type: ignore[assignment]
    return f"{num_bytes:,.1f} TiB"
