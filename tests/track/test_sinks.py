"""The Tracker against real SQLite stores, a server that is silent, and stores that can't be."""

import math
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import fp8ctl
from fp8ctl.config.schema import TrackConfig, TrainConfig
from fp8ctl.paths import RunPaths
from fp8ctl.track import mlflow_sink, sinks
from fp8ctl.track.mlflow_sink import MLFLOW_ENVIRONMENT, flatten
from fp8ctl.track.record import RunRecord, StepStats, append_jsonl
from fp8ctl.track.sinks import Tracker, mend_tail

REPOSITORY = Path(fp8ctl.__file__).parents[1]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded machines take long to import mlflow; what is tested is not how long."""
    monkeypatch.setattr(mlflow_sink, "_CLOSE_S", 300.0)


def stats(step: int, loss: float = 2.5, grad_norm: float = 1.0) -> StepStats:
    return StepStats(
        step=step, loss=loss, grad_norm=grad_norm, lr=1e-4, trainable_tokens=8, tokens=9, tokens_seen=9 * step
    )


def tracker(paths: RunPaths, params: dict[str, Any] | None = None, uri: str | None = None) -> Tracker:
    paths.root.mkdir(parents=True, exist_ok=True)
    return Tracker(
        paths,
        TrackConfig(mlflow=True, mlflow_uri=uri),
        run_name="cpt-tiny",
        params=params or {"seed": 1},
        tags={"stage": "cpt"},
    )


def client(runs: Path) -> Any:
    os.environ.update(MLFLOW_ENVIRONMENT)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{runs / 'mlflow.db'}")


def all_runs(runs: Path) -> list[Any]:
    found = client(runs)
    return list(found.search_runs([e.experiment_id for e in found.search_experiments()]))


def warnings(capfd: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capfd.readouterr()
    assert out == ""
    return err.splitlines()


def test_two_trackers_feed_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    runs = tmp_path / "all runs"
    paths = RunPaths(runs / "r1")
    first = tracker(paths, {"seed": 1, "optim": {"lr": 1e-4}, "track": {"token": "zQ7pLm2vX9rT4kB8"}})
    for step in range(1, 31):
        first.log(stats(step, loss=math.inf if step == 7 else math.nan if step == 8 else 3 - step / 100))
    first.close("preempted")
    (run,) = all_runs(runs)
    assert run.info.status == "KILLED"

    paths.config.write_text("seed: 1\n")
    second = tracker(paths, {"seed": 1, "optim": {"lr": 2e-4}, "new": True})
    for step in range(31, 61):
        second.log(stats(step, loss=3 - step / 100))
    second.log_values(60, {"eval/accuracy": 0.25, "odd name!?": 1.0, "absent": None})  # type: ignore[dict-item]
    second.close("finished")
    second.close("failed")  # the first one counts

    (run,) = all_runs(runs)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "cpt-tiny")
    assert run.data.params == {"seed": "1", "optim.lr": "0.0001", "track.token": "[redacted]", "new": "true"}
    tags = {k: v for k, v in run.data.tags.items() if not k.startswith("mlflow.")}
    assert tags == {"stage": "cpt", "fp8ctl.run_folder": str(paths.root), "changed.optim.lr": "0.0002"}
    history = client(runs).get_metric_history(run.info.run_id, "loss")
    assert sorted(m.step for m in history) == list(range(1, 61))
    values = {m.step: m.value for m in history}
    assert values[60] == 2.4 and math.isnan(values[7]) and math.isnan(values[8])  # infinity would be stored as 1.8e308
    assert run.data.metrics["eval/accuracy"] == 0.25 and run.data.metrics["odd name__"] == 1.0
    assert [a.path for a in client(runs).list_artifacts(run.info.run_id)] == ["config.yaml"]
    assert run.info.artifact_uri.startswith((runs / "mlflow-artifacts").as_uri())
    assert [s["loss"] for s in RunRecord(paths.root).steps()][6] == math.inf  # the record keeps what MLflow can't
    assert list((tmp_path / "cwd").iterdir()) == []  # no ./mlruns, no ./mlflow.db
    assert warnings(capfd) == []


def test_a_run_removed_from_the_store_is_made_anew(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path / "r1")
    ids = []
    for step in (1, 2):
        one = tracker(paths)
        one.log(stats(step))
        one.close("finished")
        ids.append((paths.root / "mlflow_run_id").read_text())
        client(tmp_path).delete_run(ids[-1].strip())
    (paths.root / "mlflow_run_id").write_text("from-another-store\n")
    one = tracker(paths)
    one.log(stats(3))
    one.close("failed")
    (run,) = all_runs(tmp_path)
    assert len({*ids, run.info.run_id + "\n"}) == 3
    assert run.info.status == "FAILED" and run.data.metrics["tokens_seen"] == 27
    assert warnings(capfd) == []


WRITER = """
import sys
from fp8ctl.config.schema import TrackConfig
from fp8ctl.paths import RunPaths
from fp8ctl.track.record import StepStats
from fp8ctl.track import mlflow_sink
from fp8ctl.track.sinks import Tracker
mlflow_sink._CLOSE_S = 300.0  # a loaded machine takes long to import mlflow
paths = RunPaths(sys.argv[1])
paths.root.mkdir(parents=True)
print("ready", flush=True)
sys.stdin.readline()
t = Tracker(paths, TrackConfig(mlflow=True), run_name=sys.argv[1], params={"a": 1}, tags={})
for s in range(1, 101):
    t.log(StepStats(step=s, loss=2.0, grad_norm=1.0, lr=1e-3, trainable_tokens=1, tokens=1, tokens_seen=s))
