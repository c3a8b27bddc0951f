"""From answers to the numbers of result.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from fp8ctl.eval.completions import Completion
from fp8ctl.eval.statistics import estimate


def summarize(completions: Sequence[Completion]) -> dict[str, Any]:
    """Accuracy with its uncertainty, and how the answers ended; of one family or of a whole suite.

    Keys: those of `statistics.Estimate` (`se` is null for a single question), and
        truncated_share: answers that the budget ended; they are judged like all others, and rarely hold an answer.
        no_answer_share: answers out of which nothing could be taken; they count as wrong.
        mean_answer_tokens: generated tokens, end tokens included; a shift is the first sign of a damaged model.
    """
    by_question: dict[tuple[str, int], list[float]] = {}
    for c in completions:
        by_question.setdefault((c.family, c.index), []).append(c.score)
    figures, count = dataclasses.asdict(estimate(by_question)), len(completions)
    return {
        **figures,
        "se": None if math.isnan(figures["se"]) else figures["se"],
        "truncated_share": sum(c.finish_reason == "length" for c in completions) / count,
        "no_answer_share": sum(c.answer is None for c in completions) / count,
        "mean_answer_tokens": sum(c.answer_tokens for c in completions) / count,
    }


def by_family(completions: Sequence[Completion]) -> dict[str, dict[str, Any]]:
    """`summarize` of each family, in order of first appearance."""
    families = dict.fromkeys(c.family for c in completions)
    return {family: summarize([c for c in completions if c.family == family]) for family in families}
