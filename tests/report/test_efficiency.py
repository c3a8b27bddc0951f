"""Time and memory figures."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fp8ctl.paths import RunPaths
from fp8ctl.report import efficiency
from fp8ctl.report.load import load_run
from fp8ctl.track.record import log_event


def test_warm_up_is_left_out(make_run) -> None:
    run = load_run(make_run("bf16", step_time_s=2.0), "A")
    found = efficiency.summarize(run)
    assert found is not None
    assert (found.num_steps, found.num_warmup) == (54, 6)
    assert found.step_median_s == pytest.approx(2.0, rel=0.02)
    assert found.step_p95_s < 2.2, "the first two steps take four times as long"
    assert found.forward_s == pytest.approx(0.6, rel=0.02)
    assert found.tokens_per_second == pytest.approx(2048 / 2.0, rel=0.02)
    assert found.memory_peak_bytes == 3 * 2**30
    assert found.tokens == 60 * 2048


def test_long_runs_leave_ten_steps_out_and_short_ones_at_least_one(make_run) -> None:
    long, short, single = (load_run(make_run(f"n{n}", num_steps=n), "A") for n in (300, 5, 1))
    assert [efficiency.counted_steps(run).sum() for run in (long, short, single)] == [290, 4, 1]


def test_the_step_after_a_resume_is_left_out(make_run) -> None:
    folder = make_run("resumed")
    log_event(RunPaths(folder), "resumed", 30, checkpoint="step-00000030")
    run = load_run(folder, "A")
    counted = efficiency.counted_steps(run)
    assert not counted[30] and counted[29] and counted[31]
    found = efficiency.summarize(run)
    assert found is not None and (found.num_steps, found.num_warmup) == (53, 7)


def test_ratios(make_run) -> None:
    bf16 = load_run(make_run("bf16", step_time_s=2.0), "A")
    fp8 = load_run(make_run("fp8", precision="infir2", step_time_s=1.5, memory_bytes=2 * 2**30, seed=4), "B")
    found = efficiency.compare(bf16, fp8)
    assert found is not None and found.step is not None
    assert found.step.value == pytest.approx(0.75, rel=0.02)
    assert found.step.low < 0.75 < found.step.high  # type: ignore[operator]
    assert found.memory == pytest.approx(2 / 3)
    assert found.tokens_per_second == pytest.approx(4 / 3, rel=0.02)
    assert found.backward == pytest.approx(0.75, rel=0.03)


def test_steps_without_times_give_no_figures(make_run) -> None:
    folder = make_run("old")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    bare = ({k: v for k, v in line.items() if k in ("step", "loss")} for line in lines)
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, bare)) + "\n")
    run = load_run(folder, "A")
    assert efficiency.summarize(run) is None
    assert efficiency.compare(run, run) is None
    assert not efficiency.counted_steps(run).any()
    assert np.isnan(run.values("step_time_s")).all()
