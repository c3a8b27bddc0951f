"""Is this step a spike? One pure function of numbers, so that every rank, every resume and every test gets the same answer.

Each step's loss and log gradient norm are compared with a window of the last values that were accepted:

    centre  the medians of the window's two halves, drawn out as a line to the next value: follows a falling loss
    scale   1.4826 x the median distance of the window's values from that line (the standard deviation, were they normal)
    z       (value - centre) / scale, upwards only

Medians leave a window usable with almost half of it outliers, but a lasting spike would still move them, so values that a
rule rejects never enter. Thresholds are far out on purpose: of detectors measured on synthetic losses with heavy tails, six
standard deviations over 128 steps fired 5 to 29 times per 10,000 clean steps, z > 20 less than 0.25 times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

from fp8ctl.track.record import StepStats

Action = Literal["go", "skip", "fallback", "promote", "rewind", "stop"]
Rule = Literal["D0", "D1", "D4"]
Evidence = Mapping[str, float | int | bool]

RULES: dict[str, str] = {
    "D0": "loss or gradient norm is not finite",
    "D1": "loss far above its recent course",
    "D4": "gradient norm far above its recent course",
}
"""What each rule finds, in words."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Thresholds of the rules."""

    window_steps: int = 256
    """Accepted values that a new one is compared with."""
    min_window_steps: int = 64
    """Accepted values before D1 and D4 judge at all."""
    loss_z: float = 20.0
    """D1: z of the loss."""
    grad_norm_z: float = 8.0
    """D4: z of the log gradient norm, ..."""
    grad_norm_ratio: float = 10.0
    """... or gradient norm / median of the window."""
    min_loss_scale: float = 1e-3
    """Smallest scale of the loss, nats: changes of a hundredth of a nat are no spike, however calm the window was."""
    min_grad_norm_scale: float = 0.02
    """Smallest scale of the log gradient norm: 2 %."""
    restart_steps: int = 64
    """So many rejected steps in a row are a new level, not a spike: the window starts anew."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to be done with the step that was just computed, before the optimizer runs, and why."""

    step: int
    action: Action
    """What to do: `go` applies the update, `skip` drops it, `fallback` / `promote` change the precision of `units`,
    `rewind` returns to a snapshot, `stop` ends the run."""
    verdict: Action = "go"
    """What the rules call for. The policy may allow less: under `observe` the action is always `go`."""
    rule: str | None = None
    """The rule that fired, the gravest first; None for a clean step."""
    reason: str = ""
    """For people, in one sentence; empty for a clean step."""
    units: tuple[str, ...] = ()
    """GEMMs (`linear.direction`) that the action is about."""
    evidence: Evidence = field(default_factory=dict)
    """The numbers that the rules saw."""

    def to_event(self) -> dict[str, Any]:
        """Plain data for events.jsonl; the step has its own place there."""
        event = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "step"}
        return event | {"units": list(self.units), "evidence": dict(self.evidence)}


@dataclass(frozen=True, kw_only=True)
class PolicyState:
    """All that the decision remembers. Plain floats: JSON takes it to a checkpoint and back bit for bit."""

    losses: tuple[float, ...] = ()
    """Accepted losses, nats/token, oldest first."""
    log_grad_norms: tuple[float, ...] = ()
    """Natural logarithms of accepted gradient norms."""
    rejected_in_a_row: int = 0
    """Finite steps that D1 or D4 rejected since the last accepted one."""


