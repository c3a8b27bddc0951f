"""Plots as text, in braille dots: for the terminal and for Markdown."""

from __future__ import annotations

import textwrap

import numpy as np
import plotille

from fp8ctl.report import figures
from fp8ctl.report.document import Chart

COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")
"""Colours of the curves, in order of runs; the letters on them tell them apart without colour."""

_LABELS = 10
"""Characters left of the plot."""

_EMPTY = "\u2800"

_LETTERS = 8
"""Letters along each curve."""


def draw(chart: Chart, width: int, *, with_colors: bool, height: int = 14) -> str:
    """The plot with axes and legend, `width` characters wide and `height` + 3 lines high.

    Each curve carries its run's letter at several places, so that it is known without colour; reference levels are dotted. The
    band and the unsmoothed points of a plot are left out.
    """
    low, high = limits(chart)
    first, last = x_limits(chart)
    columns = max(20, width - _LABELS - 2)
    # The top and right edges of the canvas lie outside of it: one dot more (2 x 4 dots a character) takes them in.
    right, top = last + (last - first) / (2 * columns), high + (high - low) / (4 * height)
    canvas = plotille.Canvas(columns, height, first, low, right, top)
    for level, _ in chart.levels:
        for x in np.linspace(first, last, columns):
            canvas.point(float(x), level, color="white" if with_colors else None)
    for number, line in enumerate(chart.lines):
        color = COLORS[number % len(COLORS)] if with_colors else None
        points = list(zip(line.x, np.clip(line.y, low, high).tolist(), strict=True))
        for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
            canvas.line(float(x0), y0, float(x1), y1, color=color)
    for number, line in enumerate(chart.lines):
        # Curves of matched runs lie on each other: staggered letters don't.
        share = (np.arange(_LETTERS) + (number + 0.5) / len(chart.lines)) / _LETTERS
        for i in np.unique((share * len(line.x)).astype(int)):
            y = float(np.clip(line.y[i], low, high))
            canvas.text(float(line.x[i]), y, line.label[0], color=COLORS[number % len(COLORS)] if with_colors else None)
    rows = canvas.plot(linesep="\n").split("\n")
    labels = _y_labels(chart, low, high, height)
    # Some fonts draw the empty braille character as hollow dots.
    plot = [f"{labels.get(i, ''):>{_LABELS}} |{row}".replace(_EMPTY, " ").rstrip() for i, row in enumerate(rows)]
    axis = f"{'':>{_LABELS}} +{'-' * columns}"
    ends = f"step {first:,.0f}", f"{last:,.0f}"
    scale = f"{'':>{_LABELS + 2}}{ends[0]}{ends[1]:>{columns - len(ends[0])}}"
    names = [
        f"{line.label} {line.name.removeprefix(line.label).strip()}".replace(" ", "\N{NO-BREAK SPACE}")
        for line in chart.lines
    ]
    margin = " " * (_LABELS + 2)
    legend = textwrap.wrap("   ".join(names), width, initial_indent=margin, subsequent_indent=margin)
    return "\n".join([*plot, axis, scale, *legend]).replace("\N{NO-BREAK SPACE}", " ")


def limits(chart: Chart) -> tuple[float, float]:
    """Range of the y axis, never empty."""
    if chart.y_limits is not None:
        return chart.y_limits
    values = np.concatenate([line.y for line in chart.lines])
    low, high = float(values.min()), float(values.max())
    room = (high - low) * 0.04 or abs(high) * 0.01 or 1.0
    return low - room, high + room


def x_limits(chart: Chart) -> tuple[float, float]:
    """Range of the x axis, never empty."""
    drawn = [*chart.lines, *chart.faint]
    first, last = min(line.x[0] for line in drawn), max(line.x[-1] for line in drawn)
    return float(first), float(last if last > first else first + 1)


def _y_labels(chart: Chart, low: float, high: float, height: int) -> dict[int, str]:
    row_height = (high - low) / height
    values = [high - row_height / 2, (low + high) / 2, low + row_height / 2]
    labels = {min(height - 1, int((high - value) / row_height)): figures.text(value, chart.y_kind) for value in values}
    # A reference level keeps its name even where it falls on the row of an ordinary label.
    return labels | {int((high - level) / row_height): name for level, name in chart.levels if low < level < high}
