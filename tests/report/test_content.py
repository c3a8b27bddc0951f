"""What the report says, and that all views say the same."""

from __future__ import annotations

import csv
import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fp8ctl.report.build import make_report
from fp8ctl.report.content import headlines, sections
from fp8ctl.report.document import Chart, Sentence, Table
from fp8ctl.report.html import render_html
from fp8ctl.report.markdown import render_markdown
from fp8ctl.report.terminal import render_terminal
from fp8ctl.report.to_csv import to_csv


@pytest.fixture
def report(make_run) -> dict[str, Any]:
    bf16 = make_run("cpt-bf16", answers={"bf16": 0.6})
    fp8 = make_run(
        "cpt-fp8", precision="infir2", gap=0.0004, step_time_s=3.4, answers={"bf16": 0.55, "fp8-infir2": 0.5}
    )
    return make_report([bf16, fp8])


def all_blocks(report: dict[str, Any], kind: type) -> list[Any]:
    return [block for section in sections(report) for block in section.blocks if isinstance(block, kind)]


def test_every_figure_stands_alike_in_every_view(report: dict[str, Any]) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    render_terminal(report, console)
    terminal = re.sub(r"\s+", " ", console.export_text())
    html = re.sub(r"\s+", " ", unescape(render_html(report)).replace("\N{NO-BREAK SPACE}", " "))
    markdown = render_markdown(report).replace("\\", "")
    cells = {row["text"] for row in csv.DictReader(io.StringIO(to_csv(report)))}
    checked = 0
    for table in all_blocks(report, Table):
        for row in table.rows:
            for cell in row:
                if not any(c.isdigit() for c in cell.text):
                    continue
                assert cell.text in html, (table.key, cell)
                assert cell.text in markdown, (table.key, cell)
                assert cell.text in cells or cell is row[0], (table.key, cell)
                if not table.is_detail and len(cell.text) < 60:
                    assert cell.text in terminal, (table.key, cell)
                checked += 1
    assert checked > 120
    for headline in headlines(report):
        for reason in headline.reasons:
            assert reason in html and reason in markdown and reason in terminal


def test_csv_holds_the_figures_of_the_record(report: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    gap = next(r for r in rows if r["table"] == "glance" and r["row"] == "training loss gap" and r["column"] == "B / A")
    assert float(gap["value"]) == report["stages"][0]["comparisons"][0]["gap"]["gap"]["value"]
    step = next(
        r
        for r in rows
        if r["table"] == "efficiency" and r["row"] == "step, median (s)" and r["column"] == "B FP8 infir2"
    )
    assert float(step["value"]) == report["runs"][1]["efficiency"]["step_median_s"]


def test_a_stored_record_gives_the_same_views(report: dict[str, Any], tmp_path: Path) -> None:
    again = json.loads(json.dumps(report))
    assert render_markdown(again) == render_markdown(report)
    assert render_html(again) == render_html(report)


def test_the_verdict_comes_first_with_its_rule(report: dict[str, Any]) -> None:
    (headline,) = headlines(report)
    assert (headline.word, headline.tone) == ("parity", "good")
    assert headline.who == "B FP8 infir2 against A BF16; every rule that applies held"
    assert sections(report)[0].blocks[0] == headline
    assert Sentence(report["notes"][0], "warn") in sections(report)[0].blocks


def test_the_glance_answers_the_first_questions(report: dict[str, Any]) -> None:
    glance = next(t for t in all_blocks(report, Table) if t.key == "glance")
    assert glance.columns == ["", "B / A", "B / A, 95 % band"]
    assert [row[0].text for row in glance.rows] == [
        "step time, emulated",
        "peak memory",
        "training loss gap",
        "validation loss gap",
        "accuracy difference (points)",
        "GEMM FLOPs in FP8",
    ]
    assert [row[1].text for row in glance.rows][1::4] == ["1.00x", "79.0 %"]
    assert glance.rows[4][1].text == "-5.0"


def test_differences_are_listed_in_red_and_the_comparison_is_marked(make_run) -> None:
    report = make_report([make_run("a"), make_run("b", precision="infir2", config={"seed": 3})])
    tables = {t.key: t for t in all_blocks(report, Table)}
    assert [(c.text, c.tone) for c in tables["differences-B"].rows[0][:3]] == [
        ("seed", "bad"),
        ("1236", "bad"),
        ("3", "bad"),
    ]
    assert tables["differences-B"].title == "B against A: not the same experiment"
    assert tables["glance"].columns[1] == "B / A, not matched"


def test_what_is_missing_is_said(make_run) -> None:
    crashed = make_run("b", precision="infir2", logged=7, state="failed", cause="out of memory")
    (crashed / "env.json").unlink()
    told = [s.text for s in all_blocks(make_report([make_run("a"), crashed]), Sentence)]
    assert "B FP8 infir2: failed, out of memory. Hint: look into logs/." in told
    assert "B FP8 infir2: env.json missing: hardware and versions unknown." in told
    assert "A BF16: eval/ missing: no accuracy." in told


def test_a_resumed_run_is_said_to_be_one(make_run, add_step) -> None:
    folder = make_run("a")
    add_step(folder, 60, 2.0)
    told = [s.text for s in all_blocks(make_report([folder]), Sentence)]
    assert "A BF16: resumed; of 1 steps logged twice the last counts." in told


def test_charts_say_in_words_what_they_show(report: dict[str, Any]) -> None:
    loss, gap = all_blocks(report, Chart)
    runs = report["runs"]
    assert loss.description.startswith("Training loss in nats per token over steps. A BF16 goes from 4.")
    assert f"to {runs[1]['loss']['final']:.4f} (mean of the last 10 %)." in loss.description
    assert gap.title == "Loss gap to A BF16"
    assert [name for _, name in gap.levels] == ["+0.25 %", "0", "-0.25 %"]
    assert gap.y_limits is not None and gap.y_limits[0] <= -0.0025 and gap.y_limits[1] >= 0.0025


def test_losses_that_are_not_finite_show_no_gap_at_a_glance(make_run) -> None:
    losses = np.full(60, 2.0)
    losses[40:] = np.nan
    report = make_report([make_run("a"), make_run("b", precision="infir2", losses=losses)])
    glance = next(t for t in all_blocks(report, Table) if t.key == "glance")
    assert (glance.rows[2][1].text, glance.rows[2][1].tone) == ("not finite", "bad")


def test_facts_that_all_runs_share_stand_once(report: dict[str, Any]) -> None:
    provenance = next(t for t in all_blocks(report, Table) if t.key == "provenance")
    rows = [[cell.text for cell in row] for row in provenance.rows]
    assert ["commit", "all", "0123456789abcdef0123456789abcdef01234567"] in rows
    assert ["hardware", "all", "Some CPU @ 2.0GHz, 2 cores; 24 GiB memory"] in rows
    assert ["command", "all", "fp8ctl train cpt precision=infir2 'data.path=data/with space'"] in rows
    assert [row[:2] for row in rows if row[0] == "run folder"] == [["run folder", "A"], ["run folder", "B"]]
