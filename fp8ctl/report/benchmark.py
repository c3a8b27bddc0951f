"""Stored measurements: docs/benchmarks/NAME.json, written by what measured, and its table in NAME.md."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from fp8ctl.errors import ConfigError
from fp8ctl.report import figures
from fp8ctl.report.content import comparisons_of, run_of
from fp8ctl.report.loss import MARGIN
from fp8ctl.report.markdown import escape
from fp8ctl.track.environment import collect_environment
from fp8ctl.track.record import write_json

SCHEMA = 1
"""Version of the benchmark's JSON."""

FOLDER = Path("docs/benchmarks")
"""Where benchmarks are stored, from the top of a checkout."""

EMULATED_STEP_RATIO = 2.5
"""Bar: most that a step with emulated FP8 may cost, in BF16 steps on the same CPU."""


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


def write_benchmark(
    name: str,
    rows: Sequence[dict[str, Any]],
    bars: Sequence[Bar],
    command: str,
    folder: Path,
    environment: dict[str, Any] | None = None,
) -> Path:
    """Writes NAME.json and NAME.md into `folder` and returns the path of the JSON.

    Args:
        rows: flat objects, the measurements; a column each key.
        command: the command line that measured.
        environment: what was measured on, as `collect_environment` gives it; default: this machine, now.

    Raises:
        ConfigError: `name` is no plain file name.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", name):
        raise ConfigError(
            f"not a name of a benchmark: {name}", "use lower-case letters, digits and hyphens, e.g. demo-cpu"
        )
    measured_on = collect_environment() if environment is None else environment
    record = {
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
    path = folder / f"{name}.json"
    write_json(path, record)
    path.with_suffix(".md").write_text(_markdown(name, record), encoding="utf-8")
    return path


def write_report_benchmark(name: str, report: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Stores a report's comparisons as a benchmark: a row per comparison; bars for loss and, where FP8 is emulated, its cost.

    Raises:
        ConfigError: the report compares nothing.
    """
    comparisons = comparisons_of(report)
    if not comparisons:
        raise ConfigError(
            "a report of one run has nothing to store as a benchmark",
            "give the baseline and the run to compare with it",
        )
    run = run_of(report)
    rows = [_row(run(c["baseline"]), run(c["candidate"]), c) for c in comparisons]
    bars = [bar for c in comparisons for bar in _bars(run(c["candidate"])["stage"], c)]
    here = collect_environment()
    measured_on = report["runs"][0]["environment"] or here
    return write_benchmark(name, rows, bars, shlex.join(["fp8ctl", *here["command"][1:]]), folder, measured_on)


def _row(baseline: dict[str, Any], candidate: dict[str, Any], comparison: dict[str, Any]) -> dict[str, Any]:
    ratios, gap = comparison["ratios"] or {}, comparison["gap"] or {}
    step, relative = ratios.get("step") or {}, gap.get("gap") or {}
    paired: dict[str, Any] = min(comparison["paired"], key=lambda p: p["difference"]["value"], default={})
    difference = paired.get("difference") or {}
    efficiency = [run["efficiency"] or {} for run in (baseline, candidate)]
    return {
        "stage": candidate["stage"],
        "model": candidate["model"]["name"],
        "baseline": baseline["precision"],
        "candidate": candidate["precision"],
        "verdict": comparison["verdict"]["verdict"],
        "rule": comparison["verdict"]["rule"],
        "steps": candidate["num_steps"],
        "tokens": efficiency[1].get("tokens"),
        "is_emulated": comparison["speed_is_emulated"],
        "baseline_step_s": efficiency[0].get("step_median_s"),
        "candidate_step_s": efficiency[1].get("step_median_s"),
        "step_ratio": step.get("value"),
        "step_ratio_low": step.get("low"),
        "step_ratio_high": step.get("high"),
        "memory_ratio": ratios.get("memory"),
        "fp8_flops_share": (candidate["coverage"] or {}).get("total"),
        "baseline_loss": gap.get("baseline"),
        "candidate_loss": gap.get("candidate"),
        "loss_gap": relative.get("value"),
        "loss_gap_low": relative.get("low"),
        "loss_gap_high": relative.get("high"),
        "validation_gap": gap.get("validation_gap"),
        "accuracy_baseline": paired.get("baseline"),
        "accuracy_candidate": paired.get("candidate"),
        "accuracy_difference": difference.get("value"),
        "accuracy_low": difference.get("low"),
        "accuracy_high": difference.get("high"),
        "accuracy_questions": paired.get("num_questions"),
    }


def _bars(stage: str, comparison: dict[str, Any]) -> list[Bar]:
    ratios, gap, found = comparison["ratios"] or {}, (comparison["gap"] or {}).get("gap") or {}, []
    step = (ratios.get("step") or {}).get("value")
    if step is not None:
        emulated = comparison["speed_is_emulated"]
        what, target = ("emulated FP8", EMULATED_STEP_RATIO) if emulated else ("FP8", 1.0)
        reason = f"a median step takes {figures.text(step, 'ratio')} of the baseline's"
        found.append(Bar(f"{stage}: step time, {what} / BF16", step, target, "x", "lower", reason))
    if gap.get("value") is not None:
        reason = (
            f"95 % band {figures.between(gap['low'], gap['high'], 'gap')}; verdict: {comparison['verdict']['verdict']}"
        )
        found.append(
            Bar(f"{stage}: training loss gap, last 10 %", gap["value"] * 100, MARGIN * 100, "%", "lower", reason)
        )
    return found


def _bar(bar: Bar) -> dict[str, Any]:
    stored = {**asdict(bar), "holds": bar.holds}
    if bar.holds:
        del stored["reason"]
    return stored


def _markdown(name: str, record: dict[str, Any]) -> str:
    columns = list(dict.fromkeys(key for row in record["rows"] for key in row))
    cpu, gpus = record["hardware"]["cpu"] or {}, record["hardware"]["gpus"] or []
    hardware = ", ".join(
        [*(str(gpu.get("name")) for gpu in gpus), f"{cpu.get('model')}, {cpu.get('usable_cores')} cores"]
    )
    versions = ", ".join(
        f"{key} {value}"
        for key, value in record["versions"].items()
        if value and key in ("fp8ctl", "python", "torch", "deepspeed")
    )
    bars = [
        [
            bar["name"],
            _number(bar["value"]),
            f"{'>=' if bar['better'] == 'higher' else '<='} {_number(bar['target'])}",
            bar["unit"],
        ]
        + ["yes" if bar["holds"] else f"no: {bar['reason']}"]
        for bar in record["bars"]
    ]
    # Measurements are wide and few: a column each.
    rows = [[column, *(_number(row.get(column)) for row in record["rows"])] for column in columns]
    return "\n".join(
        [
            f"# {name}",
            "",
            f"Measured {record['date']} with `{record['command']}`, commit {record['commit']}.",
            f"{hardware}. {versions}.",
            f"Stored figures: [{name}.json]({name}.json).",
            "",
            *_table(["bar", "value", "target", "unit", "holds"], bars),
            "",
            *_table(["", *(str(number + 1) for number in range(len(record["rows"])))], rows),
            "",
        ]
    )


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *([escape(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _number(value: Any) -> str:
    if value is None:
        return figures.ABSENT
    return f"{value:.5g}" if isinstance(value, float) else str(value)
