"""Reads one run folder for a report. Whatever is missing or damaged becomes a line in `problems`, never the end of the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from fp8ctl.errors import Fp8ctlError
from fp8ctl.track.metrics import METRICS
from fp8ctl.track.record import RunRecord, read_jsonl

T = TypeVar("T")


@dataclass(frozen=True)
class Evaluation:
    """One evaluation stored in a run."""

    name: str
    """Folder name under eval/."""
    result: dict[str, Any]
    """Its result.json."""
    scores: dict[tuple[str, int], list[float]]
    """(family, question index) -> score of each sample, from completions.jsonl; empty where there is none."""

    @property
    def suite(self) -> str:
        """Name of the question set."""
        return str(self.result.get("suite") or self.name)

    @property
    def precision(self) -> str:
        """Precision of inference, as the evaluation itself states it."""
        return str(self.result.get("precision") or "unknown")


@dataclass
class Run:
    """Everything a report needs of one run."""

    label: str
    """Letter that stands for the run in tables and plots."""
    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    coverage: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Numbers of the logged steps, rising."""
    series: dict[str, np.ndarray] = field(default_factory=dict)
    """Metric -> value at each of `steps`; NaN where it was not logged."""
    num_repeated: int = 0
    """Lines of metrics.jsonl that a resumed run wrote again."""
    problems: list[str] = field(default_factory=list)
    """What is missing or damaged."""

    @property
    def stage(self) -> str:
        """cpt or sft; `unknown` without a config."""
        return str(self.config.get("stage", "unknown"))

    @property
    def is_fp8(self) -> bool:
        """Whether the settings ask for FP8 anywhere."""
        precision = self.config.get("precision", {})
        return "fp8" in (precision.get("default"), *(rule.get("precision") for rule in precision.get("rules", ())))

    @property
    def precision(self) -> str:
        """`BF16`, or `FP8` with the recipe's name."""
        precision = self.config.get("precision")
        if not precision:
            return "unknown"
        return f"FP8 {precision.get('recipe', {}).get('name', '')}".strip() if self.is_fp8 else "BF16"

    @property
    def title(self) -> str:
        """How tables head the run: letter and precision."""
        return f"{self.label} {self.precision}"

    @property
    def device(self) -> str:
        """`cpu`, `cuda` or `unknown`."""
        asked = str(self.config.get("engine", {}).get("device", "auto"))
        recorded = str(self.env.get("device") or "") or ("" if asked == "auto" else asked)
        if not recorded and "gpus" in self.env:
            recorded = "cuda" if self.env["gpus"] else "cpu"
        return recorded or "unknown"

    @property
    def backend(self) -> str:
        """What executed the FP8 GEMMs; empty where nothing says so."""
        backend = self.env.get("backend")
        return str(backend.get("name", "")) if isinstance(backend, dict) else ""

    @property
    def is_emulated(self) -> bool:
        """Whether its speed says nothing about FP8 hardware."""
        return self.device.startswith("cpu") or (self.is_fp8 and self.backend == "reference")

    @property
    def state(self) -> str:
        """State of status.json; `unknown` without one."""
        return str(self.status.get("state", "unknown"))

    @property
    def is_finished(self) -> bool:
        """Whether the run reached its end: by its status or, without one, by its last step."""
        if "state" in self.status:
            return self.state == "finished"
        planned = self.config.get("loop", {}).get("num_steps")
        return planned is not None and len(self.steps) > 0 and int(self.steps[-1]) >= planned

    def values(self, metric: str) -> np.ndarray:
        """One metric at each of `steps`, NaN where it is absent."""
        return self.series.get(metric, np.full(len(self.steps), math.nan))


def load_run(folder: Path, label: str) -> Run:
    """Reads a run folder.

    Raises:
        DataError: there is no such folder, or it is no run folder.
    """
    record = RunRecord(folder)
    paths = record.paths
    run = Run(label, folder, record.name)
    run.config = _attempt(run, "config.yaml", record.config, {})
    run.env = _attempt(run, "env.json", lambda: record.json(paths.env), {})
    run.status = _attempt(run, "status.json", lambda: record.json(paths.status), {})
    run.plan = _attempt(run, "plan.json", lambda: record.json(paths.plan), {})
    run.coverage = _attempt(run, "coverage.json", lambda: record.json(paths.coverage), {})
    run.events = _attempt(run, "events.jsonl", record.events, [])
    _read_steps(run, record)
    _read_evaluations(run, record)

    missing = {
        "config.yaml": (run.config, "settings unknown, so nothing shows that it is the same experiment"),
        "env.json": (run.env, "hardware and versions unknown"),
        "status.json": (run.status, "unknown how the run ended"),
        "coverage.json": (run.coverage or not run.is_fp8, "no count of executed FP8 GEMMs"),
        "metrics.jsonl": (len(run.steps), "no step was logged: no loss, no speed"),
        "eval/": (run.evaluations or any(paths.eval.glob("*")), "no accuracy"),
    }
    damaged = {problem.split(" ")[0] for problem in run.problems}
    run.problems += [
        f"{name} missing: {so}" for name, (there, so) in missing.items() if not there and name not in damaged
    ]
    return run


def _read_steps(run: Run, record: RunRecord) -> None:
    lines: list[dict[str, Any]] = _attempt(run, "metrics.jsonl", lambda: read_jsonl(record.paths.metrics), [])
    by_step = {line["step"]: line for line in lines if isinstance(line.get("step"), int)}
    run.steps = np.array(sorted(by_step), dtype=np.int64)
    run.num_repeated = len(lines) - len(by_step)
    rows = [by_step[step] for step in run.steps.tolist()]
    for metric in METRICS:
        if any(metric in row for row in rows):
            run.series[metric] = np.array([math.nan if (v := number(row.get(metric))) is None else v for row in rows])


def _read_evaluations(run: Run, record: RunRecord) -> None:
    for folder in sorted(path for path in record.paths.eval.glob("*") if path.is_dir()):
        name = f"eval/{folder.name}"
        if not (folder / "result.json").exists():
            run.problems.append(f"{name} unfinished: no result.json")
            continue
        evaluation = _attempt(run, name, partial(_evaluation, record, folder / "result.json"), None)
        if evaluation is not None:
            run.evaluations.append(evaluation)


def _evaluation(record: RunRecord, path: Path) -> Evaluation:
    scores: dict[tuple[str, int], list[float]] = {}
    for line in read_jsonl(path.with_name("completions.jsonl")):
        scores.setdefault((str(line["family"]), int(line["index"])), []).append(float(line["score"]))
    return Evaluation(path.parent.name, record.json(path), scores)


def _attempt(run: Run, name: str, read: Callable[[], T], otherwise: T) -> T:
    try:
        value = read()
    except (Fp8ctlError, OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        detail = error.message if isinstance(error, Fp8ctlError) else f"{type(error).__name__}: {error}".splitlines()[0]
        run.problems.append(f"{name} unreadable ({detail})")
        return otherwise
    return otherwise if value is None else value


def number(value: Any) -> float | None:
    """A finite number of a JSON file, or None."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
