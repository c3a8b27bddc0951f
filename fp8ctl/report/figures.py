"""How numbers are written: one function for all views, so that terminal, Markdown, HTML and CSV agree to the digit."""

from __future__ import annotations

from typing import Literal

Kind = Literal["seconds", "milliseconds", "rate", "bytes", "loss", "ratio", "share", "gap", "points", "count", "number"]
"""What a number is; decides its unit and its digits."""

UNITS: dict[Kind, str] = {
    "seconds": "s",
    "milliseconds": "ms",
    "rate": "tokens/s",
    "bytes": "GiB",
    "loss": "nats/token",
    "ratio": "x",
    "share": "%",
    "gap": "%",
    "points": "points",
    "count": "",
    "number": "",
}
"""Unit that `text` writes the number in."""

ABSENT = "-"
"""Written where there is no number."""


def text(value: float | None, kind: Kind) -> str:
    """The figure as people read it, without its unit except for %, x and points.

    Args:
        value: seconds, tokens/s, bytes, nats/token; shares, gaps and accuracies as fractions (0.01 is 1 % or 1 point).
    """
    if value is None:
        return ABSENT
    match kind:
        case "seconds":
            return f"{value:.3f}"
        case "milliseconds":
            return f"{value * 1e3:.2f}"
        case "rate":
            return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        case "bytes":
            return f"{value / 2**30:.2f}"
        case "loss":
            return f"{value:.4f}"
        case "ratio":
            return f"{value:.2f}x"
        case "share":
            return f"{value * 100:.1f} %"
        case "gap":
            return f"{_signed(value * 100, 3)} %"
        case "points":
            return _signed(value * 100, 1)
        case "count":
            return f"{value:,.0f}"
        case "number":
            return f"{value:.3g}"


def between(low: float | None, high: float | None, kind: Kind) -> str:
    """An interval, `-0.1 to +0.2 %`."""
    if low is None or high is None:
        return ABSENT
    start = text(low, kind)
    for unit in (" %", "x"):
        start = start.removesuffix(unit)
    return f"{start} to {text(high, kind)}"


def plus_minus(value: float | None, error: float | None, kind: Kind) -> str:
    """A figure with its standard error, `62.5 +- 7.7 %`."""
    if value is None or error is None:
        return text(value, kind)
    whole = text(value, kind)
    unit = " %" if whole.endswith(" %") else ""
    return f"{whole.removesuffix(unit)} +- {text(error, kind)}"


def margin(value: float) -> str:
    """A threshold for gaps, `0.25 %`."""
    return f"{value * 100:g} %"


def _signed(value: float, digits: int) -> str:
    # -0.000 would claim a direction that the digits don't show
    written = f"{value:+.{digits}f}"
    return f"{0:.{digits}f}" if float(written) == 0 else written
