"""Error bars: of series whose values hang together, and of paired answers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95
"""Coverage that every interval of the report aims at."""

SHARE = 0.1
"""The last tenth of a run stands for its end."""

MIN_STEPS = 10
"""Fewest steps of that tenth, where the run has them."""


@dataclass(frozen=True)
class Interval:
    """A value with its interval at `CONFIDENCE`; the ends are None where there is too little data to give any."""

    value: float
    low: float | None
    high: float | None


def window(num_steps: int) -> int:
    """How many steps at the end of a run its last 10 % are: at least `MIN_STEPS`, at most all."""
    return min(num_steps, max(MIN_STEPS, math.ceil(num_steps * SHARE)))


def batches(values: np.ndarray) -> list[np.ndarray]:
    """Cuts a series of n values into about sqrt(n) contiguous batches of about sqrt(n) values."""
    size = max(1, math.isqrt(len(values)))
    return np.array_split(values, len(values) // size) if len(values) else []


def mean_interval(values: np.ndarray) -> Interval:
    """Mean of an autocorrelated series with an interval from batch means.

    The n values are cut into m contiguous batches of about sqrt(n); with b_j the mean of batch j and s their standard
    deviation, the interval is `mean +- t(m - 1) * s / sqrt(m)`, t being Student's quantile at `CONFIDENCE`. Neighbouring
    steps fall into one batch, so their correlation widens the interval instead of narrowing it, as it would if each step
    counted as an independent draw. Consistent for batches of sqrt(n) (Flegal and Jones, arXiv 0811.1729).
    """
    mean = float(np.mean(values))
    means = np.array([np.mean(b) for b in batches(values)])
    half = half_width(means)
    return Interval(mean, None, None) if half is None else Interval(mean, mean - half, mean + half)


def half_width(estimates: np.ndarray) -> float | None:
    """Half an interval around the mean of independent estimates, by Student's t; None for fewer than two."""
    count = len(estimates)
    if count < 2:
        return None
    return t_quantile(count - 1) * float(np.std(estimates, ddof=1)) / math.sqrt(count)


def median_ratio(candidate: np.ndarray, baseline: np.ndarray) -> Interval:
    """Median of `candidate` over median of `baseline`, both positive series, independent of each other.

    The interval is made on the logarithm: the variance of a log median is that of the log medians of its contiguous batches
    over their number (as in `mean_interval`); the two variances add up; degrees of freedom are those of the shorter series.
    """
    value = float(np.median(candidate) / np.median(baseline))
    logs = [np.log([np.median(b) for b in batches(series)]) for series in (candidate, baseline)]
    fewest = min(len(log) for log in logs)
    if fewest < 2:
        return Interval(value, None, None)
    half = t_quantile(fewest - 1) * math.sqrt(sum(float(np.var(log, ddof=1)) / len(log) for log in logs))
    return Interval(value, value * math.exp(-half), value * math.exp(half))


def paired_difference(differences: np.ndarray, num_samples: int) -> Interval:
    """Mean paired difference of two arms over Q questions; each value is the difference of two averages of k samples.

    The mean is plain. Its interval adds two made-up questions with differences +1/k and -1/k, the smallest that k samples
    can show, and then is Student's with Q - 1 degrees of freedom: without them, arms that agree on all of a few questions
    would look equal beyond doubt. For k = 1 this is the adjusted Wald interval of Bonett and Price (2012) with t for z.
    """
    count = len(differences)
    mean = float(np.mean(differences))
    if count < 2:
        return Interval(mean, None, None)
    adjusted = np.append(differences, [1 / num_samples, -1 / num_samples])
    half = t_quantile(count - 1) * float(np.std(adjusted)) / math.sqrt(len(adjusted))
    center = float(np.mean(adjusted))
    return Interval(mean, max(-1.0, center - half), min(1.0, center + half))


def t_quantile(degrees: int) -> float:
    """Student's two-sided quantile at `CONFIDENCE`."""
    return float(stdtrit(degrees, 0.5 + CONFIDENCE / 2))


def thin(x: np.ndarray, y: np.ndarray, max_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Thins a curve to at most `max_points` by keeping the lowest and the highest point of each bucket: no spike is lost.

    The first and the last point stay. Points that are not finite are left out.
    """
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= max_points:
        return x, y
    inner = np.array_split(np.arange(1, len(x) - 1), (max_points - 2) // 2)
    kept = [0, len(x) - 1]
    for bucket in inner:
        kept += [int(bucket[np.argmin(y[bucket])]), int(bucket[np.argmax(y[bucket])])]
    order = np.unique(kept)
    return x[order], y[order]
