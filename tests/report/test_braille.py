"""Plots as text."""

from __future__ import annotations

from fp8ctl.report.braille import draw, limits, x_limits
from fp8ctl.report.document import Chart, Line


def chart(**settings) -> Chart:
    lines = [Line("A", "A BF16", list(range(1, 101)), [4 - i / 50 for i in range(100)])]
    lines.append(Line("B", "B FP8", list(range(1, 101)), [4 - i / 60 for i in range(100)]))
    return Chart("loss", "Training loss", "falls", "loss", "loss", lines, **settings)


def test_size_axes_and_legend() -> None:
    rows = draw(chart(), 60, with_colors=False, height=8).split("\n")
    assert len(rows) == 8 + 3
    assert max(map(len, rows)) <= 60
    assert rows[0].startswith("    3.") and " |" in rows[0]
    assert rows[-2].split() == ["step", "1", "100"]
    assert rows[-1].split() == ["A", "BF16", "B", "FP8"]


def test_each_curve_carries_its_letter_along_its_course() -> None:
    rows = draw(chart(), 80, with_colors=False, height=12).split("\n")[:12]
    for letter in "AB":
        assert sum(row.count(letter) for row in rows) >= 6
    assert "\u2800" not in "".join(rows)
    falling = [row.index("A") for row in rows if "A" in row]
    assert falling == sorted(falling)


def test_reference_levels_are_named_on_their_rows() -> None:
    lines = [Line("B", "B FP8", [1, 2, 3], [0.0005, 0.001, 0.0008])]
    levels = [(0.0025, "+0.25 %"), (0.0, "0"), (-0.0025, "-0.25 %")]
    gap = Chart("gap", "Gap", "small", "gap", "gap", lines, levels=levels, y_limits=(-0.004, 0.004))
    rows = draw(gap, 60, with_colors=False, height=10).split("\n")
    named = [row.split("|")[0].strip() for row in rows[:10]]
    assert [name for name in named if name] == ["+0.360 %", "+0.25 %", "0", "-0.25 %", "-0.360 %"]


def test_a_flat_or_single_point_curve_can_be_drawn() -> None:
    for x, y in (([5], [2.0]), ([1, 2], [0.0, 0.0])):
        flat = Chart("loss", "T", "d", "loss", "loss", [Line("A", "A BF16", x, y)])
        assert limits(flat)[0] < limits(flat)[1]
        assert x_limits(flat)[0] < x_limits(flat)[1]
        assert "A" in draw(flat, 50, with_colors=False, height=5)


def test_values_beyond_the_range_are_cut_at_its_edge() -> None:
    lines = [Line("A", "A BF16", [1, 2, 3], [0.0, 99.0, 0.0])]
    rows = draw(Chart("l", "T", "d", "loss", "loss", lines, y_limits=(-1.0, 1.0)), 50, with_colors=False, height=5)
    assert "99" not in rows