def decide(state: PolicyState, stats: StepStats, *, limits: Limits = Limits()) -> tuple[PolicyState, Decision]:
    """Judges one step. Pure: the same state and stats give the same result on every rank and after every resume.

    The action is always `go` (policy `observe`); `verdict` and `rule` say what the rules called for.

    Args:
        state: what earlier steps left.
        stats: the step, reduced over all ranks; loss, grad_norm and is_finite are looked at.
        limits: thresholds.
    """
    if not (stats.is_finite and math.isfinite(stats.loss) and math.isfinite(stats.grad_norm)):
        return state, _rejected(
            stats.step, "D0", _not_finite(stats), {"loss": stats.loss, "grad_norm": stats.grad_norm}
        )

    evidence, fired = _judge(state, stats, limits)
    if not fired:
        return _accepted(state, stats, limits), Decision(step=stats.step, action="go", evidence=evidence)
    rule, reason = fired[0]
    rejected = state.rejected_in_a_row + 1
    if rejected >= limits.restart_steps:
        reason += f"; after {rejected} steps like this it is taken for the new level"
        evidence["window_restarts"] = True
        return PolicyState(), _rejected(stats.step, rule, reason, evidence)
    state = dataclasses.replace(state, rejected_in_a_row=rejected)
    return state, _rejected(stats.step, rule, "; ".join(text for _, text in fired), evidence)


class Course(NamedTuple):
    """Where a window says that the next value should lie."""

    centre: float
    scale: float
    median: float

    def z(self, value: float) -> float:
        """How many scales `value` lies above the centre."""
        return (value - self.centre) / self.scale


def course(window: Sequence[float], min_scale: float) -> Course:
    """The robust line through at least two values, drawn out to the value after the last; see the module's text."""
    n, half = len(window), len(window) // 2
    early, late = median(window[:half]), median(window[n - half :])
    early_at, late_at = (half - 1) / 2, n - 1 - (half - 1) / 2
    slope = (late - early) / (late_at - early_at)
    distances = [abs(value - (late + slope * (i - late_at))) for i, value in enumerate(window)]
    scale = max(1.4826 * median(distances), min_scale)
    return Course(late + slope * (n - late_at), scale, median(window))


def _judge(
    state: PolicyState, stats: StepStats, limits: Limits
) -> tuple[dict[str, float | int | bool], list[tuple[Rule, str]]]:
    evidence: dict[str, float | int | bool] = {"loss": stats.loss, "grad_norm": stats.grad_norm}
    evidence["window"] = len(state.losses)
    fired: list[tuple[Rule, str]] = []
    if len(state.losses) >= limits.min_window_steps:
        loss = course(state.losses, limits.min_loss_scale)
        z = loss.z(stats.loss)
        evidence |= {"loss_z": z, "loss_centre": loss.centre, "loss_scale": loss.scale}
        if z > limits.loss_z:
            fired.append(("D1", f"loss {stats.loss:.4g} is {z:.3g} scales above the expected {loss.centre:.4g}"))
    if len(state.log_grad_norms) >= limits.min_window_steps and stats.grad_norm > 0:
        norm = course(state.log_grad_norms, limits.min_grad_norm_scale)
        z, usual = norm.z(math.log(stats.grad_norm)), math.exp(norm.median)
        ratio = stats.grad_norm / usual
        evidence |= {"grad_norm_z": z, "grad_norm_median": usual, "grad_norm_ratio": ratio}
        if z > limits.grad_norm_z or ratio > limits.grad_norm_ratio:
            text = f"gradient norm {stats.grad_norm:.4g} is {ratio:.3g} times the median {usual:.4g} (z {z:.3g})"
            fired.append(("D4", text))
    return evidence, fired


def _accepted(state: PolicyState, stats: StepStats, limits: Limits) -> PolicyState:
    norms = state.log_grad_norms
    if stats.grad_norm > 0:  # a batch without a gradient says nothing about the next norm
        norms = (*norms, math.log(stats.grad_norm))
    return PolicyState(
        losses=(*state.losses, stats.loss)[-limits.window_steps :], log_grad_norms=norms[-limits.window_steps :]
    )


def _rejected(step: int, rule: Rule, reason: str, evidence: Evidence) -> Decision:
    return Decision(step=step, action="go", verdict="skip", rule=rule, reason=reason, evidence=evidence)


def _not_finite(stats: StepStats) -> str:
    if math.isfinite(stats.loss) and math.isfinite(stats.grad_norm):
        return "a rank reports a value that is not finite"
    values = {"loss": stats.loss, "gradient norm": stats.grad_norm}
    return " and ".join(f"{name} is {value}" for name, value in values.items() if not math.isfinite(value))
