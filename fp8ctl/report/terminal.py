"""The report in a terminal: rich tables and braille curves, as wide as the terminal, legible without colour."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fp8ctl.report.braille import draw
from fp8ctl.report.content import sections
from fp8ctl.report.document import Cell, Chart, Headline, Sentence, Table

STYLES = {"": "", "good": "green", "bad": "bold red", "warn": "yellow", "dim": "dim"}

MAX_WIDTH = 120
"""Widest plot, in characters."""

_GAP = 3
"""Characters between two columns."""


def render_terminal(report: dict[str, Any], console: Console) -> None:
    """Prints the report. Without colour, or piped, nothing is lost; where braille can't be printed, plots are left out."""
    for section in sections(report):
        console.print()
        console.rule(Text(section.title, style="bold"), align="left", characters="=" if _is_ascii(console) else "━")
        for block in section.blocks:
            if isinstance(block, Headline):
                console.print(
                    Text(block.word.upper(), style=f"{STYLES[block.tone]} bold"), Text(block.who), soft_wrap=False
                )
                if not block.reasons:
                    continue
                points = RichTable.grid(padding=(0, 1, 0, 1))
                for reason in block.reasons:
                    points.add_row("-", Text(reason))
                console.print(points, soft_wrap=False)
            elif isinstance(block, Sentence):
                console.print(Text(block.text, style=STYLES[block.tone]), soft_wrap=False)
            elif isinstance(block, Chart):
                _print_chart(block, console)
            elif not block.is_detail:
                for part in split(block, console.width):
                    _print_table(part, console)


def split(table: Table, width: int) -> list[Table]:
    """Cuts a table that is too wide into parts that fit, each with the row names; tables of text are left to wrap."""
    columns = list(zip(*(row for row in [[Cell(name) for name in table.columns], *table.rows]), strict=True))
    widths = [max(len(cell.text) for cell in column) + _GAP for column in columns]
    parts = [[0]]
    for start in range(1, len(columns), table.group_size):
        group = range(start, min(start + table.group_size, len(columns)))
        if len(parts[-1]) > 1 and sum(widths[i] for i in (*parts[-1], *group)) > width:
            parts.append([0])
        parts[-1] += group
    if len(parts) == 1 or not table.numbers:
        return [table]
    return [
        replace(
            table,
            title=table.title if number == 0 else f"{table.title} (continued)",
            columns=[table.columns[i] for i in part],
            rows=[[row[i] for i in part] for row in table.rows],
            note=table.note if number == len(parts) - 1 else "",
        )
        for number, part in enumerate(parts)
    ]


def _print_table(table: Table, console: Console) -> None:
    console.print()
    shown = RichTable(title=Text(table.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(table.columns):
        shown.add_column(Text(column), justify="right" if table.numbers and number else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(_text(cell) for cell in row))
    console.print(shown, soft_wrap=False)
    if table.note:
        console.print(Text(table.note, style="dim"), soft_wrap=False)


def _text(cell: Cell) -> Text:
    return Text(cell.text, style=STYLES[cell.tone])


def _print_chart(chart: Chart, console: Console) -> None:
    console.print()
    console.print(Text(chart.title, style="bold"))
    if _is_ascii(console):
        console.print("(this terminal's encoding can't draw curves; --html FILE has them)")
        return
    drawn = draw(chart, min(console.width, MAX_WIDTH), with_colors=console.color_system is not None)
    console.print(Text.from_ansi(drawn), soft_wrap=True)


def _is_ascii(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")
