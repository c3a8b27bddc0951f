"""Training through the command a user would type: ranks, precision, stop and resume, death. Real DeepSpeed throughout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fp8ctl.config.compose import compose
from fp8ctl.launch.job import rank_processes
from fp8ctl.model.shapes import hf_config
from fp8ctl.track.record import RunRecord

pytestmark = pytest.mark.slow
EIGHT = [
    "loop.num_steps=8",
    "monitor.layer_stats_every_steps=4",
    "optim.peak_lr=1e-3",
    "loop.save_every_steps=4",
    "batch.global_batch_rows=4",
    "batch.micro_batch_rows=2",
]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in RunRecord(run_dir).steps()]


@pytest.fixture(scope="module")
def whole_run(fp8ctl, train_words, tmp_path_factory) -> Path:
    """Eight uninterrupted steps in FP8, FP8 required."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    fp8ctl(*train_words(run_dir, "precision=infir2", *EIGHT, "--require-fp8"))
    return run_dir


def test_the_run_folder_tells_the_whole_story(whole_run) -> None:
    record = RunRecord(whole_run)
    steps = record.steps()
    assert [s["step"] for s in steps] == list(range(1, 9))
    assert all(s["fp8_flops_share"] > 0.3 for s in steps)
    assert steps[-1]["validation_loss"] > 0
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert record.json(record.paths.status)["state"] == "finished"
    coverage = record.json(record.paths.coverage)
    assert (coverage["fp8_linears"], coverage["num_linears"]) == (14, 15)  # the tied head is the fifteenth
    assert {p.name for p in record.paths.checkpoints.iterdir()} == {"step-00000004", "step-00000008"}
    env = record.json(record.paths.env)
    assert (env["device"], env["backend"]["name"]) == ("cpu", "reference")
    import pyarrow.dataset

    layers = pyarrow.dataset.dataset(record.paths.layers).to_table().to_pylist()
    assert {row["role"] for row in layers} == {"input", "weight", "grad_output"}
    assert all(15 < row["sqnr_db"] < 60 for row in layers if row["sqnr_db"] == row["sqnr_db"])


def test_a_stopped_run_saves_and_goes_on_bit_for_bit(whole_run, train_words, tmp_path, environment, fp8ctl) -> None:
    run_dir = tmp_path / "run"
    line = [sys.executable, "-m", "fp8ctl", *train_words(run_dir, "precision=infir2", *EIGHT, "loop.num_steps=400")]
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(losses(run_dir)) >= 2 if (run_dir / "metrics.jsonl").exists() else False, process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "--resume --run-dir" in stderr
    status = RunRecord(run_dir).json(run_dir / "status.json")
    assert (status["state"], status["exit_code"]) == ("preempted", 143)
    stopped_at = status["step"]
    assert (run_dir / f"checkpoints/step-{stopped_at:08d}/manifest.json").exists()
    if stopped_at < 8:  # the machine may be fast
        fp8ctl("train", "cpt", "--resume", "--run-dir", run_dir, "loop.num_steps=8")
        assert any(e["kind"] == "resumed" and e["step"] == stopped_at for e in RunRecord(run_dir).events())
    # wsd without decay: the learning rate does not depend on the number of steps
    assert losses(run_dir)[:8] == losses(whole_run)
    assert RunRecord(run_dir).steps()[7]["grad_norm"] == RunRecord(whole_run).steps()[7]["grad_norm"]


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-3)])
def test_two_ranks_and_accumulation_agree_with_one(fp8ctl, train_words, tmp_path, dtype, tolerance) -> None:
    same = [
        f"engine.dtype={dtype}",
        "loop.num_steps=4",
        "batch.global_batch_rows=4",
        "loop.validation_rows=4",
        "optim.peak_lr=1e-3",
    ]
    fp8ctl(*train_words(tmp_path / "one", *same, "batch.micro_batch_rows=4"))
    fp8ctl(*train_words(tmp_path / "two", *same, "batch.micro_batch_rows=1", "launch.num_ranks=2", "engine=zero2"))
    one, two = RunRecord(tmp_path / "one").steps(), RunRecord(tmp_path / "two").steps()
    for name in ("loss", "grad_norm"):
        assert [s[name] for s in two] == pytest.approx([s[name] for s in one], rel=tolerance)
    assert two[-1]["validation_loss"] == pytest.approx(one[-1]["validation_loss"], rel=tolerance)
    assert [s["trainable_tokens"] for s in two] == [s["trainable_tokens"] for s in one]


def test_a_rank_that_dies_ends_the_run_with_its_cause(train_words, tmp_path, environment) -> None:
    run_dir = tmp_path / "run"
    line = train_words(run_dir, "launch.num_ranks=2", "batch.global_batch_rows=2", "loop.num_steps=100000")
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8ctl", *line], env=environment, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: (run_dir / "metrics.jsonl").exists(), process)
    (launcher,) = [c for c in psutil.Process(process.pid).children() if "deepspeed.launcher.launch" in c.cmdline()]
    ranks = rank_processes(launcher.pid)
    assert len(ranks) == 2
    os.kill(max(r.pid for r in ranks), signal.SIGKILL)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "error: " in stderr
    assert "hint: " in stderr
    assert "Traceback" not in stderr
    assert RunRecord(run_dir).json(run_dir / "status.json")["state"] == "failed"
    assert not [r for r in ranks if r.is_running() and r.status() != psutil.STATUS_ZOMBIE]


def test_a_workers_mistake_is_the_users_error(fp8ctl, train_words, tmp_path) -> None:
    words = train_words(tmp_path / "run")
    shape = compose("train_cpt", [word for word in words if "=" in word]).model.shape
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(hf_config(shape, "bfloat16")))  # but no weights
    done = fp8ctl(*words, f"model.path={tmp_path / 'model'}", code=2)
    assert "error: rank 0: " in done.stderr
    assert "safetensors" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["precision.default=fp8", "precision.head=fp8"], "which is tied to the embedding"),
        (["precision=infir2", "precision.backend=native"], "the native FP8 backend can't run: the run is on the CPU"),
        (["engine.attention=flash"], "no flash attention on cpu"),
    ],
)
def test_what_can_not_run_here_is_refused_before_anything_is_made(
    overrides, message, fp8ctl, train_words, tmp_path
) -> None:
    done = fp8ctl(*train_words(tmp_path / "run", "engine.device=cpu", *overrides), code=2)
    assert message in done.stderr
    assert "hint: " in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_data_and_model_that_do_not_fit_are_refused_before_anything_is_made(fp8ctl, train_words, tmp_path) -> None:
    for wrong, message in (
        ("data.path=/nowhere", "error: no data set in /nowhere"),
        ("model.shape.vocab_size=100", "the model's vocabulary has 100"),
        ("batch.seq_len_tokens=4096", "error: rows of 4,096 tokens are longer than the model's 2,048 positions"),
    ):
        done = fp8ctl(*train_words(tmp_path / "run", wrong), code=2)
        assert message in done.stderr
        assert "hint: " in done.stderr
        assert not (tmp_path / "run").exists()


def test_a_dry_run_starts_nothing_and_says_what_would_run(fp8ctl, train_words, tmp_path) -> None:
    done = fp8ctl(*train_words(tmp_path / "run", "precision=infir2", *EIGHT), "--dry-run")
    assert not (tmp_path / "run").exists()
    for text in (
        "14 of 15 linears in FP8",
        "reference",
        "4 rows x 64 tokens = 2 rows x 1 ranks x 2 accumulation steps",
    ):
        assert text in done.stdout


def wait_for(condition, process: subprocess.Popen[str], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
