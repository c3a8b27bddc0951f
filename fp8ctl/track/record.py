"""The records of a run: what a step reports, and how a run folder is read and written.

metrics.jsonl is the record of truth; every sink is fed from it. Readers take the last line of each step, since a resumed run
writes some steps again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fp8ctl.errors import DataError
from fp8ctl.paths import RunPaths
from fp8ctl.track.redact import redact, redact_text

State = Literal["running", "finished", "failed", "preempted"]


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What one optimizer step reports, reduced over all ranks. Names and units: `track/metrics.py`.

    The monitor sees it before the update (times that are not known yet are 0), metrics.jsonl after it.
    """

    step: int
    """Number of the step; the first is 1."""
    loss: float
    grad_norm: float
    lr: float
    trainable_tokens: int
    tokens: int
    tokens_seen: int
    padding_share: float = 0.0
    is_finite: bool = True
    """Whether loss and gradient norm are finite on every rank."""
    sample_ids: tuple[int, ...] = ()
    """Global row numbers of the batch, so that it can be replayed; not logged."""
    step_time_s: float = 0.0
    data_wait_s: float = 0.0
    data_wait_share: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    tokens_per_second: float = 0.0
    memory_peak_bytes: int = 0
    fp8_flops_share: float = 0.0
    validation_loss: float | None = None
    validation_losses: dict[str, float] | None = None
    """Of each data set of a mixture, by its path."""

    def to_line(self) -> dict[str, Any]:
        """The object that goes into metrics.jsonl."""
        line = {
            k: v for k, v in dataclasses.asdict(self).items() if k not in ("sample_ids", "is_finite") and v is not None
        }
        return {**line, "time": round(time.time(), 3)}


def write_json(path: Path, value: Any) -> None:
    """Writes JSON atomically: a reader sees the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as f:
        # NaN and infinity as strings: bare NaN is no JSON, and readers of other languages refuse it
        json.dump(_plain(value), f, indent=2, ensure_ascii=False, allow_nan=False)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def append_jsonl(path: Path, value: Any) -> None:
    """Appends one object as one line with a single write, so that lines of a killed writer are whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps(_plain(value), ensure_ascii=False, allow_nan=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file; a half-written last line (killed writer) is left out. Absent file: empty list."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    out = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            out.append(_restore(json.loads(line)))
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise DataError(
                    f"{path} line {number} is not JSON", "the file was changed by hand or by a broken disk"
                ) from None
    return out


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    return value


def _restore(value: Any) -> Any:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {k: _restore(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore(v) for v in value]
    return value


class RunRecord:
    """Reader of one run folder; needs no torch. Missing pieces come back empty, so that a crashed run can be reported too."""

    def __init__(self, folder: Path | str) -> None:
        self.paths = RunPaths(folder)
        if not self.paths.root.is_dir():
            raise DataError(f"no run folder: {folder}", "give the folder that `fp8ctl train` printed")
        if not (self.paths.config.exists() or self.paths.metrics.exists()):
            raise DataError(f"not a run folder: {folder}", "a run folder holds config.yaml and metrics.jsonl")

    @property
    def name(self) -> str:
        """Folder name of the run."""
        return self.paths.root.resolve().name

    def config(self) -> dict[str, Any]:
        """The resolved settings, as plain data."""
        import yaml

        return yaml.safe_load(self.paths.config.read_text()) if self.paths.config.exists() else {}

    def steps(self) -> list[dict[str, Any]]:
        """Objects of metrics.jsonl, the last of each step, in order of steps."""
        by_step = {line["step"]: line for line in read_jsonl(self.paths.metrics)}
        return [by_step[s] for s in sorted(by_step)]

    def events(self) -> list[dict[str, Any]]:
        """Objects of events.jsonl in order of time."""
        return read_jsonl(self.paths.events)

    def json(self, path: Path) -> dict[str, Any]:
        """One JSON file of the folder (`self.paths.status`, `.env`, `.plan`, `.coverage`); absent: {}."""
        return _restore(json.loads(path.read_text())) if path.exists() else {}

    def eval_results(self) -> list[dict[str, Any]]:
        """Summaries of all evaluations stored in the run folder."""
        return [self.json(p) for p in sorted(self.paths.eval.glob("*/result.json"))]


def write_status(
    paths: RunPaths, state: State, *, step: int, cause: str = "", hint: str = "", exit_code: int | None = None
) -> None:
    """Writes status.json: the only thing that says how a run ended. Secrets in cause and hint are redacted."""
    cause, hint = redact_text(cause), redact_text(hint)
    write_json(
        paths.status,
        {
            "state": state,
            "step": step,
            "cause": cause,
            "hint": hint,
            "exit_code": exit_code,
            "time": round(time.time(), 3),
            "pid": os.getpid(),
        },
    )


def log_event(paths: RunPaths, kind: str, step: int, **details: Any) -> None:
    """Appends to events.jsonl: monitor decisions, checkpoints, signals, faults. Secrets in `details` are redacted."""
    append_jsonl(paths.events, {"time": round(time.time(), 3), "kind": kind, "step": step, **redact(details)})
