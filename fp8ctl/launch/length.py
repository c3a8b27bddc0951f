"""How many steps a run has: epochs and shares of a run become numbers of steps when the run starts, and stay what they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fp8ctl.config.checks import check_schedule
from fp8ctl.config.schema import TrainConfig
from fp8ctl.errors import ConfigError

_INSTEAD_OF = {"loop.num_steps": "loop.num_epochs", "schedule.warmup_steps": "schedule.warmup_share"}


def resolve_length(config: TrainConfig) -> TrainConfig:
    """The same settings with loop.num_epochs and schedule.warmup_share turned into steps. Needs torch where there are epochs.

    Raises:
        ConfigError: warm-up and decay are longer than the run.
        DataError: no data set, or samples longer than a row.
    """
    loop, schedule = config.loop, config.schedule
    if loop.num_epochs is not None:
        steps = math.ceil(loop.num_epochs * _steps_per_epoch(config) - 1e-9)
        loop = loop.model_copy(update={"num_steps": max(1, steps), "num_epochs": None})
    if schedule.warmup_share is not None:
        warmup = round(schedule.warmup_share * loop.num_steps)
        schedule = schedule.model_copy(update={"warmup_steps": warmup, "warmup_share": None})
    config = config.model_copy(update={"loop": loop, "schedule": schedule})
    check_schedule(config)
    return config


def drop_what_is_overridden(config: TrainConfig, overrides: Sequence[str]) -> TrainConfig:
    """Steps that are asked for on the command line win over epochs and shares from elsewhere.

    Raises:
        ConfigError: both are asked for.
    """
    given = {o.split("=", 1)[0].lstrip("+~") for o in overrides}
    for steps, other in _INSTEAD_OF.items():
        if steps in given and other in given:
            raise ConfigError(f"{steps} and {other} say the same thing twice", f"give {steps} or {other}")
        if steps in given:
            group, field = other.split(".")
            settings = getattr(config, group).model_copy(update={field: None})
            config = config.model_copy(update={group: settings})
    return config


def _steps_per_epoch(config: TrainConfig) -> float:
    from fp8ctl.worker.build import loader_to_look_at

    return loader_to_look_at(config).rows_per_epoch / config.batch.global_batch_rows
