"""Error bars: against theory, and by how often they hold the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp8ctl.report.stats import batches, mean_interval, median_ratio, paired_difference, t_quantile, thin, window


@pytest.mark.parametrize(("steps", "length"), [(0, 0), (4, 4), (10, 10), (60, 10), (101, 11), (5000, 500)])
def test_window_is_the_last_tenth_but_at_least_ten_steps(steps: int, length: int) -> None:
    assert window(steps) == length


def test_batches_are_contiguous_and_keep_every_value() -> None:
    parts = batches(np.arange(10))
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert batches(np.arange(0)) == []


def test_interval_of_a_mean_by_hand() -> None:
    found = mean_interval(np.array([1.0, 1.0, 2.0, 2.0]))  # two batches of two, means 1 and 2, t(1) = 12.706
    half = 12.7062 * math.sqrt(0.5) / math.sqrt(2)
    assert found.value == 1.5
    assert (found.low, found.high) == (pytest.approx(1.5 - half, abs=1e-3), pytest.approx(1.5 + half, abs=1e-3))


def test_a_single_value_has_no_interval() -> None:
    found = mean_interval(np.array([3.0]))
    assert (found.value, found.low, found.high) == (3.0, None, None)


@pytest.mark.parametrize(("phi", "least"), [(0.0, 0.92), (0.5, 0.90), (0.8, 0.82)])
def test_the_band_holds_the_true_mean_as_often_as_it_says(phi: float, least: float) -> None:
    rng, held = np.random.default_rng(1), 0
    for _ in range(1000):
        noise = rng.normal(size=100)
        series = np.zeros(100)
        for t in range(1, 100):
            series[t] = phi * series[t - 1] + noise[t]
        found = mean_interval(series)
        held += found.low <= 0.0 <= found.high  # type: ignore[operator]
    assert least <= held / 1000 <= 0.98


def test_correlated_steps_count_less_than_independent_ones() -> None:
    rng = np.random.default_rng(2)
    independent = rng.normal(size=400)
    correlated = np.repeat(rng.normal(size=20), 20)

    def width(series: np.ndarray) -> float:
        found = mean_interval(series)
        return found.high - found.low  # type: ignore[operator]

    naive = 2 * 1.96 * correlated.std() / math.sqrt(400)
    assert width(independent) == pytest.approx(2 * 1.96 / 20, rel=0.4)
    assert width(correlated) > 3 * naive


def test_ratio_of_medians_ignores_outliers_and_holds_the_truth() -> None:
    rng = np.random.default_rng(3)
    fast, slow = np.exp(rng.normal(0, 0.02, 200)), 1.7 * np.exp(rng.normal(0, 0.02, 200))
    slow[::50] *= 20
    found = median_ratio(slow, fast)
    assert found.value == pytest.approx(1.7, rel=0.01)
    assert found.low < 1.7 < found.high  # type: ignore[operator]
    assert found.high - found.low < 0.05  # type: ignore[operator]


def test_paired_difference_is_bonett_and_prices_interval_for_single_answers() -> None:
    differences = np.array([1.0] * 3 + [-1.0] * 8 + [0.0] * 29)
    n, gained, lost = 40, 3, 8
    p12, p21 = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = t_quantile(n - 1) * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    found = paired_difference(differences, 1)
    assert found.value == pytest.approx(-5 / 40)
    assert (found.low, found.high) == (pytest.approx(p12 - p21 - half), pytest.approx(p12 - p21 + half))


def test_equal_answers_to_few_questions_prove_little() -> None:
    few, many = (paired_difference(np.zeros(n), 1) for n in (10, 1000))
    assert few.value == many.value == 0.0
    assert few.high > 0.2 and few.low < -0.2  # type: ignore[operator]
    assert many.high < 0.003  # type: ignore[operator]


def test_more_samples_a_question_narrow_the_interval() -> None:
    differences = np.random.default_rng(4).normal(0, 0.05, 60).round(3)
    one, many = (paired_difference(differences, k) for k in (1, 32))
    assert many.high - many.low < 0.5 * (one.high - one.low)  # type: ignore[operator]


def test_thinning_keeps_every_spike_and_the_ends() -> None:
    y = np.zeros(100_000)
    y[77_777], y[123], y[0], y[-1] = 9.0, -5.0, 1.0, 2.0
    x, thinned = thin(np.arange(100_000), y, 2000)
    assert len(x) <= 2000
    assert thinned.max() == 9.0 and x[thinned.argmax()] == 77_777
    assert thinned.min() == -5.0 and x[thinned.argmin()] == 123
    assert (x[0], x[-1], thinned[0], thinned[-1]) == (0, 99_999, 1.0, 2.0)
    assert (np.diff(x) > 0).all()


def test_thinning_leaves_out_what_is_not_finite() -> None:
    x, y = thin(np.arange(4), np.array([1.0, math.nan, math.inf, 2.0]), 100)
    assert x.tolist() == [0, 3] and y.tolist() == [1.0, 2.0]
