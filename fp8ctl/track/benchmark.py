"""Stored measurements: docs/benchmarks/NAME.json, written by what measured, and its tables in NAME.md."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fp8ctl.errors import ConfigError
from fp8ctl.track.environment import collect_environment
from fp8ctl.track.markdown import table_lines
from fp8ctl.track.record import write_json

SCHEMA = 1
"""Version of the benchmark's JSON."""

FOLDER = Path("docs/benchmarks")
"""Where benchmarks are stored, from the top of a checkout."""

_SHOWN_VERSIONS = ("fp8ctl", "python", "torch", "triton", "deepspeed", "transformer-engine", "torchao", "transformers")
_SAME = ("commit", "hardware", "versions")


@dataclass(frozen=True)
class Bar:
    """A measured value and what it was to be."""

    name: str
    value: float
    target: float
    unit: str
    better: Literal["higher", "lower"]
    reason: str = ""
    """Why it does not hold; stands in the file only then."""

    @property
    def holds(self) -> bool:
        """Whether the value reaches the target; a value equal to it does."""
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def make_benchmark(
    rows: Sequence[dict[str, Any]], bars: Sequence[Bar], command: str, environment: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of NAME.json.

    Args:
        rows: flat objects, the measurements; a column each key. Rows that differ in `table`, if they have it, are shown apart.
        command: the command line that measured.
        environment: what was measured on, as `collect_environment` gives it; default: this machine, now.
    """
    measured_on = collect_environment() if environment is None else environment
    return {
        "schema": SCHEMA,
        "command": command,
        "commit": (measured_on.get("git") or {}).get("commit"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": {key: measured_on.get(key) for key in ("cpu", "memory_bytes", "gpus", "platform")},
        "versions": {
            "fp8ctl": measured_on.get("fp8ctl"),
            "python": measured_on.get("python"),
            **(measured_on.get("packages") or {}),
        },
        "bars": [_bar(bar) for bar in bars],
        "rows": list(rows),
    }


def store_benchmark(name: str, record: dict[str, Any], folder: Path = FOLDER, case: str | None = None) -> Path:
    """Writes what `make_benchmark` made; returns the path of the JSON.

    With `case`, what the same code measured on the same machine for other cases stays in the file: rows of another `case`, bars
    whose name does not begin with this one, and the commands that measured them.

    Raises:
        ConfigError: `name` is no plain file name.
    """
    check_name(name)
    path = folder / f"{name}.json"
    if case is not None and path.exists():
        record = _joined(json.loads(path.read_text(encoding="utf-8")), record, case)
    write_json(path, record)
    path.with_suffix(".md").write_text(_markdown(name, record), encoding="utf-8")
    return path


def check_name(name: str) -> None:
    """Raises ConfigError for what can't name a benchmark; for asking before hours of measuring."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name):
        raise ConfigError(
            f"not a name of a benchmark: {name}", "use lower-case letters, digits and hyphens, e.g. demo-cpu"
        )


def _joined(stored: dict[str, Any], record: dict[str, Any], case: str) -> dict[str, Any]:
    if record["commit"] is None or any(stored.get(key) != record[key] for key in _SAME):
        return record
    rows = [row for row in stored["rows"] if row.get("case") != case]
    if not rows:
        return record
    bars = [bar for bar in stored["bars"] if not bar["name"].startswith(f"{case}: ")]
    commands = [command for command in stored["command"].split("; ") if command != record["command"]]
    return {
        **record,
        "command": "; ".join([*commands, record["command"]]),
        "bars": bars + record["bars"],
        "rows": rows + record["rows"],
    }


def _bar(bar: Bar) -> dict[str, Any]:
    stored = {**asdict(bar), "holds": bar.holds}
    if bar.holds:
        del stored["reason"]
    return stored


def _markdown(name: str, record: dict[str, Any]) -> str:
    cpu, gpus = record["hardware"]["cpu"] or {}, record["hardware"]["gpus"] or []
    hardware = ", ".join(
        [*(str(gpu.get("name")) for gpu in gpus), f"{cpu.get('model')}, {cpu.get('usable_cores')} cores"]
    )
    versions = ", ".join(
        f"{key} {value}" for key, value in record["versions"].items() if value and key in _SHOWN_VERSIONS
    )
    bars = [
        [
            bar["name"],
            number(bar["value"]),
            f"{'>=' if bar['better'] == 'higher' else '<='} {number(bar['target'])}",
            bar["unit"],
        ]
        + ["yes" if bar["holds"] else f"no: {bar['reason']}"]
        for bar in record["bars"]
    ]
    return "\n".join(
        [
            f"# {name}",
            "",
            f"Measured {record['date']} with `{record['command']}`, commit {record['commit']}.",
            f"{hardware}. {versions}.",
            f"Stored figures: [{name}.json]({name}.json).",
            "",
            *table_lines(["bar", "value", "target", "unit", "holds"], bars),
            "",
            *_row_tables(record["rows"]),
        ]
    )


def _row_tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for title in dict.fromkeys(row.get("table") for row in rows):
        shown = [{k: v for k, v in row.items() if k != "table"} for row in rows if row.get("table") == title]
        columns = list(dict.fromkeys(key for row in shown for key in row))
        lines += [f"## {title}", ""] if title else []
        if len(columns) > len(shown):
            # Measurements are wide and few: a column each.
            turned = [[column, *(number(row.get(column)) for row in shown)] for column in columns]
            lines += table_lines(["", *(str(n + 1) for n in range(len(shown)))], turned)
        else:
            lines += table_lines(columns, [[number(row.get(column)) for column in columns] for row in shown])
        lines.append("")
    return lines


def number(value: Any) -> str:
    """A stored value as the tables show it: five digits of a float, `-` for nothing."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
