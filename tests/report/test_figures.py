"""Numbers as people read them."""

from __future__ import annotations

import pytest

from fp8ctl.report.figures import between, margin, plus_minus, text


@pytest.mark.parametrize(
    ("value", "kind", "written"),
    [
        (1.23456, "seconds", "1.235"),
        (0.00123, "milliseconds", "1.23"),
        (10_234.6, "rate", "10,235"),
        (12.345, "rate", "12.3"),
        (3 * 2**30, "bytes", "3.00"),
        (2.01099, "loss", "2.0110"),
        (0.934, "ratio", "0.93x"),
        (0.79, "share", "79.0 %"),
        (0.00056, "gap", "+0.056 %"),
        (-0.0025, "gap", "-0.250 %"),
        (-0.000001, "gap", "0.000 %"),
        (-0.05, "points", "-5.0"),
        (122_880, "count", "122,880"),
        (None, "loss", "-"),
    ],
)
def test_text(value: float | None, kind: str, written: str) -> None:
    assert text(value, kind) == written  # type: ignore[arg-type]


def test_an_interval_names_its_unit_once() -> None:
    assert between(-0.001, 0.002, "gap") == "-0.100 to +0.200 %"
    assert between(1.5, 1.75, "ratio") == "1.50 to 1.75x"
    assert between(None, None, "gap") == "-"


def test_a_figure_with_its_error() -> None:
    assert plus_minus(0.6, 0.0775, "share") == "60.0 +- 7.8 %"
    assert plus_minus(0.6, None, "share") == "60.0 %"
    assert plus_minus(None, None, "share") == "-"


def test_a_margin_has_no_sign() -> None:
    assert margin(0.0025) == "0.25 %"
