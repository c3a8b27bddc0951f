"""Whole runs on the CPU: real numbers, arms in turn, arms that fail."""

from __future__ import annotations

import pytest
import torch
from bench_cases import silent, step_config

from fp8ctl.bench import step
from fp8ctl.bench.step import measure_steps
from fp8ctl.errors import ConfigError


def test_arms_run_in_turn_and_are_timed() -> None:
    told: list[tuple[int, int, str]] = []
    run = measure_steps(
        step_config(arms=("bf16", "infir2", "hf"), rounds=3, timed_steps=2), lambda *words: told.append(words)
    )
    assert run.order == [("bf16", "infir2", "hf"), ("infir2", "hf", "bf16"), ("hf", "bf16", "infir2")]
    for m in run.arms:
        assert m.status == "ok"
        assert len(m.forward_ms) == len(m.backward_ms) == 6 and m.optimizer_ms == []
        assert all(ms > 0 for ms in m.fwd_bwd_ms)
        assert m.loss == pytest.approx(5.29, abs=0.05)  # ln 199
    assert len({m.loss for m in run.arms}) >= 2, "FP8 is not BF16"
    assert told[-1][:2] == (12, 12) and "round 2, hf" in {words for _, _, words in told}


def test_the_optimizer_is_timed_where_it_is_ours() -> None:
    ours, theirs = measure_steps(step_config(arms=("bf16", "hf"), optimizer=True), silent).arms
    assert len(ours.optimizer_ms) == 2 and all(ms > 0 for ms in ours.optimizer_ms)
    assert theirs.status == "ok" and theirs.optimizer_ms == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (ModuleNotFoundError("No module named 'transformers'"), "absent: No module named 'transformers'"),
        (RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nat line 3"), "failed: RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED"),
        (ConfigError("no such thing"), "failed: no such thing"),
    ],
)
def test_an_arm_that_fails_keeps_its_row_and_the_others_go_on(monkeypatch, error: Exception, status: str) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(step, "build_hf", broken)
    run = measure_steps(step_config(arms=("hf", "bf16", "te-block")), silent)
    hf, bf16, te = run.arms
    assert (hf.status, hf.arm, hf.forward_ms) == (status, None, [])
    assert bf16.status == "ok" and len(bf16.forward_ms) == 2
    assert te.status.startswith("absent: transformer-engine is not here")
    assert run.order == [("bf16",), ("bf16",)]


def test_an_arm_may_fail_in_a_later_round(monkeypatch) -> None:
    real, turns = step._step, []

    def failing(arm, clock, measured=None):
        turns.append(measured.name)
        if turns.count("bf16") > 3:
            raise torch.OutOfMemoryError("full")
        return real(arm, clock, measured)

    monkeypatch.setattr(step, "_step", failing)
    run = measure_steps(step_config(arms=("bf16",), rounds=3), silent)
    assert run.arms[0].status == "oom" and run.arms[0].arm is None


def test_peers_have_no_packed_rows() -> None:
    run = measure_steps(step_config(arms=("bf16", "hf"), documents="packed", seq_len_tokens=256), silent)
    assert [m.status for m in run.arms] == ["ok", "skipped: its rows are one document each"]


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"seq_len_tokens": 512}, "seq_len_tokens: 512 tokens are more than the model's 256 positions", "or less"),
        ({"profile": True}, "profile: the breakdown is one of GPU kernels, this is a CPU", "drop profile=true"),
        ({"model": {"name": "hf"}}, "model.shape: no shape", "choose model=NAME"),
    ],
)
def test_mistakes(changes: dict[str, object], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        measure_steps(step_config(**changes), silent)
    assert caught.value.message.startswith(message)
    assert hint in (caught.value.hint or "")
