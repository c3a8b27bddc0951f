"""What the report says, in which order: headings, sentences, tables and plots, the same for every view.

The views (terminal, Markdown, HTML, CSV) lay these blocks out and add nothing, so they can't disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from fp8ctl.report import figures
from fp8ctl.report.figures import Kind

Json = dict[str, Any]
"""The record of a report, or a part of it."""

Tone = Literal["", "good", "bad", "warn", "dim"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    text: str
    tone: Tone = ""
    value: float | None = None
    """The figure behind the text, in the units of the JSON record."""


@dataclass(frozen=True)
class Table:
    """A table; the first column names the row."""

    key: str
    """Short name, used in CSV."""
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    """How to read it."""
    group_size: int = 1
    """Columns, after the first, that a narrow view must not part when it cuts a table of figures in pieces."""
    is_detail: bool = False
    """Shown folded where a view can fold, and left out of the terminal."""
    numbers: bool = True
    """Whether all columns but the first hold figures, to be aligned right."""


@dataclass(frozen=True)
class Line:
    """One curve of a plot."""

    label: str
    """Letter of the run."""
    name: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Chart:
    """A plot of curves over steps."""

    key: str
    title: str
    description: str
    """What is to be seen, in words, for those who can't see it."""
    y_label: str
    y_kind: Kind
    lines: list[Line]
    faint: list[Line] = field(default_factory=list)
    """Unsmoothed values behind the curves."""
    band: tuple[list[float], list[float], list[float]] | None = None
    """x, low and high of a shaded band."""
    levels: list[tuple[float, str]] = field(default_factory=list)
    """Horizontal reference lines with their names."""
    y_limits: tuple[float, float] | None = None
    """Range shown; what lies outside is cut at the edge."""


@dataclass(frozen=True)
class Sentence:
    """A line of text."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Headline:
    """One verdict."""

    word: str
    tone: Tone
    who: str
    """Which runs, and the rule that decided."""
    reasons: list[str]


Block = Headline | Table | Chart | Sentence


@dataclass(frozen=True)
class Section:
    """A heading with its blocks."""

    title: str
    blocks: list[Block]


def figure(value: float | None, kind: Kind, tone: Tone = "") -> Cell:
    """A cell with a figure."""
    return Cell(figures.text(value, kind), tone if value is not None else "dim", value)


def words(text: Any, tone: Tone = "") -> Cell:
    """A cell with text."""
    shown = figures.ABSENT if text is None or text == "" else str(text)
    return Cell(shown, "dim" if shown == figures.ABSENT else tone)
