"""The report as Markdown: the same tables, and the plots as text."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fp8ctl.paths import templates_dir
from fp8ctl.report.braille import draw
from fp8ctl.report.content import sections
from fp8ctl.report.document import Chart, Table
from fp8ctl.track.markdown import escape

PLOT_WIDTH = 90
"""Characters; what code hosts show without scrolling."""


def render_markdown(report: dict[str, Any]) -> str:
    """The whole report as GitHub-flavoured Markdown."""
    environment = Environment(
        loader=FileSystemLoader(templates_dir() / "report"),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    environment.filters |= {"md": escape, "table": table}
    page = environment.get_template("report.md.j2")
    return page.render(report=report, sections=sections(report), plot=_plot)


def table(block: Table) -> str:
    """A table with its header; figures to the right."""
    align = ["---" if not number or not block.numbers else "---:" for number in range(len(block.columns))]
    rows = [
        [escape(column) for column in block.columns],
        align,
        *([escape(cell.text) for cell in row] for row in block.rows),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _plot(chart: Chart) -> str:
    return draw(chart, PLOT_WIDTH, with_colors=False)
