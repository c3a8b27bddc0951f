"""An evaluation as a table for the terminal. No torch."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def result_table(result: dict[str, Any]) -> RenderableType:
    """One evaluation: accuracies with standard errors and intervals, how answers ended, what ran, how fast."""
    title = f"{result['suite']}, {result['precision']} inference: share of right answers in %"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("family", no_wrap=True)
    for heading in ("n", "right", "interval", "cut\noff", "no\nanswer", "tokens"):
        table.add_column(heading, justify="right")
    for family, figures in result["families"].items():
        table.add_row(family, *_cells(figures))
    table.add_section()
    table.add_row("all", *_cells(result["overall"]), style="bold")
    return Group(table, *(Text(line) for line in _notes(result)))


def _cells(figures: dict[str, Any]) -> list[str]:
    questions, answers, se = figures["num_questions"], figures["num_answers"], figures["se"]
    return [
        f"{questions}" if answers == questions else f"{questions} x {answers / questions:.3g}",
        # a single question has no standard error
        f"{100 * figures['accuracy']:.1f} ± {'?' if se is None else f'{100 * se:.1f}'}",
        f"{100 * figures['low']:.0f} - {100 * figures['high']:.0f}",
        f"{100 * figures['truncated_share']:.0f}",
        f"{100 * figures['no_answer_share']:.0f}",
        f"{figures['mean_answer_tokens']:.0f}",
    ]


def _notes(result: dict[str, Any]) -> list[str]:
    model, lines = result["model"], []
    step = f", step {model['step']}" if model["step"] is not None else ""
    lines.append(f"model      {model['path']}{step}")
    lines.append(f"precision  {result['plan']}; {result['dtype']} elsewhere, on {result['device']}")
    if result["coverage"] is not None:
        share, count = result["coverage"]["fp8_share"]["fprop"] or 0.0, result["coverage"]["fp8_linears"]
        lines.append(
            f"ran        {count} of {result['coverage']['num_linears']} linears in FP8, {100 * share:.1f} % of the linear FLOPs"
        )
    if result["tokens_per_second"] is not None:
        resumed = f" ({result['answers_resumed']} answers were there before)" if result["answers_resumed"] else ""
        lines.append(f"speed      {result['tokens_per_second']:,.0f} tokens/s, {result['seconds']:.0f} s{resumed}")
    lines.append(f"protocol   {result['protocol_hash'][:12]}; ± standard error over questions, interval of 95 %")
    return lines
