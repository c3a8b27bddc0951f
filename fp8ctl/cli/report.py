"""fp8ctl report"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8ctl.cli.console import say, stdout
from fp8ctl.cli.options import AsJson


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; the first of a stage is the baseline.")],
    as_json: AsJson = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the report as Markdown.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as one self-contained HTML file.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 0 for parity, 3 worse, 4 undecided, 5 does not pay.")
    ] = False,
    benchmark: Annotated[
        str | None,
        typer.Option(
            "--benchmark", help="Also store the figures as docs/benchmarks/NAME.json and .md.", show_default=False
        ),
    ] = None,
) -> None:
    """Speed, memory, loss and accuracy of runs beside each other, ending in one verdict."""
    import json

    from fp8ctl.report.build import exit_code, make_report
    from fp8ctl.report.terminal import render_terminal

    result = make_report(runs)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        render_terminal(result, stdout())
    if markdown:
        from fp8ctl.report.markdown import render_markdown

        _write(markdown, render_markdown(result))
        say(f"Markdown written: {markdown}")
    if html:
        from fp8ctl.report.html import render_html

        _write(html, render_html(result))
        say(f"HTML written: {html}")
    if benchmark:
        from fp8ctl.report.benchmark import write_report_benchmark

        say(f"benchmark written: {write_report_benchmark(benchmark, result)}")
    if check:
        raise typer.Exit(exit_code(result))


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
