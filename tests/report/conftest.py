"""Run folders as `fp8ctl train` and `fp8ctl eval` leave them, written with the functions that write real ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fp8ctl.config.schema import TrainConfig
from fp8ctl.eval.completions import Completion
from fp8ctl.eval.summary import by_family, summarize
from fp8ctl.paths import RunPaths
from fp8ctl.track.record import StepStats, append_jsonl, log_event, write_json, write_status

ENV: dict[str, Any] = {
    "time": "2026-11-30T10:00:00Z",
    "fp8ctl": "0.1.0",
    "python": "3.11.7",
    "platform": "Linux-6.1",
    "hostname": "box",
    "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.24.0", "numpy": "2.4.6"},
    "cpu": {"model": "Some CPU @ 2.0GHz", "cores": 2, "usable_cores": 2},
    "memory_bytes": 24 * 2**30,
    "gpus": [],
    "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "is_dirty": False},
    "command": ["fp8ctl", "train", "cpt", "precision=infir2", "data.path=data/with space"],
    "variables": {"OMP_NUM_THREADS": "1"},
}
FAMILIES = ("basic_arithmetic", "chain_sum", "gcd", "letter_counting")

MakeRun = Callable[..., Path]


def base_losses(num_steps: int, seed: int = 3) -> np.ndarray:
    """A training loss: falling, with the noise of the batches."""
    rng = np.random.default_rng(seed)
    return 2.0 + 2.5 * np.exp(-np.arange(num_steps) / (num_steps / 5)) + rng.normal(0, 0.08, num_steps)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run("name", ...) -> folder of a finished run."""

    def make(name: str, **settings: Any) -> Path:
        folder = tmp_path / name
        write_run(folder, **settings)
        return folder

    return make


@pytest.fixture
def gpu() -> dict[str, Any]:
    """env.json of a run on a GPU, where FP8 is real."""
    return {"gpus": [{"name": "NVIDIA H200", "memory_bytes": 141 * 2**30, "driver": "580.0"}]}


@pytest.fixture
def add_step() -> Callable[..., None]:
    """add_step(folder, step, loss): appends one step to metrics.jsonl."""
    return lambda folder, step, loss: write_step(RunPaths(folder), step, loss, 2.0, 2**30, 0.0)


@pytest.fixture
def add_eval() -> Callable[..., None]:
    """add_eval(folder, "bf16", 0.6): writes one evaluation of a run."""
    return write_eval


def write_run(
    folder: Path,
    *,
    precision: str = "bf16",
    stage: str = "cpt",
    num_steps: int = 60,
    logged: int | None = None,
    losses: np.ndarray | None = None,
    gap: float = 0.0,
    drift: float = 0.0005,
    step_time_s: float = 2.0,
    memory_bytes: int = 3 * 2**30,
    state: str = "finished",
    cause: str = "",
    env: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    seed: int = 11,
    fp8_share: float | None = None,
    answers: dict[str, float] | None = None,
) -> None:
    """Writes one run folder.

    Args:
        gap: relative amount by which the loss lies above `losses`; `drift` is the noise of it, per step.
        answers: inference precision -> accuracy of an evaluation with it.
    """
    paths, rng = RunPaths(folder), np.random.default_rng(seed)
    is_fp8 = precision != "bf16"
    settings = TrainConfig(
        stage=stage, seed=1236, loop={"num_steps": num_steps}, batch={"seq_len_tokens": 512, "global_batch_rows": 4}
    )
    tree = settings.model_dump(mode="json")
    tree["name"], tree["run_dir"] = folder.name, str(folder)
    tree["model"] = {"name": "smollm2_135m", "path": "/models/smollm2", "shape": None}
    tree["data"]["path"] = f"/data/{stage}"
    tree["precision"]["default"] = "fp8" if is_fp8 else "bf16"
    tree["precision"]["recipe"]["name"] = precision if is_fp8 else "infir2"
    for key, value in (config or {}).items():
        part, _, leaf = key.rpartition(".")
        (tree[part] if part else tree)[leaf] = value
    paths.root.mkdir(parents=True)
    paths.config.write_text(yaml.safe_dump(tree, sort_keys=False))
    on_gpu = bool(env and env.get("gpus"))
    backend = {"name": "native" if on_gpu else "reference", "reason": "the best that runs here"}
    write_json(paths.env, {**ENV, "device": "cuda" if on_gpu else "cpu", "backend": backend, **(env or {})})
    share = fp8_share if fp8_share is not None else (0.79 if is_fp8 else 0.0)
    write_json(paths.coverage, coverage_json(share))

    curve = base_losses(num_steps) if losses is None else losses
    times = step_time_s * np.exp(rng.normal(0, 0.02, num_steps)) * np.where(np.arange(num_steps) < 2, 4.0, 1.0)
    for i in range(logged if logged is not None else num_steps):
        write_step(
            paths,
            i + 1,
            curve[i] * (1 + gap + (rng.normal(0, drift) if is_fp8 else 0.0)),
            times[i],
            memory_bytes,
            share,
        )
        if (i + 1) % 30 == 0:
            log_event(paths, "checkpoint", i + 1, folder=f"step-{i + 1:08d}")
    write_status(
        paths, state, step=logged or num_steps, cause=cause, hint="look into logs/" if cause else "", exit_code=0
    )  # type: ignore[arg-type]
    for inference, accuracy in (answers or {}).items():
        write_eval(folder, inference, accuracy)


