"""The report itself: run folders in, one plain dict out. Everything shown anywhere is a view of that dict."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import fp8ctl
from fp8ctl.errors import DataError
from fp8ctl.paths import shown_path
from fp8ctl.report import accuracy, coverage, efficiency, experiment, loss
from fp8ctl.report.load import Run, load_run
from fp8ctl.report.verdict import EMULATED, EXIT_CODES, SEVERITY, Evidence, judge

SCHEMA = 1
"""Version of the report's JSON."""

MAX_EVENTS = 20
"""Events listed per run; all are counted."""

ALONE = "nothing to compare"
"""The rule behind the verdict of a report without a comparison."""

_UNREMARKABLE = ("checkpoint", "backend", "attention")
"""Events that are counted and not listed."""

_STAGES = ("cpt", "sft", "unknown")


@dataclass(frozen=True)
class _Parts:
    """A run with the figures that comparisons need again."""

    run: Run
    loss: loss.Loss
    coverage: coverage.Covered | None


def make_report(folders: Sequence[Path]) -> dict[str, Any]:
    """Reads run folders and compares them, stage by stage; the first run of a stage is its baseline.

    The result is plain JSON data without NaN: schema, tool, time, runs (one object each: loss, efficiency, coverage, accuracy,
    events, environment, problems), stages (comparisons of each candidate with its baseline: differences, ratios, gap, paired
    accuracies, verdict), verdict (the most severe one) and notes. Seconds, bytes, nats per token; shares, gaps and accuracies
    are fractions.

    Raises:
        DataError: no folders, the same folder twice, or a folder that is no run.
    """
    if not folders:
        raise DataError("no run to report", "give one run folder, or the baseline and then the runs to compare with it")
    resolved = [Path(folder).resolve() for folder in folders]
    for folder, real in zip(folders, resolved, strict=True):
        if resolved.count(real) > 1:
            raise DataError(f"{folder} is given twice", "give each run once, the baseline first")
    parts = []
    for number, folder in enumerate(folders):
        run = load_run(Path(folder), _label(number))
        parts.append(_Parts(run, loss.summarize(run), coverage.summarize(run)))
    stages = [
        _stage(name, [p for p in parts if p.run.stage == name])
        for name in sorted({p.run.stage for p in parts}, key=_stage_order)
    ]
    report = {
        "schema": SCHEMA,
        "tool": {"name": "fp8ctl", "version": fp8ctl.__version__},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "verdict": _overall(stages),
        "runs": [_run(p) for p in parts],
        "stages": stages,
        "notes": _notes(parts, stages),
    }
    return _plain(report)


def exit_code(report: dict[str, Any]) -> int:
    """Exit code of `fp8ctl report --check`: 0 parity, 3 worse, 4 undecided or nothing to compare, 5 does not pay."""
    return EXIT_CODES[report["verdict"]["verdict"]]


def _stage(name: str, parts: list[_Parts]) -> dict[str, Any]:
    baseline, candidates = parts[0], parts[1:]
    return {
        "stage": name,
        "runs": [p.run.label for p in parts],
        "baseline": baseline.run.label,
        "comparisons": [_comparison(baseline, candidate) for candidate in candidates],
    }


def _comparison(baseline: _Parts, candidate: _Parts) -> dict[str, Any]:
    paired, unpaired = accuracy.compare(baseline.run, candidate.run)
    evidence = Evidence(
        baseline=baseline.run,
        candidate=candidate.run,
        match=experiment.match(baseline.run, candidate.run),
        losses=(baseline.loss, candidate.loss),
        gap=loss.compare(baseline.run, candidate.run),
        coverage=candidate.coverage,
        paired=paired,
        ratios=efficiency.compare(baseline.run, candidate.run),
    )
    return {
        "baseline": baseline.run.label,
        "candidate": candidate.run.label,
        "matched": evidence.match.is_matched,
        "differences": evidence.match.differences,
        "notes": evidence.match.notes + unpaired,
        "speed_is_emulated": baseline.run.is_emulated or candidate.run.is_emulated,
        "ratios": evidence.ratios,
        "gap": evidence.gap,
        "paired": evidence.paired,
        "verdict": judge(evidence),
    }


def _overall(stages: list[dict[str, Any]]) -> dict[str, Any]:
    found = [
        (c["verdict"], f"{c['candidate']} against {c['baseline']}") for stage in stages for c in stage["comparisons"]
    ]
    if not found:
        return {
            "verdict": "undecided",
            "rule": ALONE,
            "reasons": ["one run of a stage has figures, but no comparison"],
            "of": "",
        }
    verdict, of = min(found, key=lambda pair: SEVERITY.index(pair[0].verdict))
    return {"verdict": verdict.verdict, "rule": verdict.rule, "reasons": verdict.reasons, "of": of}


def _shown(path: str | None) -> str | None:
    return None if path is None else shown_path(path)


def _run(parts: _Parts) -> dict[str, Any]:
    run = parts.run
    model = run.config.get("model", {})
    return {
        "label": run.label,
        "title": run.title,
        "name": run.name,
        "folder": str(run.folder),
        "stage": run.stage,
        "precision": run.precision,
        "model": {"name": model.get("name"), "path": _shown(model.get("path"))},
        "data": _shown(run.config.get("data", {}).get("path")),
        "seed": run.config.get("seed"),
        "state": run.state,
        "cause": run.status.get("cause", ""),
        "hint": run.status.get("hint", ""),
        "device": run.device,
        "backend": run.backend or None,
        "is_emulated": run.is_emulated,
        "num_steps": len(run.steps),
        "last_step": int(run.steps[-1]) if len(run.steps) else None,
        "planned_steps": run.config.get("loop", {}).get("num_steps"),
        "num_repeated": run.num_repeated,
        "loss": parts.loss,
        "curve": loss.curve(run),
        "efficiency": efficiency.summarize(run),
        "coverage": parts.coverage,
        "accuracy": [accuracy.summarize(e) for e in run.evaluations],
        "inference": accuracy.compare_inference(run),
        "events": _events(run),
        "environment": run.env,
        "problems": run.problems,
    }


def _events(run: Run) -> dict[str, Any]:
    kinds = Counter(str(event.get("kind", "unknown")) for event in run.events)
    told = [event for event in run.events if event.get("kind") not in _UNREMARKABLE]
    return {"counts": dict(kinds), "shown": told[-MAX_EVENTS:], "num_left_out": max(0, len(told) - MAX_EVENTS)}


def _notes(parts: list[_Parts], stages: list[dict[str, Any]]) -> list[str]:
    notes = []
    if any(p.run.is_fp8 and p.run.is_emulated for p in parts):
        notes.append(f"{EMULATED}.")
    comparisons = [c for stage in stages for c in stage["comparisons"]]
    by_label = {p.run.label: p.run for p in parts}
    for comparison in comparisons:
        baseline, candidate = by_label[comparison["baseline"]], by_label[comparison["candidate"]]
        if baseline.is_fp8 and not candidate.is_fp8:
            notes.append(
                f"The baseline {baseline.title} runs in FP8 and {candidate.title} does not: give the BF16 run first."
            )
        elif not baseline.is_fp8 and not candidate.is_fp8:
            notes.append(
                f"{baseline.title} and {candidate.title} both run without FP8: their gap is a yardstick for noise."
            )
    if comparisons:
        notes.append("One seed per arm: the bands hold the noise within a run, not the spread between seeds.")
    return notes


def _stage_order(name: str) -> int:
    return _STAGES.index(name) if name in _STAGES else len(_STAGES)


def _label(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"R{number + 1}"


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
