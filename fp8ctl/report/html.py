"""The report as one HTML file: inline SVG, light and dark, readable on a phone, nothing loaded from elsewhere."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fp8ctl.paths import templates_dir
from fp8ctl.report import svg
from fp8ctl.report.content import sections


def render_html(report: dict[str, Any]) -> str:
    """The whole page. Nothing in it needs a network, a script or a font file."""
    environment = Environment(
        loader=FileSystemLoader(templates_dir() / "report"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_keep_units,
    )
    environment.tests["block"] = lambda block, kind: type(block).__name__ == kind
    page = environment.get_template("report.html.j2")
    return page.render(
        report=report, sections=sections(report), svg=lambda chart: Markup(svg.svg(chart)), legend=svg.legend
    )


def _keep_units(value: Any) -> Any:
    # A line break between a number and its % reads badly on a phone.
    return value.replace(" %", "\N{NO-BREAK SPACE}%") if isinstance(value, str) else value
