"""Where words go: data to stdout, talk and errors to stderr; legible without colour."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.markup import escape

from fp8ctl.errors import Fp8ctlError


def stdout() -> Console:
    """For data: tables and reports. In a pipe there is no width to ask for, and 80 columns would break most tables."""
    return Console(width=None if sys.stdout.isatty() else 120)


def stderr() -> Console:
    """For talk: progress, notes, warnings."""
    return Console(stderr=True)


def say(text: str) -> None:
    """One line of talk."""
    stderr().print(text, highlight=False, markup=False, soft_wrap=True)


def print_error(error: Fp8ctlError) -> None:
    """`error: ...`, a blank line, `hint: ...`."""
    console = stderr()
    console.print(f"[bold red]error:[/] {escape(error.message)}", highlight=False, soft_wrap=True)
    if error.hint:
        console.print(f"\n[bold cyan]hint:[/] {escape(error.hint)}", highlight=False, soft_wrap=True)
