"""Tables in GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence


def escape(text: str) -> str:
    """Keeps text from being read as markup; code spans stay."""
    return re.sub(r"([|*_<>\[\]])", r"\\\1", text.replace("\\", "\\\\")).replace("\n", " ")


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, a line each row; cells are escaped."""
    lines = [
        [escape(cell) for cell in header],
        ["---"] * len(header),
        *([escape(cell) for cell in row] for row in rows),
    ]
    return [f"| {' | '.join(line)} |" for line in lines]
