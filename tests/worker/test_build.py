"""What a run runs in where the GPU can't do what the plan says."""

from __future__ import annotations

import pytest
import torch

from fp8ctl.config.compose import compose
from fp8ctl.config.schema import TrainConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.worker import build

OLD_GPU = "the GPU has no FP8 tensor cores (compute capability 8.0, they begin at 8.9)"


def settled(*overrides: str):  # type: ignore[no-untyped-def]
    config = compose("train_cpt", ["model=tiny", "data.path=/data", *overrides])
    assert isinstance(config, TrainConfig) and config.model.shape is not None
    plan = build.plan_of(config, config.model.shape)
    return build.choose_kernels(config, config.model.shape, plan, torch.device("cpu"))


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "lacks_fp8_units", lambda device_type: OLD_GPU)


def test_without_fp8_units_the_plan_runs_in_bf16_and_says_so(old_gpu: None) -> None:
    plan, backend, _ = settled("precision=infir2")
    assert not plan.fp8_linears and {p.reason for p in plan.linears} == {OLD_GPU, "tied to the embedding"}
    assert backend.reason == OLD_GPU


def test_emulation_is_taken_when_asked_for_and_bf16_is_refused_where_fp8_is_required(old_gpu: None) -> None:
    plan, backend, _ = settled("precision=infir2", "precision.backend=reference", "precision.require_fp8=true")
    assert plan.fp8_linears and backend.name == "reference"
    with pytest.raises(PrecisionError, match="FP8 is required, but the GPU has no FP8 tensor cores") as e:
        settled("precision=infir2", "precision.require_fp8=true")
    assert "precision.backend=reference" in (e.value.hint or "")


def test_a_cpu_emulates_and_a_plan_in_bf16_needs_no_backend() -> None:
    plan, backend, attention = settled("precision=infir2")
    assert plan.fp8_linears and backend.name == "reference" and attention.name == "any"
    assert settled("precision=bf16")[1].reason == "the plan runs nothing in FP8"
