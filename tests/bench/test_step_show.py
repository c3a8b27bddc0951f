"""Rows, ratios and bars of whole steps."""

from __future__ import annotations

import pytest
import torch
from bench_cases import MODEL, silent, step_config

from fp8ctl.bench import step_show
from fp8ctl.bench.arms import Arm, ArmPlan
from fp8ctl.bench.batch import make_batch
from fp8ctl.bench.clock import Clock
from fp8ctl.bench.step import Measured, StepRun, measure_steps
from fp8ctl.bench.step_show import case_of, step_bars, step_notes, step_rows, step_tables
from fp8ctl.config.compose import compose
from fp8ctl.model.shapes import flops_per_token

CPU = torch.device("cpu")


class GpuClock(Clock):
    """Says that it is a GPU's."""

    is_gpu = True  # type: ignore[assignment]


def made_up(
    ms: dict[str, float], model: str = "qwen2_5_7b", rows: int = 1, peaks: dict[str, int] | None = None
) -> StepRun:
    config = compose("bench_step", [f"model={model}", f"rows={rows}"])
    batch = make_batch(config, 199, CPU)
    arms = [
        Measured(
            ArmPlan(name, None),
            arm=Arm(loss=lambda: torch.zeros(()), parameters=[], own_bytes=1),
            forward_ms=[t / 4] * 3,
            backward_ms=[3 * t / 4 - 1, 3 * t / 4, 3 * t / 4 + 2],
            peak_bytes=(peaks or {}).get(name, 2**30),
        )
        for name, t in ms.items()
    ]
    return StepRun(config, GpuClock(CPU), batch, arms)


def test_a_real_run_on_the_cpu() -> None:
    run = measure_steps(step_config(arms=("bf16", "infir2", "te-block")), silent)
    rows = step_rows(run)
    bf16, infir2, te = rows
    for row in (bf16, infir2):
        assert row["case"] == "mini 2x64" and row["status"] == "ok" and row["num_steps"] == 2
        assert row["fwd_bwd_ms"] == pytest.approx(row["forward_ms"] + row["backward_ms"])
        assert row["tokens_per_s"] == pytest.approx(128e3 / row["fwd_bwd_ms"])
        flops = flops_per_token(MODEL.shape, 64) * 128
        assert row["model_tflops"] == pytest.approx(flops / row["fwd_bwd_ms"] / 1e9)
        assert row["mfu"] is row["peak_memory_bytes"] is row["resident_memory_bytes"] is None
    assert bf16["ratio_to_best_bf16"] == 1.0 and bf16["fp8_flops_share"] == 0.0
    assert infir2["ratio_to_best_bf16"] == pytest.approx(bf16["fwd_bwd_ms"] / infir2["fwd_bwd_ms"])
    assert infir2["fp8_flops_share"] > 0.5 and infir2["backend"] == "reference"
    assert te["status"].startswith("absent") and te["ratio_to_bf16"] is None and "forward_ms" not in te
    assert step_bars(run) == []
    assert step_notes(run)[0].endswith("say nothing about the speed of FP8 on a GPU.")
    (table,) = step_tables(rows)
    assert table.row_count == 3


def test_the_case_in_words() -> None:
    assert case_of(step_config()) == "mini 2x64"
    config = step_config(documents="packed", activation_checkpointing=True, optimizer=True)
    assert case_of(config) == "mini 2x64 packed recompute optimizer"


def test_ratios_are_against_the_fastest_arm_without_fp8() -> None:
    rows = {r["arm"]: r for r in step_rows(made_up({"bf16": 720.0, "hf": 700.0, "infir2": 560.0, "te-block": 565.0}))}
    assert rows["infir2"]["ratio_to_best_bf16"] == pytest.approx(1.25)
    assert rows["infir2"]["ratio_to_bf16"] == pytest.approx(720 / 560)
    assert rows["bf16"]["ratio_to_best_bf16"] == pytest.approx(700 / 720)
    assert rows["bf16"]["backward_iqr_ms"] == 1.5


def test_bars_that_hold() -> None:
    ms = {"bf16": 720.0, "hf": 700.0, "infir2": 560.0, "te-block": 565.0, "row": 500.0, "tensor": 510.0}
    bars = step_bars(made_up(ms, peaks={"infir2": 39 * 2**30, "bf16": 40 * 2**30}))
    assert [(bar.name, round(bar.value, 4), bar.target, bar.better) for bar in bars] == [
        ("qwen2_5_7b 1x8192: speed of infir2 over the best BF16 arm, hf", 1.25, 1.25, "higher"),
        ("qwen2_5_7b 1x8192: time of infir2 over te-block", 0.9912, 1.0, "lower"),
        ("qwen2_5_7b 1x8192: peak memory of infir2 over bf16", 0.975, 1.0, "lower"),
        ("qwen2_5_7b 1x8192: speed of row over the best BF16 arm, hf", 1.4, 1.38, "higher"),
    ]
    assert all(bar.holds for bar in bars)


def test_bars_that_do_not_hold_say_why() -> None:
    speed, peer = step_bars(made_up({"bf16": 400.0, "infir2": 380.0, "te-block": 350.0}, "qwen2_5_1_5b", rows=2))
    assert (speed.name, speed.target) == ("qwen2_5_1_5b 2x8192: speed of infir2 over the best BF16 arm, bf16", 1.12)
    assert not speed.holds and not peer.holds
    assert speed.reason == "infir2 380.0 ms, bf16 400.0 ms; profile=true shows where the time goes"
    assert step_bars(made_up({"bf16": 400.0, "infir2": 380.0}, "qwen2_5_1_5b", rows=2), "known")[0].reason == "known"


def test_other_cases_and_missing_arms_have_no_bars() -> None:
    assert step_bars(made_up({"bf16": 1.0, "infir2": 1.0}, rows=3)) == []
    assert step_bars(made_up({"infir2": 1.0, "te-block": 1.0})) == [], "no BF16 arm"
    run = made_up({"bf16": 1.0, "infir2": 1.0})
    run.arms[1].status = "oom"
    assert step_bars(run) == []
    with_optimizer = run.config.model_copy(update={"optimizer": True})
    assert step_bars(StepRun(with_optimizer, run.clock, run.batch, run.arms)) == []


def test_mfu_names_its_peak(monkeypatch) -> None:
    monkeypatch.setattr(step_show, "device_name", lambda device: "NVIDIA H200")
    run = made_up({"bf16": 700.0})
    (row,) = step_rows(run)
    assert row["mfu_peak"] == "H200 SXM dense BF16 989 TFLOP/s"
    assert row["mfu"] == pytest.approx(row["model_tflops"] / 989)
    # 7.07e9 weights of linears x 6 x 8192 tokens, and attention
    assert 500 < row["model_tflops"] < 650
    assert "MFU against H200 SXM dense BF16 989 TFLOP/s" in step_notes(run)


def test_the_breakdown_has_a_table_of_its_own() -> None:
    run = made_up({"bf16": 700.0, "infir2": 560.0})
    run.kernels = [
        {"table": "kernels by group", "arm": arm, "group": "attention", "ms": 80.0, "share": 0.1, "calls": 56}
        for arm in ("bf16", "infir2")
    ]
    rows = step_rows(run)
    assert rows[-1] == {"case": "qwen2_5_7b 1x8192", **run.kernels[-1]}
    assert [table.row_count for table in step_tables(rows)] == [2, 1]
