"""The report in a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from fp8ctl.report.build import make_report
from fp8ctl.report.document import Cell, Table
from fp8ctl.report.terminal import render_terminal, split


@pytest.fixture
def report(make_run) -> dict[str, Any]:
    folders = [make_run("a", answers={"bf16": 0.6})]
    folders += [make_run(f"b{i}", precision="infir2", answers={"bf16": 0.5}) for i in range(4)]
    return make_report(folders)


def shown(report: dict[str, Any], **settings: Any) -> str:
    out = io.StringIO()
    render_terminal(report, Console(file=out, **settings))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 140])
def test_nothing_is_wider_than_the_terminal(report: dict[str, Any], width: int) -> None:
    text = shown(report, width=width)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    for word in ("PARITY", "At a glance", "Training loss", "Loss gap to A BF16", "FP8 coverage", "1.00x"):
        assert word in text


def test_without_colour_there_are_no_escapes_and_the_letters_stay(report: dict[str, Any]) -> None:
    text = shown(report, width=100, color_system=None)
    assert "\x1b" not in text
    plot = text[text.index("Training loss") :][:3000]
    assert all(letter in plot for letter in "ABCDE")


def test_a_terminal_without_unicode_gets_all_but_the_plots(report: dict[str, Any]) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    render_terminal(report, Console(file=out, width=100))
    out.flush()
    text = out.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert "(this terminal's encoding can't draw curves; --html FILE has them)" in text
    assert "PARITY" in text and "step, median (s)" in text


def test_wide_tables_are_cut_between_groups_and_keep_their_row_names() -> None:
    columns = ["", *(f"{c}{i}" for c in "BCD" for i in (1, 2))]
    table = Table(
        "t", "T", columns, [[Cell("name of a row"), *(Cell("12345") for _ in range(6))]], "the note", group_size=2
    )
    parts = split(table, 35)
    assert [p.columns for p in parts] == [["", "B1", "B2"], ["", "C1", "C2"], ["", "D1", "D2"]]
    assert [p.title for p in parts] == ["T", "T (continued)", "T (continued)"]
    assert [p.note for p in parts] == ["", "", "the note"]
    assert all(p.rows[0][0].text == "name of a row" for p in parts)
    assert split(table, 200) == [table]
