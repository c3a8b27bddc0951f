"""The arms of `fp8ctl bench step`: their names, and what the rounds need of one that is built."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fp8ctl.config.bench_schema import BenchArmConfig
from fp8ctl.config.compose import compose, groups
from fp8ctl.config.problems import Problem, nearest, raise_problems
from fp8ctl.errors import ConfigError

PEERS = {
    "hf": "transformers, BF16, decoder layers compiled",
    "torchao-tensorwise": "the same with torchao.float8, a scale for each tensor",
    "torchao-rowwise": "the same with torchao.float8, a scale for each row",
    "te-bf16": "transformer-engine TransformerLayer, BF16",
    "te-block": "the same, Float8BlockScaling",
    "te-current": "the same, Float8CurrentScaling",
    "te-delayed": "the same, DelayedScaling",
    "amp": "this project's model, FP32 weights under torch.autocast(bfloat16)",
    "deepspeed-bf16": "this project's BF16 model through DeepSpeed's bf16 settings, ZeRO 1",
}
"""Arms that are not this project's FP8 model, and what they are."""

BF16_ARMS = ("bf16", "hf", "te-bf16", "amp", "deepspeed-bf16")
"""Arms without FP8; the fastest of them is what ratios are given against."""


@dataclass(frozen=True)
class ArmPlan:
    """What was asked for."""

    name: str
    settings: BenchArmConfig | None
    """None: a peer."""


@dataclass
class Arm:
    """A model that is ready to run."""

    loss: Callable[[], Tensor]
    """Forward pass; the mean token loss."""
    parameters: Sequence[Tensor]
    """What gets gradients."""
    own_bytes: int
    """Bytes of its weights, and of an optimizer's state where one is part of it."""
    note: str = ""
    backward: Callable[[Tensor], Any] = Tensor.backward
    begin: Callable[[], Any] = lambda: None
    """Called before each step, not timed: weights have changed."""
    finish: Callable[[], Any] = lambda: None
    """Called after each step, not timed."""
    optimizer_step: Callable[[], Any] | None = None
    """Timed, where the optimizer is asked for."""
    enter: Callable[[], Any] = lambda: None
    """Called before a turn: brings weights that lie there only meanwhile."""
    leave: Callable[[], Any] = lambda: None
    model: nn.Module | None = None
    """This project's model, where it is one."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Columns of its row, e.g. its backend."""


def read_arms(texts: Sequence[str]) -> list[ArmPlan]:
    """Arms from their names, or from "NAME: OVERRIDES".

    Raises:
        ConfigError: unknown names, with the nearest known; names given twice; overrides that don't compose.
    """
    known = [*groups()["precision"], *PEERS]
    plans, problems = [], []
    for text in texts:
        name, colon, overrides = (part.strip() for part in text.partition(":"))
        if colon:
            try:
                plans.append(ArmPlan(name, compose("bench_arm", overrides.split())))
            except ConfigError as e:
                problems.append(Problem(f"arms: {name}", e.message, e.hint or ""))
        elif name in PEERS:
            plans.append(ArmPlan(name, None))
        elif name in known:
            plans.append(ArmPlan(name, compose("bench_arm", [f"precision={name}"])))
        else:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else f'arms can be {", ".join(known)}, or "NAME: OVERRIDES"'
            problems.append(Problem("arms", f"no arm named {name!r}", hint))
    names = [plan.name for plan in plans]
    problems += [
        Problem("arms", f"{name} is given twice", "give each arm a name of its own")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if not texts:
        problems.append(Problem("arms", "no arms", "set arms=[bf16,infir2]"))
    raise_problems(problems)
    return plans
