"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_BLOCKS = "".join(map(chr, range(0x2581, 0x2589)))
_ASCII = "_.:-=+*#"
NOT_FINITE = "!"


@dataclass(frozen=True)
class Sparkline:
    """As wide as the space it gets; plain characters where the output's encoding has no block characters.

    A character stands for a few neighbouring values and shows the largest of them, so that no spike is lost; `!` where one
    is not finite. The top of the scale is the 98th percentile: what lies above is cut off, and the rest stays readable.
    """

    values: Sequence[float]
    is_log: bool = False
    """Whether heights are logarithms (values above zero only)."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.text(options.max_width, _ASCII if options.ascii_only else _BLOCKS), no_wrap=True)

    def text(self, width: int, ramp: str = _BLOCKS) -> str:
        """At most `width` characters, from the lowest of `ramp` to the highest."""
        peaks = [self._height(peak) for peak in bucket_peaks(self.values, width)]
        finite = sorted(peak for peak in peaks if math.isfinite(peak))
        if not finite:
            return NOT_FINITE * len(peaks)
        low, high = finite[0], finite[math.ceil(0.98 * (len(finite) - 1))]
        span = max(high - low, 1e-12)

        def symbol(height: float) -> str:
            if not math.isfinite(height):
                return NOT_FINITE
            return ramp[min(int((height - low) / span * len(ramp)), len(ramp) - 1)]

        return "".join(map(symbol, peaks))

    def _height(self, value: float) -> float:
        if not self.is_log or not math.isfinite(value):
            return value
        return math.log(max(value, 1e-30))


def bucket_peaks(values: Sequence[float], count: int) -> list[float]:
    """The largest value of each of at most `count` runs of neighbours; NaN for a run with a value that is not finite."""
    count = min(count, len(values))
    peaks = []
    for i in range(count):
        bucket = values[i * len(values) // count : (i + 1) * len(values) // count]
        peaks.append(max(bucket) if all(map(math.isfinite, bucket)) else math.nan)
    return peaks
