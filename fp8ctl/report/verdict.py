"""One word on a candidate against its baseline, and the rule that gave it.

The rules are asked in order; the first that is broken decides, and all that held before it are kept as evidence.

    same experiment           no setting but precision, nothing of the environment or the data differs     else undecided
    losses finite             the candidate's losses are finite wherever the baseline's are                else worse
    both finished             both reached their last step                                                 else undecided
    FP8 ran                   an FP8 candidate has counted FP8 GEMMs                                       else undecided
    enough steps              enough common steps for a band around the loss gap                           else undecided
    loss not above margin     the band of the training loss gap is not wholly above the margin             else worse
    accuracy not lower        no interval of a paired difference lies wholly below zero                    else worse
    loss within margin        the band does not reach above the margin                                     else undecided
    validation within margin  the validation loss gap is at most the margin                                else undecided
    pays                      real FP8 is surely faster, or needs 2 % less memory                          else does not pay

All held: parity. A rule that can't be asked (no evaluation, emulated FP8) is left out, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fp8ctl.report import figures
from fp8ctl.report.accuracy import Paired
from fp8ctl.report.coverage import Covered
from fp8ctl.report.efficiency import Ratios
from fp8ctl.report.experiment import Match
from fp8ctl.report.load import Run
from fp8ctl.report.loss import MARGIN, Gap, Loss

Word = Literal["parity", "worse", "undecided", "does not pay"]

EXIT_CODES: dict[Word, int] = {"parity": 0, "worse": 3, "undecided": 4, "does not pay": 5}
"""Exit codes of `fp8ctl report --check`."""

SEVERITY: tuple[Word, ...] = ("worse", "undecided", "does not pay", "parity")
"""Of several verdicts the first of these is that of the whole report."""

EVERY = "every rule that applies held"
"""The rule behind `parity`."""

_MARGIN = figures.margin(MARGIN)

MEMORY_GAIN = 0.98
"""A peak memory ratio at or below this counts as a gain."""

ACCURACY_MARGIN = 0.02
"""Difference in accuracy, as a fraction, that people usually want to exclude; used to say how many questions that takes."""


@dataclass(frozen=True)
class Check:
    """One rule as it was applied."""

    rule: str
    outcome: Word | Literal["ok", "left out"]
    """ok: it held. left out: it could not be asked. A verdict's word: it was broken, and decided."""
    text: str


@dataclass(frozen=True)
class Verdict:
    """The word, why, and every rule that was asked."""

    verdict: Word
    rule: str
    """The rule that decided."""
    reasons: list[str]
    """Why, one point each."""
    checks: list[Check]


@dataclass(frozen=True)
class Evidence:
    """All that the rules look at."""

    baseline: Run
    candidate: Run
    match: Match
    losses: tuple[Loss, Loss]
    gap: Gap | None
    coverage: Covered | None
    """Of the candidate."""
    paired: list[Paired]
    ratios: Ratios | None


def judge(evidence: Evidence) -> Verdict:
    """Asks the rules in order."""
    checks: list[Check] = []
    for rule in _RULES:
        check = rule(evidence)
        checks.append(check)
        if check.outcome != "ok" and check.outcome != "left out":
            return Verdict(check.outcome, check.rule, [check.text], checks)
    told = ("loss within margin", "validation within margin", "accuracy not lower", "pays")
    reasons = [
        c.text
        for rule in told
        for c in checks
        if c.rule == rule and (c.outcome == "ok" or rule == "accuracy not lower")
    ]
    return Verdict("parity", EVERY, reasons, checks)


def _same_experiment(e: Evidence) -> Check:
    if e.match.is_matched:
        return Check("same experiment", "ok", "settings, environment and batches are equal but for precision")
    keys = [d.key for d in e.match.differences]
    named = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    return Check(
        "same experiment", "undecided", f"the runs are not matched: {named} differ{'s' if len(keys) == 1 else ''}"
    )


def _finite(e: Evidence) -> Check:
    broken = [
        (run, loss) for run, loss in ((e.baseline, e.losses[0]), (e.candidate, e.losses[1])) if _ends_not_finite(loss)
    ]
    if not broken:
        passing = sum(loss.num_not_finite for loss in e.losses)
        return Check(
            "losses finite",
            "ok",
            "every loss is finite" if not passing else f"{passing} losses not finite, none at the end",
        )
    run, loss = broken[0]
    at = f"{run.title} has losses that are not finite, the first at step {loss.first_not_finite}, and some among its last 10 %"
    return Check("losses finite", "worse" if run is e.candidate else "undecided", at)


def _ends_not_finite(loss: Loss) -> bool:
    return loss.num_not_finite > 0 and loss.final is None


def _finished(e: Evidence) -> Check:
    unfinished = [run for run in (e.baseline, e.candidate) if not run.is_finished]
    if not unfinished:
        return Check("both finished", "ok", "both runs reached their last step")
    run = unfinished[0]
    at = f" at step {run.steps[-1]}" if len(run.steps) else " before its first step"
    cause = f" ({run.status['cause']})" if run.status.get("cause") else ""
    return Check("both finished", "undecided", f"{run.title} has not finished: {run.state}{at}{cause}")