t.close("finished")
from mlflow.telemetry import get_telemetry_client
assert get_telemetry_client() is None
"""


def test_two_processes_create_one_store_at_once(tmp_path: Path) -> None:
    hidden = {*MLFLOW_ENVIRONMENT, "CI", "PYTEST_CURRENT_TEST"}  # the last two switch telemetry off by themselves
    env = {k: v for k, v in os.environ.items() if k not in hidden} | {"PYTHONPATH": str(REPOSITORY)}
    pipe = subprocess.PIPE
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, f"runs/{n}"],
            cwd=tmp_path,
            env=env,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for n in "ab"
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        out, err = writer.communicate(timeout=600)
        assert (writer.returncode, out, err) == (0, "", "")
    runs = all_runs(tmp_path / "runs")
    assert sorted(r.info.run_name for r in runs) == ["runs/a", "runs/b"]
    for run in runs:
        assert (run.info.status, run.data.metrics["tokens_seen"]) == ("FINISHED", 100.0)
        assert len(client(tmp_path / "runs").get_metric_history(run.info.run_id, "loss")) == 100
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////dev/null/mlflow.db",
        "bogus://me:secret-word@host/x",
        "http://127.0.0.1:9",
        "./mlruns",
        "postgresql://u:secret-word@h/x",
    ],
)
def test_a_store_that_can_not_be_costs_one_warning(uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path / "r1")
    one = tracker(paths, uri=uri)
    started = time.monotonic()
    for step in range(1, 201):
        one.log(stats(step))
    assert time.monotonic() - started < 5.0
    one.close("finished")
    assert [s["step"] for s in RunRecord(paths.root).steps()] == list(range(1, 201))
    (warning,) = warnings(capfd)
    assert warning.startswith("warning: MLflow (") and "does not take the metrics: " in warning
    assert warning.endswith("; the run goes on, and its own files have everything")
    assert "secret-word" not in warning


def test_a_silent_server_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlflow_sink, "_CLOSE_S", 0.3)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, never answers
        one = tracker(RunPaths(tmp_path / "r1"), uri=f"http://127.0.0.1:{server.getsockname()[1]}")
        one.log(stats(1))
        time.sleep(0.2)
        started = time.monotonic()
        one.close("finished")
        assert time.monotonic() - started < 3.0  # a request waits 3 s and is tried twice
        (warning,) = warnings(capfd)
        assert "did not take the last values within" in warning
        for thread in threading.enumerate():
            if thread.name == "mlflow-sink":
                thread.join()
    assert warnings(capfd) == []


def test_values_of_an_outage_arrive_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlflow_sink, "_FLUSH_S", 0.05)
    monkeypatch.setattr(mlflow_sink, "_LONGEST_PAUSE_S", 0.1)
    blocker = tmp_path / "store"
    blocker.write_text("a file where the folder of the store should be")
    one = tracker(RunPaths(tmp_path / "r1"), uri=f"sqlite:///{blocker / 'mlflow.db'}")
    for step in range(1, 51):
        one.log(stats(step))
    seen: list[str] = []
    deadline = time.monotonic() + 60
    while not seen and time.monotonic() < deadline:
        time.sleep(0.05)
        seen += warnings(capfd)
    blocker.unlink()
    for step in range(51, 101):
        one.log(stats(step))
    one.close("finished")
    (run,) = all_runs(blocker)
    assert sorted(m.step for m in client(blocker).get_metric_history(run.info.run_id, "loss")) == list(range(1, 101))
    assert len(seen + warnings(capfd)) == 1


def test_a_full_queue_drops_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_sink, "_QUEUE_VALUES", 40)
    held = threading.Lock()
    monkeypatch.setattr(mlflow_sink, "_silence", lambda: held.acquire() and held.release())
    with held:
        one = tracker(RunPaths(tmp_path / "r1"))
        for step in range(1, 101):
            one.log_values(step, {"a": step, "b": step})
    one.close("finished")
    (run,) = all_runs(tmp_path)
    assert [m.step for m in client(tmp_path).get_metric_history(run.info.run_id, "a")] == list(range(81, 101))


def test_without_mlflow_only_the_record_is_written(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "r1")
    one = Tracker(paths, TrackConfig(), run_name="x", params={}, tags={})
    one.log(stats(1))
    one.log_values(1, {"a": 1.0})
    one.close("finished")
    assert [p.name for p in tmp_path.rglob("*")] == ["r1", "metrics.jsonl"]


def test_lines_wait_for_a_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = RunPaths(tmp_path)
    one = Tracker(paths, TrackConfig(), run_name="x", params={}, tags={})
    one.log(stats(1))
    kept = tmp_path / "kept"
    paths.metrics.rename(kept)
    paths.metrics.symlink_to("/dev/full")  # every write fails with "no space left on device"
    one.log(stats(2))
    one.log(stats(3))
    paths.metrics.unlink()
    kept.rename(paths.metrics)
    with open(paths.metrics, "a") as f:
        f.write('{"step": 2, "lo')  # what a failed write may leave
    one.log(stats(4))
    assert [s["step"] for s in RunRecord(tmp_path).steps()] == [1, 2, 3, 4]
    (warning,) = warnings(capfd)
    assert "No space left on device" in warning and warning.endswith("; kept in memory and tried again")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"step": 1}\n{"st', '{"step": 1}\n'),
        ('{"step": 1}\n{"step": 2}', '{"step": 1}\n{"step": 2}\n'),
        ('{"step": 1}\n', '{"step": 1}\n'),
        ('{"st', ""),
        ("", ""),
    ],
)
def test_tail_of_a_killed_writer_is_mended(before: str, after: str, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    file.write_text(before)
    mend_tail(file)
    assert file.read_text() == after
    mend_tail(tmp_path / "absent")


def test_tail_of_a_long_file_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_TAIL_BYTES", 64)
    file = tmp_path / "metrics.jsonl"
    for step in range(100):
        append_jsonl(file, {"step": step})
    whole = file.read_text()
    file.write_text(whole + '{"ste')
    mend_tail(file)
    assert file.read_text() == whole
    file.write_text("x" * 500)  # no line in sight: not ours, left alone
    mend_tail(file)
    assert file.read_text() == "x" * 500


def test_settings_are_flattened_within_the_limits() -> None:
    config = TrainConfig().model_dump() | {
        "long": "x" * 9000,
        "odd": {"a b/../c!": None},
        "k" * 300: 1,
        "list": [1, "a"],
        "sub": [{"a": 1}],
    }
    flat = dict(flatten(config))
    assert (
        flat["optim.peak_lr"] == "0.0001"
        and flat["model.path"] == "null"
        and flat["engine.activation_checkpointing"] == "false"
    )
    assert flat["list"] == '[1, "a"]' and flat["sub.0.a"] == "1" and flat["precision.rules"] == "[]"
    assert len(flat["long"]) == 6000 and flat["long"].endswith("x...")
    assert flat["odd.a b/_/c_"] == "null"
    assert max(map(len, flat)) <= 250
