"""Accuracy of each arm, and the paired difference over questions that both answered.

Two arms are compared question by question: the spread of difficulty between questions, most of a plain standard error, falls
out of the difference. The unit is the question; its samples are averaged first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8ctl.report.load import Evaluation, Run, number
from fp8ctl.report.stats import Interval, paired_difference


@dataclass(frozen=True)
class Score:
    """Accuracy of a set of questions, as the evaluation summed it up; fractions."""

    accuracy: float
    se: float | None
    """Standard error over questions."""
    low: float | None
    high: float | None
    """Its 95 % interval (Wilson's)."""
    num_questions: int | None
    num_answers: int | None
    truncated_share: float | None
    """Answers that the budget ended."""
    no_answer_share: float | None
    mean_answer_tokens: float | None


@dataclass(frozen=True)
class Accuracy:
    """One evaluation of one run."""

    name: str
    suite: str
    precision: str
    """Precision of inference."""
    total: Score | None
    families: dict[str, Score]


@dataclass(frozen=True)
class Paired:
    """The same questions answered by two models, or by one model in two inference precisions."""

    suite: str
    precision: str
    """Precision of inference; two where they differ."""
    baseline: float
    candidate: float
    """Accuracies over the common questions."""
    difference: Interval
    """Candidate minus baseline."""
    num_questions: int
    num_samples: int
    note: str
    """What limits the comparison; empty for none."""

    def questions_needed(self, margin: float) -> int | None:
        """Roughly how many questions an interval of +-margin takes, as its width falls with their square root."""
        if self.difference.low is None or self.difference.high is None:
            return None
        half = (self.difference.high - self.difference.low) / 2
        return int(np.ceil(self.num_questions * (half / margin) ** 2))


def summarize(evaluation: Evaluation) -> Accuracy:
    """Figures of one evaluation, from its result.json."""
    families = evaluation.result.get("families") or {}
    return Accuracy(
        name=evaluation.name,
        suite=evaluation.suite,
        precision=evaluation.precision,
        total=_score(evaluation.result.get("overall")),
        families={name: score for name, tree in families.items() if (score := _score(tree)) is not None},
    )


def compare(baseline: Run, candidate: Run) -> tuple[list[Paired], list[str]]:
    """Paired differences of all evaluations that two runs share, and what kept others from being paired.

    Paired are evaluations of the same suite in the same inference precision. Where a suite has no such pair, each run's own
    precision of inference is taken: then the difference is that of training and inference together, and says so.
    """
    found, notes = [], []
    for suite in dict.fromkeys(e.suite for e in baseline.evaluations):
        ours = {e.precision: e for e in baseline.evaluations if e.suite == suite}
        theirs = {e.precision: e for e in candidate.evaluations if e.suite == suite}
        chosen = [(ours[precision], theirs[precision]) for precision in ours if precision in theirs]
        if not chosen and theirs:
            chosen = [(list(ours.values())[-1], list(theirs.values())[-1])]
        for one, other in chosen:
            if one.result.get("protocol_hash") != other.result.get("protocol_hash"):
                notes.append(
                    f"evaluations {one.name} and {other.name} asked in different ways, so they are not compared"
                )
            elif (paired := pair(one, other)) is not None:
                found.append(paired)
    return found, notes


def compare_inference(run: Run) -> list[Paired]:
    """Paired differences of FP8 against BF16 inference of the same weights."""
    found = []
    for base in (e for e in run.evaluations if not e.precision.startswith("fp8")):
        for other in (e for e in run.evaluations if e.precision.startswith("fp8")):
            same = all(base.result.get(key) == other.result.get(key) for key in ("model", "protocol_hash"))
            if same and (paired := pair(base, other)) is not None:
                found.append(paired)
    return found


def pair(baseline: Evaluation, candidate: Evaluation) -> Paired | None:
    """The paired difference over the questions that both answered; None when they share none."""
    common = [q for q in baseline.scores if q in candidate.scores]
    if not common:
        return None
    b, c = (np.array([np.mean(e.scores[q]) for q in common]) for e in (baseline, candidate))
    samples = min(len(e.scores[q]) for e in (baseline, candidate) for q in common)
    unshared = len(set(baseline.scores) ^ set(candidate.scores))
    precisions = dict.fromkeys((baseline.precision, candidate.precision))
    return Paired(
        suite=baseline.suite,
        precision=" | ".join(precisions),
        baseline=float(np.mean(b)),
        candidate=float(np.mean(c)),
        difference=paired_difference(c - b, samples),
        num_questions=len(common),
        num_samples=samples,
        note=f"{unshared} questions answered by one only" if unshared else "",
    )


def _score(tree: Any) -> Score | None:
    if not isinstance(tree, dict) or number(tree.get("accuracy")) is None:
        return None
    return Score(**{name: number(tree.get(name)) for name in Score.__dataclass_fields__})  # type: ignore[arg-type]
