"""The monitor that a training loop asks before each update. It decides; acting and writing events is the caller's part.

In a loop of one's own:

    monitor = StabilityMonitor(MonitorConfig())
    ...
    decision = monitor.observe(StepStats(step=step, loss=loss, grad_norm=norm, ...))   # gradients ready, weights untouched
    if decision.action == "go":
        optimizer.step()
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fp8ctl.config.schema import MonitorConfig
from fp8ctl.errors import CheckpointError
from fp8ctl.monitor.policy import Decision, Limits, PolicyState, decide
from fp8ctl.track.record import StepStats

STATE_SCHEMA = 1


class StabilityMonitor:
    """Judges every step from globally reduced numbers; all ranks hold one and come to the same decisions.

    Args:
        config: policy. `off` judges nothing; `observe` judges and lets every step pass.
        limits: thresholds of the rules.
    """

    def __init__(self, config: MonitorConfig, *, limits: Limits = Limits()) -> None:
        self._config = config
        self._limits = limits
        self._state = PolicyState()

    def observe(self, stats: StepStats) -> Decision:
        """The decision on a step whose gradients are ready and whose update has not been applied."""
        if self._config.policy == "off":
            return Decision(step=stats.step, action="go")
        self._state, decision = decide(self._state, stats, limits=self._limits)
        return decision

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered, as JSON data; restoring it gives the same decisions bit for bit."""
        state = dataclasses.asdict(self._state)
        return {"schema": STATE_SCHEMA, **{k: list(v) if isinstance(v, tuple) else v for k, v in state.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            CheckpointError: the state is not one that this version writes.
        """
        expected = {"schema", *(f.name for f in dataclasses.fields(PolicyState))}
        if state.get("schema") != STATE_SCHEMA or state.keys() != expected:
            raise CheckpointError(
                "the checkpoint's monitor state is of another version",
                "resume with the version of fp8ctl that wrote it (see env.json)",
            )
        self._state = PolicyState(
            losses=tuple(state["losses"]),
            log_grad_norms=tuple(state["log_grad_norms"]),
            rejected_in_a_row=state["rejected_in_a_row"],
        )