def _fp8_ran(e: Evidence) -> Check:
    if not e.candidate.is_fp8:
        return Check("FP8 ran", "left out", f"{e.candidate.title} does not ask for FP8")
    if e.coverage is None or e.coverage.total is None:
        return Check(
            "FP8 ran", "undecided", f"no count of executed FP8 GEMMs in {e.candidate.title}: nothing shows that FP8 ran"
        )
    if e.coverage.total == 0.0:
        return Check("FP8 ran", "undecided", f"{e.candidate.title} asks for FP8 and ran none of its GEMMs in it")
    return Check("FP8 ran", "ok", f"{figures.text(e.coverage.total, 'share')} of all linear GEMM FLOPs ran in FP8")


def _enough_steps(e: Evidence) -> Check:
    if e.gap is None:
        return Check("enough steps", "undecided", "the runs have no step with a loss in common")
    if e.gap.gap.low is None:
        return Check("enough steps", "undecided", f"{e.gap.num_common} common steps are too few for a noise band")
    return Check("enough steps", "ok", f"{e.gap.num_common:,} common steps")


def _gap_text(gap: Gap) -> str:
    ends = figures.between(gap.gap.low, gap.gap.high, "gap")
    return f"training loss gap {figures.text(gap.gap.value, 'gap')} (95 % band {ends}) over steps {gap.steps[0]} to {gap.steps[1]}"


def _loss_worse(e: Evidence) -> Check:
    assert e.gap is not None and e.gap.gap.low is not None, "_enough_steps passed"
    if e.gap.gap.low > MARGIN:
        return Check("loss not above margin", "worse", f"{_gap_text(e.gap)}: all of it above the margin of {_MARGIN}")
    return Check("loss not above margin", "ok", f"{_gap_text(e.gap)}: not surely above the margin of {_MARGIN}")


def _accuracy(e: Evidence) -> Check:
    if not e.paired:
        return Check("accuracy not lower", "left out", "no evaluation that both runs have: accuracy did not enter")
    worst = min(e.paired, key=lambda p: p.difference.value)
    d = worst.difference
    shown = f"{figures.text(d.value, 'points')} points (95 % {figures.between(d.low, d.high, 'points')}) on {worst.num_questions} questions"
    shown += f" of {worst.suite}, {worst.precision} inference"
    margin = f"{ACCURACY_MARGIN * 100:.0f} points"
    if d.high is not None and d.high < 0:
        return Check("accuracy not lower", "worse", f"accuracy is lower: {shown}")
    if d.low is not None and d.low > -ACCURACY_MARGIN:
        return Check("accuracy not lower", "ok", f"accuracy {shown}: a loss of {margin} is excluded")
    needed = worst.questions_needed(ACCURACY_MARGIN)
    more = f"; to exclude a loss of {margin} would take about {needed:,} questions" if needed else ""
    return Check("accuracy not lower", "ok", f"no difference in accuracy visible: {shown}{more}")


def _loss_margin(e: Evidence) -> Check:
    assert e.gap is not None and e.gap.gap.high is not None, "_enough_steps passed"
    if e.gap.gap.high > MARGIN:
        return Check(
            "loss within margin", "undecided", f"{_gap_text(e.gap)}: it reaches across the margin of {_MARGIN}"
        )
    return Check("loss within margin", "ok", f"{_gap_text(e.gap)}: within the margin of {_MARGIN}")


def _validation(e: Evidence) -> Check:
    gap = e.gap.validation_gap if e.gap else None
    if gap is None:
        return Check("validation within margin", "left out", "no validation loss that both runs have")
    text = f"validation loss gap {figures.text(gap, 'gap')}"
    if gap > MARGIN:
        return Check(
            "validation within margin",
            "undecided",
            f"{text} is above the margin of {_MARGIN}, the training loss is within it",
        )
    return Check("validation within margin", "ok", f"{text}: within the margin of {_MARGIN}")


def _pays(e: Evidence) -> Check:
    if not e.candidate.is_fp8:
        return Check("pays", "left out", f"{e.candidate.title} does not ask for FP8")
    if e.baseline.is_emulated or e.candidate.is_emulated:
        return Check("pays", "left out", EMULATED)
    if e.ratios is None or e.ratios.step is None:
        return Check("pays", "left out", "no timed steps; speed did not enter")
    step, memory = e.ratios.step, e.ratios.memory
    shown = f"a step takes {figures.text(step.value, 'ratio')} (95 % {figures.between(step.low, step.high, 'ratio')}) of the baseline's"
    shown += f", peak memory is {figures.text(memory, 'ratio')}" if memory is not None else ""
    gains = (step.high is not None and step.high < 1.0, memory is not None and memory <= MEMORY_GAIN)
    return Check("pays", "ok" if any(gains) else "does not pay", shown if any(gains) else f"quality holds, but {shown}")


EMULATED = "FP8 is emulated here: its speed is not a speed claim, and speed did not enter the verdict"
"""Said wherever figures of emulated FP8 stand."""

_RULES: tuple[Callable[[Evidence], Check], ...] = (
    _same_experiment,
    _finite,
    _finished,
    _fp8_ran,
    _enough_steps,
    _loss_worse,
    _accuracy,
    _loss_margin,
    _validation,
    _pays,
)
