"""Standard errors and intervals against textbook values and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp8ctl.eval.statistics import effective_size, estimate, wilson


@pytest.mark.parametrize(
    ("right", "size", "low", "high"),
    [(0, 5, 0.0, 0.43448), (3, 10, 0.10779, 0.60322), (10, 10, 0.72247, 1.0), (50, 100, 0.40383, 0.59617)],
)
def test_wilson_equals_published_values(right: int, size: int, low: float, high: float) -> None:
    assert wilson(right / size, size) == pytest.approx((low, high), abs=2e-5)


def test_unit_is_the_question_not_the_sample() -> None:
    # 4 questions x 100 samples that always agree: as uncertain as 4 coin tosses, not as 400
    agreeing = estimate({q: [float(q % 2)] * 100 for q in range(4)})
    single = estimate({q: [float(q % 2)] for q in range(4)})
    assert agreeing.accuracy == single.accuracy == 0.5
    assert agreeing.se == pytest.approx(math.sqrt(1 / 3) / 2)
    assert (agreeing.low, agreeing.high) == (single.low, single.high)
    assert (agreeing.num_questions, agreeing.num_answers) == (4, 400)


def test_independent_samples_narrow_the_interval() -> None:
    rng = np.random.default_rng(0)
    scores = {q: (rng.random(50) < 0.5).astype(float).tolist() for q in range(40)}
    many, one = estimate(scores), estimate({q: s[:1] for q, s in scores.items()})
    assert many.high - many.low < 0.3 * (one.high - one.low)
    assert many.se < 0.02


def test_questions_weigh_the_same_whatever_their_number_of_samples() -> None:
    assert estimate({"a": [1.0], "b": [0.0] * 9}).accuracy == 0.5


def test_nothing_right_still_has_a_width() -> None:
    none = estimate({q: [0.0] for q in range(5)})
    assert (none.accuracy, none.se, none.low) == (0.0, 0.0, 0.0)
    assert none.high == pytest.approx(0.43448, abs=2e-5)


def test_one_question_has_no_standard_error() -> None:
    one = estimate({"q": [1.0, 0.0, 1.0, 1.0]})
    assert one.accuracy == 0.75 and math.isnan(one.se)
    assert one.low < 0.3 and one.high > 0.95


def test_effective_size_stays_between_questions_and_answers() -> None:
    assert effective_size(0.5, 1e-6, 10, 80) == 80
    assert effective_size(0.5, 0.49, 10, 80) == 10
    assert effective_size(0.5, 0.1, 10, 80) == pytest.approx(25)


@pytest.mark.parametrize(("num_questions", "num_samples"), [(5, 1), (40, 1), (30, 8)])
def test_interval_covers_the_truth(num_questions: int, num_samples: int) -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(600):
        skill = rng.beta(0.5, 1.0, num_questions)  # mean 1/3: some questions easy, most hard
        right = rng.random((num_samples, num_questions)) < skill
        found = estimate({q: right[:, q].astype(float).tolist() for q in range(num_questions)})
        covered += found.low <= 1 / 3 <= found.high
    assert covered / 600 >= 0.92


def test_nothing_to_average_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one question"):
        estimate({})
    with pytest.raises(ValueError, match="one sample of each"):
        estimate({"q": []})
