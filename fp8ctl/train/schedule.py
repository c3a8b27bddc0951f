"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from fp8ctl.config.schema import OptimConfig, ScheduleConfig


def learning_rate(step: int, *, num_steps: int, schedule: ScheduleConfig, optim: OptimConfig) -> float:
    """Learning rate of step `step` (the first is 1) of a run of `num_steps`.

    Warm-up is linear and reaches the peak at its last step. Then: constant; cosine from peak to minimum at the last step; or
    warmup-stable-decay (WSD: arXiv 2404.06395), which stays at the peak and goes down by half a cosine over the last
    `decay_steps`.
    """
    peak, low = optim.peak_lr, optim.min_lr
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    decay_steps = schedule.decay_steps if schedule.kind == "wsd" else num_steps - schedule.warmup_steps
    into_decay = step - (num_steps - decay_steps)
    if into_decay <= 0:
        return peak
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * min(1.0, into_decay / decay_steps)))
