"""Progress of a command that works in this process: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fp8ctl.cli.console import say, stderr

_LINE_EVERY_S = 5.0


class Report(Protocol):
    """Called by the work: how much is done, of how much where that is known, and a few words."""

    def __call__(self, done: int, total: int | None, what: str = "") -> None: ...


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """Gives the callable to hand to the work; shows it on stderr."""
    console = stderr()
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=None)

            def on_terminal(done: int, total: int | None, what: str = "") -> None:
                text = title if total is not None else f"{title}: {done:,}"
                bar.update(task, completed=done, total=total, description=f"{text}  {what}" if what else text)

            yield on_terminal
        return

    last_s = float("-inf")

    def in_lines(done: int, total: int | None, what: str = "") -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _LINE_EVERY_S or done == total:
            last_s = now_s
            of = "" if total is None else f"/{total:,}"
            say(f"{title}: {done:,}{of}" + (f"  {what}" if what else ""))

    yield in_lines
