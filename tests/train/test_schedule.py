from __future__ import annotations

import math

import pytest

from fp8ctl.config.schema import OptimConfig, ScheduleConfig
from fp8ctl.train.schedule import learning_rate

OPTIM = OptimConfig(peak_lr=1e-3, min_lr=1e-4)


def lrs(schedule: ScheduleConfig, num_steps: int = 10) -> list[float]:
    return [learning_rate(s, num_steps=num_steps, schedule=schedule, optim=OPTIM) for s in range(1, num_steps + 1)]


def test_wsd_warms_up_stays_and_decays() -> None:
    values = lrs(ScheduleConfig(kind="wsd", warmup_steps=2, decay_steps=4))
    cosine = [1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3, 4)]
    assert values == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3, *cosine])
    assert values[-1] == pytest.approx(1e-4)


def test_cosine_starts_after_warmup_and_ends_at_the_minimum() -> None:
    values = lrs(ScheduleConfig(kind="cosine", warmup_steps=2))
    assert values[1] == 1e-3
    assert values[5] == pytest.approx(1e-4 + 0.5 * 9e-4)  # half way between step 2 and step 10
    assert values[9] == pytest.approx(1e-4)


def test_constant_and_no_warmup() -> None:
    assert lrs(ScheduleConfig(kind="constant"), 3) == [1e-3] * 3
    assert lrs(ScheduleConfig(kind="wsd"), 3) == [1e-3] * 3
