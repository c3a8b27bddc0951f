"""Starts the ranks of a run on this node, watches them, and passes stop signals on.

DeepSpeed's per-node launcher is started directly, in a session of its own, so that a Ctrl-C reaches only this process. A stop
signal is sent to the ranks and not to the launcher: the launcher would end them one after the other with 30 seconds each, too
short for a checkpoint, and ranks that stop one by one deadlock in it. How a run ended is read from status.json, never from
the launcher's exit code, which can be 0 after a death.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fp8ctl.config.schema import TrainConfig
from fp8ctl.errors import LaunchError
from fp8ctl.launch.exit_codes import cause_of_death
from fp8ctl.paths import RunPaths
from fp8ctl.track.mlflow_sink import MLFLOW_ENVIRONMENT
from fp8ctl.track.record import RunRecord, log_event, write_status

WORKER = "fp8ctl.worker.main"
_POLL_S = 0.3
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(
    config: TrainConfig, paths: RunPaths, resume_from: Path | None = None, port: int | None = None
) -> list[str]:
    """The command line that starts all ranks of this node."""
    world = {"localhost": _devices(config.launch.num_ranks)}
    line = [sys.executable, "-m", "deepspeed.launcher.launch"]
    line += [f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}"]
    line += ["--master_addr=127.0.0.1", f"--master_port={port or free_port()}", "--no_local_rank", "--module"]
    line += [WORKER, f"--run-dir={paths.root}", f"--command={shlex.join(['fp8ctl', *sys.argv[1:]])}"]
    return line + ([f"--resume-from={resume_from}"] if resume_from else [])


def _devices(num_ranks: int) -> list[int | str]:
    # The launcher gives rank i the i-th of these, replacing CUDA_VISIBLE_DEVICES: keep to the user's choice where there is one.
    chosen: list[int | str] = [d.strip() for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d.strip()]
    return chosen[:num_ranks] if len(chosen) >= num_ranks else list(range(num_ranks))


def environment(config: TrainConfig) -> dict[str, str]:
    """Environment of the ranks: this one plus thread counts, which oversubscribe the cores when left alone."""
    threads = str(config.launch.threads_per_rank)
    env = {
        **MLFLOW_ENVIRONMENT,
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }
    env["HF_HUB_OFFLINE"] = "1"  # training never waits for a network
    if config.engine.device == "cpu":
        # The launcher hides the GPUs that it was not given; with none it must not look for them either.
        env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    package_root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(p for p in (package_root, env.get("PYTHONPATH", "")) if p)
    return env


def run_job(
    config: TrainConfig, paths: RunPaths, *, resume_from: Path | None = None, on_poll: Callable[[], None] = lambda: None
) -> int:
    """Runs all ranks to their end and returns the exit code: 0 finished, 128+N stopped by signal N, else the failure's own.

    Args:
        on_poll: called a few times a second while the ranks run (progress).

    Raises:
        LaunchError: a rank died; carries cause and next step, which also stand in status.json.
    """
    for stale in paths.logs.glob("rank-*.error.json"):
        stale.unlink()
    start_step = _last_step(paths)
    write_status(paths, "running", step=start_step)
    with open(paths.logs / "launcher.log", "w") as log:
        # The ranks put their own output into logs/rank-N.log; the launcher's chatter goes here.
        process = subprocess.Popen(
            command(config, paths, resume_from), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env=environment(config), start_new_session=True,
        )  # fmt: skip
        with _forward_signals(process, paths, config.launch.grace_s) as received:
            while process.poll() is None:
                on_poll()
                received.check_deadline()
                time.sleep(_POLL_S)
    _kill_group(process.pid)  # whatever the launcher left behind
    on_poll()
    return _conclude(paths, process.returncode, received.first)


def _conclude(paths: RunPaths, launcher_code: int, stop_signal: int | None) -> int:
    status = RunRecord(paths.root).json(paths.status)
    if status.get("state") == "finished":
        return 0
    if status.get("state") == "preempted":
        return int(status["exit_code"])
    step = _last_step(paths)
    if stop_signal is not None and not list(paths.logs.glob("rank-*.error.json")):
        name = signal.Signals(stop_signal).name
        kept = "the last checkpoint is whole" if any(paths.checkpoints.glob("step-*")) else "no checkpoint was made"
        write_status(
            paths,
            "preempted",
            step=step,
            cause=f"{name} before the ranks could save; {kept}",
            exit_code=128 + stop_signal,
        )
        return 128 + stop_signal
    cause, hint, code = cause_of_death(paths, launcher_code)
    write_status(paths, "failed", step=step, cause=cause, hint=hint, exit_code=code)
    log_event(paths, "failed", step, cause=cause)
    error = LaunchError(cause, hint)
    error.exit_code = code
    raise error


class _Received:
    """The stop signals that came, and when the ranks' time for a checkpoint is over."""

    def __init__(self, process: subprocess.Popen[Any], paths: RunPaths, grace_s: int) -> None:
        self.first: int | None = None
        self._process, self._paths, self._grace_s = process, paths, grace_s
        self._deadline = float("inf")

    def __call__(self, number: int, _frame: Any) -> None:
        if self.first is not None:  # asked twice: now
            self._deadline = 0.0
            return
        self.first = number
        self._deadline = time.monotonic() + self._grace_s
        for rank in rank_processes(self._process.pid):
            rank.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            _kill_group(self._process.pid)


@contextmanager
def _forward_signals(process: subprocess.Popen[Any], paths: RunPaths, grace_s: int) -> Iterator[_Received]:
    received = _Received(process, paths, grace_s)
    previous = {number: signal.signal(number, received) for number in _STOP_SIGNALS}
    try:
        yield received
    except BaseException:
        _kill_group(process.pid)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def rank_processes(launcher_pid: int) -> list[Any]:
    """The rank processes (psutil) that a launcher started."""
    import psutil

    try:
        children = psutil.Process(launcher_pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    ranks = []
    for child in children:
        try:
            if WORKER in child.cmdline():
                ranks.append(child)
        except psutil.NoSuchProcess:
            continue
    return ranks


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _last_step(paths: RunPaths) -> int:
    steps = RunRecord(paths.root).steps()
    return int(steps[-1]["step"]) if steps else 0
