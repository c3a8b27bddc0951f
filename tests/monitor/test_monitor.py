import json
import math
import random
from pathlib import Path

import pytest

from fp8ctl.config.schema import MonitorConfig
from fp8ctl.errors import CheckpointError
from fp8ctl.monitor.monitor import StabilityMonitor
from fp8ctl.paths import RunPaths
from fp8ctl.track.record import RunRecord, StepStats, log_event, write_json


def stream(num_steps: int) -> list[StepStats]:
    """Noise with spikes, lasting ones among them, and values that are not finite."""
    r = random.Random(7)
    steps = []
    for step in range(1, num_steps + 1):
        loss, norm = 2.0 + r.gauss(0, 0.02), math.exp(r.gauss(0, 0.2))
        if step % 97 == 0 or 300 <= step < 310:
            loss, norm = loss + 3.0, norm * 30
        if step % 131 == 0:
            loss = math.nan
        steps.append(
            StepStats(step=step, loss=loss, grad_norm=norm, lr=1e-4, trainable_tokens=1, tokens=1, tokens_seen=step)
        )
    return steps


@pytest.mark.parametrize("stop", [1, 64, 305, 393, 450])
def test_stop_and_restore_gives_the_same_decisions_bit_for_bit(stop: int, tmp_path: Path) -> None:
    steps = stream(500)
    whole = StabilityMonitor(MonitorConfig())
    expected = [repr(whole.observe(s)) for s in steps]

    first = StabilityMonitor(MonitorConfig())
    for one in steps[:stop]:
        first.observe(one)
    write_json(tmp_path / "monitor.json", first.state_dict())
    second = StabilityMonitor(MonitorConfig())
    second.load_state_dict(json.loads((tmp_path / "monitor.json").read_text()))
    assert [repr(second.observe(s)) for s in steps[stop:]] == expected[stop:]
    assert json.dumps(second.state_dict()) == json.dumps(whole.state_dict())


def test_observe_lets_everything_pass_and_records_what_the_rules_called_for(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.config.write_text("{}")
    monitor = StabilityMonitor(MonitorConfig(policy="observe"))
    decisions = [monitor.observe(s) for s in stream(200)]
    assert {d.action for d in decisions} == {"go"}
    for decision in decisions:
        if decision.rule is not None:
            log_event(paths, "monitor", decision.step, **decision.to_event())
    events = RunRecord(tmp_path).events()
    assert [(e["step"], e["rule"]) for e in events] == [(97, "D1"), (131, "D0"), (194, "D1")]
    first, second, _ = events
    assert (first["kind"], first["action"], first["verdict"]) == ("monitor", "go", "skip")
    assert first["evidence"]["loss_z"] > 20 and first["evidence"]["window"] == 96 and first["units"] == []
    assert first["reason"].startswith("loss 5.") and math.isnan(second["evidence"]["loss"])


def test_off_judges_nothing() -> None:
    monitor = StabilityMonitor(MonitorConfig(policy="off"))
    before = monitor.state_dict()
    decisions = [monitor.observe(s) for s in stream(200)]
    assert all((d.action, d.rule) == ("go", None) for d in decisions)
    assert monitor.state_dict() == before


def test_state_of_another_version_is_refused() -> None:
    monitor = StabilityMonitor(MonitorConfig())
    state = monitor.state_dict()
    for bad in ({**state, "schema": 2}, {**state, "more": 1}, {k: v for k, v in state.items() if k != "losses"}, {}):
        with pytest.raises(CheckpointError, match="the checkpoint's monitor state is of another version") as caught:
            monitor.load_state_dict(bad)
        assert caught.value.hint == "resume with the version of fp8ctl that wrote it (see env.json)"
