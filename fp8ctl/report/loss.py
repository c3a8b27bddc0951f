"""Loss of a run, and the gap between two runs that saw the same batches in the same order.

At each step both arms see the same tokens, so the noise of the data cancels in the difference of their losses. What is left
is the effect of precision and the drift that any other rounding would cause too. With d_t = L_candidate(t) - L_baseline(t),

    gap = mean(d_t) / mean(L_baseline(t))      over the last 10 % of the common steps,

and its band is the batch-means interval of mean(d_t) (`stats.mean_interval`), divided by the same mean loss. One seed per arm:
the band holds no seed-to-seed noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fp8ctl.report.load import Run
from fp8ctl.report.stats import Interval, mean_interval, thin, window

MARGIN = 0.0025
"""Relative loss error that counts as parity: DeepSeek-V3 (arXiv 2412.19437) reports below 0.25 % of FP8 against BF16."""

MAX_POINTS = 2000
"""Most points of one curve in the record."""


@dataclass(frozen=True)
class Loss:
    """Loss figures of one run, in nats per token."""

    first: float | None
    final: float | None
    """Mean over the last 10 % of the steps; None when one of them is not finite."""
    final_steps: tuple[int, int] | None
    """First and last step of that mean."""
    validation: float | None
    validation_step: int | None
    grad_norm: float | None
    """Median over the run."""
    num_not_finite: int
    first_not_finite: int | None


@dataclass(frozen=True)
class Curve:
    """Points of a plot."""

    step: list[int]
    value: list[float]


@dataclass(frozen=True)
class Gap:
    """Loss of a candidate against a baseline over their common steps."""

    baseline: float
    candidate: float
    """Mean losses over the last 10 % of the common steps."""
    gap: Interval
    """(candidate - baseline) / baseline."""
    steps: tuple[int, int]
    num_steps: int
    """Paired steps in that window."""
    num_common: int
    worst: float
    """Largest gap over any window of that length."""
    worst_steps: tuple[int, int]
    validation_baseline: float | None
    validation_candidate: float | None
    validation_gap: float | None
    validation_step: int | None
    """Last step at which both have a validation loss."""
    per_step: Curve
    windows: Curve
    """The gap over sliding windows of that length, at their last step."""
    windows_low: list[float | None]
    windows_high: list[float | None]


def summarize(run: Run) -> Loss:
    """Loss figures of one run; None where there is nothing to say."""
    loss, n = run.values("loss"), window(len(run.steps))
    bad = np.flatnonzero(~np.isfinite(loss))
    end = loss[len(loss) - n :]
    validation = run.values("validation_loss")
    validated = np.flatnonzero(np.isfinite(validation))
    norms = run.values("grad_norm")
    norms = norms[np.isfinite(norms)]
    return Loss(
        first=_finite(loss[0]) if len(loss) else None,
        final=_finite(float(np.mean(end))) if n else None,
        final_steps=(int(run.steps[-n]), int(run.steps[-1])) if n else None,
        validation=float(validation[validated[-1]]) if len(validated) else None,
        validation_step=int(run.steps[validated[-1]]) if len(validated) else None,
        grad_norm=float(np.median(norms)) if len(norms) else None,
        num_not_finite=len(bad),
        first_not_finite=int(run.steps[bad[0]]) if len(bad) else None,
    )


def curve(run: Run) -> Curve:
    """Loss over steps, thinned without losing a spike; steps whose loss is not finite are absent."""
    return _curve(run.steps, run.values("loss"))


def compare(baseline: Run, candidate: Run) -> Gap | None:
    """The gap between two runs; None when they have no step with two finite losses in common."""
    steps, at_b, at_c = np.intersect1d(baseline.steps, candidate.steps, return_indices=True)
    loss_b, loss_c = baseline.values("loss")[at_b], candidate.values("loss")[at_c]
    both = np.isfinite(loss_b) & np.isfinite(loss_c)
    pairs, loss_b, loss_c = steps[both], loss_b[both], loss_c[both]
    if not len(pairs):
        return None
    n = window(len(pairs))
    stride = max(1, n // 10)
    ends = list(range(len(pairs), n - 1, -stride))[::-1]
    gaps = [_gap(loss_b[end - n : end], loss_c[end - n : end]) for end in ends]
    worst = int(np.argmax([g.value for g in gaps]))
    validation = _validation(baseline, candidate, steps, at_b, at_c)
    return Gap(
        baseline=float(np.mean(loss_b[-n:])),
        candidate=float(np.mean(loss_c[-n:])),
        gap=gaps[-1],
        steps=(int(pairs[-n]), int(pairs[-1])),
        num_steps=n,
        num_common=len(pairs),
        worst=gaps[worst].value,
        worst_steps=(int(pairs[ends[worst] - n]), int(pairs[ends[worst] - 1])),
        validation_baseline=validation[1] if validation else None,
        validation_candidate=validation[2] if validation else None,
        validation_gap=(validation[2] - validation[1]) / validation[1] if validation else None,
        validation_step=validation[0] if validation else None,
        per_step=_curve(pairs, (loss_c - loss_b) / loss_b),
        windows=Curve([int(pairs[end - 1]) for end in ends], [g.value for g in gaps]),
        windows_low=[g.low for g in gaps],
        windows_high=[g.high for g in gaps],
    )


def _gap(baseline: np.ndarray, candidate: np.ndarray) -> Interval:
    mean_loss = float(np.mean(baseline))
    difference = mean_interval(candidate - baseline)
    ends = (None if end is None else end / mean_loss for end in (difference.low, difference.high))
    return Interval(difference.value / mean_loss, *ends)


def _validation(
    baseline: Run, candidate: Run, steps: np.ndarray, at_b: np.ndarray, at_c: np.ndarray
) -> tuple[int, float, float] | None:
    b, c = baseline.values("validation_loss")[at_b], candidate.values("validation_loss")[at_c]
    both = np.flatnonzero(np.isfinite(b) & np.isfinite(c))
    return (int(steps[both[-1]]), float(b[both[-1]]), float(c[both[-1]])) if len(both) else None


def _curve(steps: np.ndarray, values: np.ndarray) -> Curve:
    x, y = thin(steps, values, MAX_POINTS)
    return Curve(x.tolist(), y.tolist())


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