def write_step(paths: RunPaths, step: int, loss: float, time_s: float, memory_bytes: int, share: float) -> None:
    """Appends one step to metrics.jsonl."""
    stats = StepStats(
        step=step, loss=float(loss), grad_norm=1.5 if math.isfinite(loss) else math.nan, lr=1e-4, trainable_tokens=2048, tokens=2048,
        tokens_seen=2048 * step, step_time_s=time_s, data_wait_s=0.001 * time_s, forward_s=0.3 * time_s, backward_s=0.6 * time_s,
        optimizer_s=0.09 * time_s, tokens_per_second=2048 / time_s, memory_peak_bytes=memory_bytes, fp8_flops_share=share,
        validation_loss=float(loss) * 1.01 if step % 20 == 0 else None,
    )  # fmt: skip
    append_jsonl(paths.metrics, stats.to_line())


def coverage_json(share: float) -> dict[str, Any]:
    """coverage.json of a run whose blocks ran in FP8 and whose head did not."""
    shares = dict.fromkeys(("fprop", "dgrad", "wgrad", "total"), share)
    return {
        "schema": 1,
        "num_linears": 211,
        "fp8_linears": 210 if share else 0,
        "mixed_linears": 0,
        "fp8_share": shares,
    }


def write_eval(
    folder: Path,
    precision: str,
    accuracy: float,
    *,
    num_questions: int = 10,
    samples: int = 1,
    seed: int = 5,
    protocol: str = "p1",
) -> None:
    """Writes eval/smoke-<precision>: completions.jsonl and result.json, `accuracy` of the answers right."""
    out, rng = RunPaths(folder).eval / f"smoke-{precision}", np.random.default_rng(seed)
    total = len(FAMILIES) * num_questions * samples
    scores = (rng.permutation(total) < round(accuracy * total)).astype(float)
    completions = [
        Completion(
            family=FAMILIES[i // samples // num_questions], index=i // samples % num_questions, sample=i % samples, question="1 + 1 = ?",
            expected="2", text="<answer>2</answer>", answer="2" if i % 10 else None, score=float(score),
            finish_reason="stop" if i % 20 else "length", prompt_tokens=20, answer_tokens=30,
        )
        for i, score in enumerate(scores)
    ]  # fmt: skip
    for completion in completions:
        append_jsonl(out / "completions.jsonl", dataclasses.asdict(completion))
    result = {"schema": 1, "name": out.name, "suite": "smoke", "precision": precision, "protocol_hash": protocol}
    result |= {
        "overall": summarize(completions),
        "families": by_family(completions),
        "model": {"path": str(folder), "step": 60},
    }
    write_json(out / "result.json", result)
