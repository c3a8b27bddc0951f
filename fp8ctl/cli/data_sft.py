"""fp8ctl data inspect --sft: what a preparation would make of conversations."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from fp8ctl.cli.console import stdout
from fp8ctl.cli.source_words import with_sources

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILES... tokenizer=FOLDER [OVERRIDES]...",
        help="Input files, and SETTING=VALUE of data prep.",
        show_default=False,
    ),
]
Sft = Annotated[bool, typer.Option("--sft", help="The files hold conversations.")]
SeqLen = Annotated[
    int, typer.Option("--seq-len", min=1, help="Length in tokens of the rows that samples are packed into.")
]
MaxRows = Annotated[int | None, typer.Option("--rows", min=1, help="Read no more rows than this.", show_default=False)]


def inspect_sft(words: list[str], seq_len_tokens: int, max_rows: int | None, as_json: bool) -> None:
    """Prints what becomes of the rows of files: dropped and bad ones by reason, lengths, packs, one sample with its mask."""
    from fp8ctl.config.checks import check_data_prep
    from fp8ctl.config.compose import compose
    from fp8ctl.data.inspect_sft import inspect_conversations, render

    config = compose("data_prep", ["kind=sft", *with_sources(words)])
    check_data_prep(config, writes=False)
    report = inspect_conversations(config, seq_len_tokens, max_rows)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        stdout().print(render(report), highlight=False)
