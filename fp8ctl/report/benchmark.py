"""A report's comparisons as a stored benchmark."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from fp8ctl.errors import ConfigError
from fp8ctl.report import figures
from fp8ctl.report.content import comparisons_of, run_of
from fp8ctl.report.loss import MARGIN
from fp8ctl.track.benchmark import FOLDER, Bar, make_benchmark, store_benchmark
from fp8ctl.track.environment import collect_environment

EMULATED_STEP_RATIO = 2.5
"""Bar: most that a step with emulated FP8 may cost, in BF16 steps on the same CPU."""


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
    command = shlex.join(["fp8ctl", *here["command"][1:]])
    return store_benchmark(name, make_benchmark(rows, bars, command, measured_on), folder)


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
