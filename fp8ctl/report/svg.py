"""Plots as inline SVG: no script, no font, no colour of their own, so that the page's light and dark themes apply."""

from __future__ import annotations

import math
from html import escape

from fp8ctl.report.braille import limits, x_limits
from fp8ctl.report.document import Chart, Line

WIDTH, HEIGHT = 480, 290
"""Size in user units; small, so that text stays readable when a phone scales the plot down to its width."""

LEFT, RIGHT, TOP, BOTTOM = 62, 12, 10, 40
"""Margins around the plot."""

NUM_STYLES = 6
"""Line styles (colour and dashes) that the page defines; more runs start over."""


def svg(chart: Chart) -> str:
    """One plot; its classes (`s0`, `faint`, `band`, `level`, `grid`, `axis`) are styled by the page."""
    low, high = limits(chart)
    first, last = x_limits(chart)

    def x_of(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return TOP + (high - min(max(value, low), high)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(x: list[float], y: list[float]) -> str:
        return "M" + "L".join(f"{x_of(a):.1f} {y_of(b):.1f}" for a, b in zip(x, y, strict=True))

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{chart.key}-t {chart.key}-d">',
        f'<title id="{chart.key}-t">{escape(chart.title)}</title><desc id="{chart.key}-d">{escape(chart.description)}</desc>',
    ]
    for value, text in ticks(low, high, 5, percent=chart.y_kind == "gap"):
        parts.append(f'<path class="grid" d="M{LEFT} {y_of(value):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y_of(value) + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in ticks(first, last, 5):
        anchor = "end" if x_of(value) > WIDTH - RIGHT - 20 else "middle"
        parts.append(
            f'<text class="tick" x="{x_of(value):.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="{anchor}">{text}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>'
    )
    if chart.band:
        x, band_low, band_high = chart.band
        parts.append(f'<path class="band" d="{path(x, band_high)}L{path(x[::-1], band_low[::-1])[1:]}Z"/>')
    parts += [f'<path class="faint" d="{path(line.x, line.y)}"/>' for line in chart.faint]
    for value, name in chart.levels:
        parts.append(f'<path class="level{"" if value else " zero"}" d="M{LEFT} {y_of(value):.1f}H{WIDTH - RIGHT}"/>')
        if value:
            parts.append(
                f'<text class="tick" x="{WIDTH - RIGHT - 2}" y="{y_of(value) - 4:.1f}" text-anchor="end">{escape(name)}</text>'
            )
    parts += [f'<path class="{style(chart, i)}" d="{path(line.x, line.y)}"/>' for i, line in enumerate(chart.lines)]
    return "".join(parts) + "</svg>"


def style(chart: Chart, number: int) -> str:
    """Class of a curve: a run keeps its style in all plots of its stage, so a plot without the baseline starts at the second."""
    return f"s s{(number + (1 if chart.levels else 0)) % NUM_STYLES}"


def legend(chart: Chart) -> list[tuple[str, Line]]:
    """Style and line of each curve."""
    return [(style(chart, i), line) for i, line in enumerate(chart.lines)]


def ticks(low: float, high: float, most: int, *, percent: bool = False) -> list[tuple[float, str]]:
    """Round values within a range, at most about `most`, with their labels; `percent` labels fractions as percent."""
    scale = 100.0 if percent else 1.0
    raw = (high - low) * scale / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    start, stop = math.ceil(low * scale / step - 1e-9), math.floor(high * scale / step + 1e-9)
    unit = " %" if percent else ""
    return [(i * step / scale, f"{i * step + 0.0:,.{digits}f}{unit}") for i in range(start, stop + 1)]
