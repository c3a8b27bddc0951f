"""The report's tables as CSV, one figure a line."""

from __future__ import annotations

import csv
import io
from typing import Any

from fp8ctl.report.content import sections
from fp8ctl.report.document import Table


def to_csv(report: dict[str, Any]) -> str:
    """Lines of section, table, row, column, text, value: the figure as all views show it, and unrounded as in the record."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(["section", "table", "row", "column", "text", "value"])
    for section in sections(report):
        for table in (block for block in section.blocks if isinstance(block, Table)):
            for row in table.rows:
                for column, cell in zip(table.columns[1:], row[1:], strict=True):
                    lines.writerow(
                        [
                            section.title,
                            table.key,
                            row[0].text,
                            column,
                            cell.text,
                            "" if cell.value is None else repr(cell.value),
                        ]
                    )
    return out.getvalue()
