"""Time and memory of a run, and of one run against another; the first steps, which are never typical, left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fp8ctl.report.load import Run
from fp8ctl.report.stats import Interval, median_ratio

MAX_WARMUP = 10
"""Steps left out at the start of a long run; of a short one, a tenth."""

PHASES = ("forward_s", "backward_s", "optimizer_s", "data_wait_s")


@dataclass(frozen=True)
class Efficiency:
    """Speed and memory of one run over its counted steps; seconds, tokens/s, bytes."""

    num_steps: int
    """Counted steps."""
    num_warmup: int
    """Steps left out: the first of the run and the first after each resume."""
    step_median_s: float
    step_p95_s: float
    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    data_wait_s: float | None
    """Medians of the phases of a step."""
    tokens_per_second: float | None
    """Tokens of the counted steps / their time, all ranks."""
    total_s: float
    """Time in all logged steps."""
    tokens: int | None
    """Tokens trained on in all logged steps."""
    memory_peak_bytes: float | None
    """Largest memory of any rank over the whole run."""


@dataclass(frozen=True)
class Ratios:
    """Candidate over baseline; None where one of them lacks the figure."""

    step: Interval | None
    """Of the median step times."""
    step_p95: float | None
    forward: float | None
    backward: float | None
    optimizer: float | None
    data_wait: float | None
    tokens_per_second: float | None
    memory: float | None


def summarize(run: Run) -> Efficiency | None:
    """Speed and memory of one run; None when it has no timed step."""
    counted = counted_steps(run)
    times = run.values("step_time_s")
    if not counted.any():
        return None
    timed, tokens = np.isfinite(times) & (times > 0), run.values("tokens")
    memory = run.values("memory_peak_bytes")
    has_tokens = bool(np.isfinite(tokens[timed]).all())
    return Efficiency(
        num_steps=int(counted.sum()),
        num_warmup=int((timed & ~counted).sum()),
        step_median_s=float(np.median(times[counted])),
        step_p95_s=float(np.quantile(times[counted], 0.95)),
        **{phase: _median(run.values(phase)[counted]) for phase in PHASES},
        tokens_per_second=float(tokens[counted].sum() / times[counted].sum()) if has_tokens else None,
        total_s=float(times[timed].sum()),
        tokens=int(tokens[timed].sum()) if has_tokens else None,
        memory_peak_bytes=float(np.nanmax(memory)) if np.nan_to_num(memory).any() else None,
    )


def counted_steps(run: Run) -> np.ndarray:
    """Mask of the timed steps that count: not the first tenth (at most `MAX_WARMUP`), not the step after a resume."""
    times = run.values("step_time_s")
    timed = np.flatnonzero(np.isfinite(times) & (times > 0))
    warmup = min(MAX_WARMUP, max(1, len(timed) // 10)) if len(timed) > 1 else 0
    resumed = {int(event.get("step") or 0) + 1 for event in run.events if "resume" in str(event.get("kind"))}
    counted = np.zeros(len(times), dtype=bool)
    counted[timed[warmup:]] = True
    after_resume = counted & np.isin(run.steps, list(resumed))
    return counted & ~after_resume if (counted & ~after_resume).any() else counted


def compare(baseline: Run, candidate: Run) -> Ratios | None:
    """Ratios of one run's figures to another's; None when one has no timed step."""
    b, c = summarize(baseline), summarize(candidate)
    if b is None or c is None:
        return None
    times = [run.values("step_time_s")[counted_steps(run)] for run in (candidate, baseline)]
    return Ratios(
        step=median_ratio(*times),
        step_p95=_ratio(c.step_p95_s, b.step_p95_s),
        forward=_ratio(c.forward_s, b.forward_s),
        backward=_ratio(c.backward_s, b.backward_s),
        optimizer=_ratio(c.optimizer_s, b.optimizer_s),
        data_wait=_ratio(c.data_wait_s, b.data_wait_s),
        tokens_per_second=_ratio(c.tokens_per_second, b.tokens_per_second),
        memory=_ratio(c.memory_peak_bytes, b.memory_peak_bytes),
    )


def _median(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _ratio(candidate: float | None, baseline: float | None) -> float | None:
    return candidate / baseline if candidate is not None and baseline else None
