"""Accuracy with honest error bars, from few questions and few samples each.

The unit is the question: its samples are averaged first, and the spread is taken over questions, because samples of one
question are no independent draws (Miller, arXiv 2411.00640). Normal intervals fail on few questions and collapse to a
point when all are wrong (Bowyer et al., arXiv 2503.01747), so the interval is Wilson's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFIDENCE = 0.95
"""Coverage that `low` and `high` aim at."""


@dataclass(frozen=True)
class Estimate:
    """A mean score with its uncertainty; shares in [0, 1]."""

    accuracy: float
    """Mean over questions of the mean over their samples (avg@k)."""
    se: float
    """Standard error over questions; nan for a single one."""
    low: float
    high: float
    """Wilson interval at `CONFIDENCE`."""
    num_questions: int
    num_answers: int


def estimate(scores: Mapping[Any, Sequence[float]]) -> Estimate:
    """Accuracy of a set of questions.

    Over several families this pools their questions: the spread between families counts as spread between questions, which
    errs on the wide side, and does not collapse when every family is all right or all wrong.

    Args:
        scores: question -> score of each of its samples, every score in [0, 1].

    Raises:
        ValueError: no questions, or a question without samples.
    """
    if not scores or not all(scores.values()):
        raise ValueError("an accuracy needs at least one question, and one sample of each")
    means = [math.fsum(samples) / len(samples) for samples in scores.values()]
    num_questions, num_answers = len(means), sum(len(samples) for samples in scores.values())
    accuracy = math.fsum(means) / num_questions
    se = statistics.stdev(means) / math.sqrt(num_questions) if num_questions > 1 else math.nan
    low, high = wilson(accuracy, effective_size(accuracy, se, num_questions, num_answers))
    return Estimate(accuracy, se, low, high, num_questions, num_answers)


def effective_size(accuracy: float, se: float, num_questions: int, num_answers: int) -> float:
    """Number of independent yes/no trials that would be as uncertain as `se` says.

    Between the number of questions (samples of one question all agree) and the number of answers (all independent). Where
    the spread can't be seen, as with one question or all scores equal, it is the number of questions.
    """
    variance = accuracy * (1.0 - accuracy)
    if not se > 0.0 or variance <= 0.0:
        return float(num_questions)
    return min(max(variance / se**2, float(num_questions)), float(num_answers))


def wilson(share: float, size: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a binomial share (Wilson 1927); `size` need not be whole."""
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    center = (share + z * z / (2 * size)) / (1 + z * z / size)
    half = z * math.sqrt(share * (1 - share) / size + (z / (2 * size)) ** 2) / (1 + z * z / size)
    # at 0 and 1 the two terms are equal but for rounding
    return (0.0 if share <= 0.0 else max(0.0, center - half)), (1.0 if share >= 1.0 else min(1.0, center + half))
