"""Wall time of the phases of a step, on the CPU clock or by CUDA events; no synchronisation inside the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseTimer:
    """Adds up the time of named phases over one step.

    On a GPU the phases are marked by events, which are read once at the end of the step (`read`, which waits for the device):
    waiting in between would keep the host from running ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def start_step(self) -> None:
        """Forgets the last step."""
        self._spans, self._seconds, self._started = [], {}, time.perf_counter()

    @contextmanager
    def phase(self, name: str, *, on_host: bool = False) -> Iterator[None]:
        """Times the body under `name`; phases of the same name add up. `on_host`: the body has no device work."""
        if self._cuda and not on_host:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._spans.append((name, begin, end))
        else:
            begin_s = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin_s

    def read(self) -> dict[str, float]:
        """Seconds per phase, and `step` for the whole step so far."""
        seconds = dict(self._seconds)
        if self._cuda:
            torch.cuda.synchronize()
            for name, begin, end in self._spans:
                seconds[name] = seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
        seconds["step"] = time.perf_counter() - self._started
        return seconds
