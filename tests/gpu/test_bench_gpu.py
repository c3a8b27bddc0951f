"""Benchmarks on a GPU: times from events, memory, the breakdown. What they claim is not tested here, only that they measure."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from fp8ctl.bench.clock import Clock, time_in_turn
from fp8ctl.bench.gemm import measure_gemms
from fp8ctl.bench.gemm_show import gemm_bars
from fp8ctl.bench.hardware import copy_bandwidth
from fp8ctl.bench.step import StepRun, measure_steps
from fp8ctl.bench.step_show import step_rows
from fp8ctl.config.bench_schema import BenchStepConfig
from fp8ctl.config.compose import compose

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SMALL = [
    "model=qwen2_5_0_5b", "model.shape.num_layers=2", "model.shape.vocab_size=4096", "rows=2", "seq_len_tokens=512", "rounds=2",
]  # fmt: skip


def silent(done: int, total: int, what: str) -> None:
    """No progress."""


def run(*overrides: str) -> StepRun:
    config: BenchStepConfig = compose("bench_step", [*SMALL, *overrides])
    return measure_steps(config, silent)


def test_events_time_the_gpu_and_not_the_host() -> None:
    clock = Clock(torch.device("cuda"))
    short, long = time_in_turn(clock, [lambda: torch.cuda._sleep(2_000_000), lambda: torch.cuda._sleep(8_000_000)], 3)
    assert long / short == pytest.approx(4.0, rel=0.2)
    assert 0.05 < copy_bandwidth(clock, 3) < 20


def test_arms_of_this_project_share_weights_and_memory_is_counted() -> None:
    result = run("arms=[bf16,infir2,amp]", "profile=true")
    assert [m.status for m in result.arms] == ["ok"] * 3
    bf16, infir2, amp = (r for r in step_rows(result) if r["table"] == "arms")
    assert bf16["resident_memory_bytes"] == infir2["resident_memory_bytes"] == amp["resident_memory_bytes"] / 2
    for row in (bf16, infir2, amp):
        assert row["peak_memory_bytes"] > 2 * row["resident_memory_bytes"], "weights, gradients and more"
        assert row["loss"] == pytest.approx(bf16["loss"], rel=5e-3)
    assert infir2["backend"] == "native" and infir2["fp8_flops_share"] > 0.5
    groups = {r["group"]: r["ms"] for r in result.kernels if r["table"] == "kernels by group" and r["arm"] == "infir2"}
    assert groups["GEMM FP8"] > 0 and groups["attention"] > 0
    assert sum(groups.values()) < 3 * infir2["fwd_bwd_ms"]


@pytest.mark.parametrize(
    ("arm", "package"),
    [("te-block", "transformer_engine"), ("te-delayed", "transformer_engine"), ("deepspeed-bf16", "deepspeed")],
)
def test_peers(arm: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not here")
    result = run(f"arms=[bf16,{arm}]")
    assert [m.status for m in result.arms] == ["ok", "ok"]
    assert result.arms[1].loss == pytest.approx(result.arms[0].loss, abs=0.1)


def test_te_stacks_share_their_weights() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not here")
    result = run("arms=[te-bf16,te-current]")
    a, b = (m.arm for m in result.arms)
    assert a is not None and b is not None
    assert [p.data_ptr() for p in a.parameters] == [p.data_ptr() for p in b.parameters]


def test_gemms_on_the_native_backend() -> None:
    config = compose("bench_gemm", [*SMALL[:3], "num_tokens=1024", "rounds=2", "backend=native"])
    result = measure_gemms(config, silent)
    assert {r["precision"] for r in result["rows"]} == {"infir2", "infir2_x_block_wgrad", "row", "tensor"}
    assert all(r["backend"] == "native" for r in result["rows"] if r["table"] == "one block, all linears")
    (bar,) = gemm_bars(result, "small", "")
    assert 0 < bar.value < 200
