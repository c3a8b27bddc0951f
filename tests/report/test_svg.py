"""Plots as SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from fp8ctl.report.document import Chart, Line
from fp8ctl.report.svg import HEIGHT, WIDTH, legend, svg, ticks

LINES = [Line("A", "A BF16", [1, 50, 100], [4.0, 3.0, 2.0]), Line("B", "B FP8 <x>", [1, 50, 100], [4.0, 3.1, 2.1])]
LOSS = Chart("loss-cpt", "Training loss & more", "It falls.", "loss", "loss", LINES)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1.8, 4.7, ["2", "3", "4"]),
        (2.001, 2.011, ["2.002", "2.004", "2.006", "2.008", "2.010"]),
        (1, 60, ["20", "40", "60"]),
        (1, 100_000, ["20,000", "40,000", "60,000", "80,000", "100,000"]),
    ],
)
def test_ticks_are_round(low: float, high: float, labels: list[str]) -> None:
    assert [text for _, text in ticks(low, high, 5)] == labels


def test_percent_ticks_label_fractions() -> None:
    found = ticks(-0.004, 0.004, 5, percent=True)
    assert [text for _, text in found] == ["-0.4 %", "-0.2 %", "0.0 %", "0.2 %", "0.4 %"]
    assert found[0][0] == pytest.approx(-0.004)


def test_it_is_well_formed_and_accessible() -> None:
    root = ET.fromstring(svg(LOSS))
    assert root.get("role") == "img"
    title, desc = root.find("title"), root.find("desc")
    assert title is not None and desc is not None
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert (title.text, desc.text) == ("Training loss & more", "It falls.")


def test_colours_are_left_to_the_page() -> None:
    text = svg(LOSS)
    assert not re.search(r"#[0-9a-f]{3,6}|rgb|style=|fill=|stroke=", text)
    assert 'class="s s0"' in text and 'class="s s1"' in text


def test_points_lie_inside_of_the_picture_even_when_values_do_not() -> None:
    lines = [Line("B", "B FP8", [1, 2, 3], [0.0, 5.0, -5.0])]
    gap = Chart(
        "g",
        "Gap",
        "d",
        "gap",
        "gap",
        lines,
        faint=lines,
        band=([1, 2, 3], [-9.0] * 3, [9.0] * 3),
        levels=[(0.001, "+")],
        y_limits=(-0.01, 0.01),
    )
    for path in re.findall(r' d="M([^"]+)"', svg(gap)):
        numbers = [float(n) for n in re.findall(r"-?\d+\.?\d*", path)]
        assert all(0 <= n <= max(WIDTH, HEIGHT) for n in numbers)
    assert "band" in svg(gap) and "faint" in svg(gap) and "level" in svg(gap)


def test_a_candidate_keeps_its_style_in_the_gap_plot() -> None:
    gap = Chart("g", "Gap", "d", "gap", "gap", LINES[1:], levels=[(0.0, "0")])
    assert [style for style, _ in legend(LOSS)] == ["s s0", "s s1"]
    assert [style for style, _ in legend(gap)] == ["s s1"]
