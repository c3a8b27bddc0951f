"""Time on a device: CUDA events on a GPU, the performance counter on a CPU; medians and their spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Some 2 ms: the host queues that many calls meanwhile, so that launches cost nothing, as in a training step
_HEAD_START_CYCLES = 4_000_000
_MOST_CALLS = 20
# Long beside the head start: a GPU that rests between short bursts runs at clocks that training never sees
_BLOCK_MS = 10.0


@dataclass(frozen=True)
class Clock:
    """Marks points in the work of a device; between two of them lies a time."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether times come from CUDA events."""
        return self.device.type == "cuda"

    def mark(self) -> Any:
        """A point in the work that has been asked for so far."""
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two marks; `wait` comes before."""
        return float(begin.elapsed_time(end)) if self.is_gpu else (end - begin) * 1e3

    def wait(self) -> None:
        """Until the device has done all it was asked for."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def head_start(self) -> None:
        """Keeps a GPU busy for some milliseconds, in which the host gets ahead of it."""
        if self.is_gpu:
            torch.cuda._sleep(_HEAD_START_CYCLES)


def time_in_turn(clock: Clock, calls: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median milliseconds of each call; every round runs each of them, several times where it is short."""
    repeats = []
    for call in calls:
        call()
        clock.wait()
        repeats.append(max(1, min(_MOST_CALLS, int(_BLOCK_MS / max(1e-3, _once(clock, call, 1))))))
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds):
        for index in range(len(calls)):
            at = (index + number) % len(calls)
            times[at].append(_once(clock, calls[at], repeats[at]))
    return [median(t) for t in times]


def _once(clock: Clock, call: Callable[[], Any], repeats: int) -> float:
    clock.head_start()
    begin = clock.mark()
    for _ in range(repeats):
        call()
    end = clock.mark()
    clock.wait()
    return clock.ms(begin, end) / repeats


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    return quantile(values, 0.5)


def iqr(values: Sequence[float]) -> float:
    """Distance of the quartiles: the spread of the middle half."""
    return quantile(values, 0.75) - quantile(values, 0.25)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated linearly between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
