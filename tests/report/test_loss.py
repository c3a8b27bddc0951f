"""Loss figures and gaps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fp8ctl.report import loss
from fp8ctl.report.load import Run, load_run


def run_with(losses: np.ndarray, *, first: int = 1, label: str = "A", **series: np.ndarray) -> Run:
    steps = np.arange(first, first + len(losses))
    return Run(label, Path("x"), "x", steps=steps, series={"loss": losses, **series})


def test_final_loss_is_the_mean_of_the_last_tenth() -> None:
    losses = np.concatenate([np.full(180, 3.0), np.full(20, 2.0)])
    found = loss.summarize(run_with(losses, grad_norm=np.full(200, 1.5)))
    assert (found.first, found.final, found.final_steps) == (3.0, 2.0, (181, 200))
    assert (found.grad_norm, found.num_not_finite, found.first_not_finite, found.validation) == (1.5, 0, None, None)


def test_losses_that_are_not_finite_are_counted_and_never_averaged() -> None:
    losses = np.full(60, 2.0)
    losses[54:] = math.nan
    found = loss.summarize(run_with(losses))
    assert (found.final, found.num_not_finite, found.first_not_finite) == (None, 6, 55)
    losses = np.full(60, 2.0)
    losses[20] = math.inf
    assert loss.summarize(run_with(losses)).final == 2.0


def test_a_known_gap_comes_out_with_a_band_around_it() -> None:
    rng = np.random.default_rng(1)
    base = 2.0 + rng.normal(0, 0.1, 1000)
    found = loss.compare(run_with(base), run_with(base * 1.001 + rng.normal(0, 0.001, 1000)))
    assert found is not None
    assert (found.steps, found.num_steps, found.num_common) == ((901, 1000), 100, 1000)
    assert found.gap.value == pytest.approx(0.001, abs=2e-4)
    assert found.gap.low < 0.001 < found.gap.high  # type: ignore[operator]
    assert found.gap.high - found.gap.low < 5e-4, "pairing takes the noise of the batches out"  # type: ignore[operator]
    assert found.gap.value == pytest.approx((found.candidate - found.baseline) / found.baseline)


def test_the_last_window_of_the_curve_is_the_gap_itself() -> None:
    rng = np.random.default_rng(2)
    base = 2.0 + rng.normal(0, 0.1, 300)
    found = loss.compare(run_with(base), run_with(base + rng.normal(0, 0.01, 300)))
    assert found is not None
    assert (found.windows.step[-1], found.windows.value[-1]) == (300, found.gap.value)
    assert (found.windows_low[-1], found.windows_high[-1]) == (found.gap.low, found.gap.high)
    assert len(found.windows.step) == len(found.windows_low) == len(found.windows_high) > 50


def test_a_passing_bump_is_the_worst_window() -> None:
    base = np.full(200, 2.0)
    bumped = base.copy()
    bumped[100:120] *= 1.05
    found = loss.compare(run_with(base), run_with(bumped))
    assert found is not None
    assert found.gap.value == 0.0
    assert found.worst == pytest.approx(0.05)
    assert found.worst_steps == (101, 120)


def test_only_common_steps_with_two_finite_losses_are_paired() -> None:
    long, short = np.full(100, 2.0), np.full(40, 2.02)
    short[5] = math.nan
    found = loss.compare(run_with(long), run_with(short, first=11))
    assert found is not None
    assert (found.num_common, found.steps) == (39, (41, 50))
    assert loss.compare(run_with(long), run_with(short, first=500)) is None
    assert loss.compare(run_with(long), run_with(np.zeros(0))) is None


def test_validation_losses_of_the_last_common_step() -> None:
    validation = np.full(60, math.nan)
    validation[[19, 39]] = 2.0, 1.9
    other = np.full(60, math.nan)
    other[[39, 59]] = 1.938, 1.5
    losses = np.full(60, 2.0)
    found = loss.compare(run_with(losses, validation_loss=validation), run_with(losses, validation_loss=other))
    assert found is not None
    assert (found.validation_step, found.validation_baseline, found.validation_candidate) == (40, 1.9, 1.938)
    assert found.validation_gap == pytest.approx(0.02)


def test_curves_of_long_runs_are_thinned(make_run) -> None:
    losses = np.full(5000, 2.0)
    losses[3333] = 50.0
    found = loss.curve(run_with(losses))
    assert len(found.step) <= 2000
    assert found.value[found.step.index(3334)] == 50.0
    assert loss.curve(load_run(make_run("a"), "A")).step == list(range(1, 61))
