"""Times and their medians."""

from __future__ import annotations

import time

import pytest
import torch

from fp8ctl.bench.clock import Clock, iqr, median, quantile, time_in_turn

CPU = Clock(torch.device("cpu"))


def test_median_and_spread() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert iqr([7.0]) == 0.0
    values = torch.randn(37, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for share in (0.0, 0.25, 0.5, 0.9, 1.0):
        assert quantile(values.tolist(), share) == pytest.approx(torch.quantile(values, share).item())


def test_every_round_runs_every_call() -> None:
    order: list[str] = []
    times = time_in_turn(
        CPU, [lambda: (order.append("a"), time.sleep(0.006)), lambda: (order.append("b"), time.sleep(0.012))], rounds=3
    )
    assert 6.0 <= times[0] < times[1] and times[1] >= 12.0
    # each is called once to warm up and once to see how long it takes; then the rounds, whose order moves on
    assert order == list("aabb" + "ab" + "ba" + "ab")


def test_a_short_call_is_repeated() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    time_in_turn(CPU, [call], rounds=2)
    assert calls == 2 + 2 * 20
