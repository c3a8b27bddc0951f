"""What each rank runs: read the resolved settings, build, train, leave a clear trace of how it ended.

Started by `launch/job.py` through DeepSpeed's launcher as `python -m fp8ctl.worker.main --run-dir=FOLDER`. A rank that stops on a
signal exits 0 after its checkpoint, because the launcher kills the others as soon as one exits otherwise; status.json tells
the parent what happened.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from fp8ctl.config.compose import load
from fp8ctl.config.schema import TrainConfig
from fp8ctl.errors import Fp8ctlError
from fp8ctl.paths import RunPaths
from fp8ctl.track.record import write_json, write_status
from fp8ctl.track.redact import redact_text


class StopSignal:
    """Remembers the first stop signal; the loop asks after it once a step, so that all ranks stop together."""

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: Any) -> None:
        self.number = self.number or number

    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.number is not None


def main() -> None:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--command", default="", help="What the user typed, for env.json.")
    args = parser.parse_args()
    paths, rank = RunPaths(args.run_dir), int(os.environ.get("RANK", "0"))
    _redirect_output(paths, rank)
    stop = StopSignal()
    try:
        config = load(TrainConfig, paths.config)
        from fp8ctl.engine.dist import end_process
        from fp8ctl.worker.run import run

        finished, step = run(config, paths, stop.requested, args.resume_from, args.command)
    except BaseException as error:  # also SystemExit from libraries: a rank never dies without a word
        _leave_cause(paths, rank, error)
        # Not sys.exit: other threads and collectives may wait for ranks that are gone.
        os._exit(1)
    if rank == 0:
        if finished:
            write_status(paths, "finished", step=step, exit_code=0)
        else:
            number = stop.number or signal.SIGTERM
            write_status(
                paths, "preempted", step=step, cause=f"{signal.Signals(number).name}; saved at step {step}",
                hint=f"continue with --resume --run-dir {shlex.quote(str(paths.root))}", exit_code=128 + number,
            )  # fmt: skip
    end_process()


def _redirect_output(paths: RunPaths, rank: int) -> None:
    # At the level of file descriptors, so that what C++ libraries print lands in the log too.
    paths.logs.mkdir(parents=True, exist_ok=True)
    fd = os.open(paths.rank_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _leave_cause(paths: RunPaths, rank: int, error: BaseException) -> None:
    traceback.print_exc()
    sys.stderr.flush()
    if isinstance(error, Fp8ctlError):
        message, hint, code = error.message, error.hint or "", error.exit_code
    else:
        message, hint, code = f"{type(error).__name__}: {error}".strip().splitlines()[0], _hint(error), 1
    try:
        write_json(
            paths.rank_error(rank),
            {"rank": rank, "time": time.time(), "message": redact_text(message), "hint": hint, "exit_code": code},
        )
    except OSError:
        print(f"could not write {paths.rank_error(rank)}: {message}", file=sys.stderr)


def _hint(error: BaseException) -> str:
    text = str(error).lower()
    if "out of memory" in text or isinstance(error, MemoryError):
        return "lower batch.micro_batch_rows or batch.seq_len_tokens, turn on engine.activation_checkpointing, or raise engine.zero_stage"
    if "no space left" in text:
        return "free space on the disk of the run folder, then continue with --resume"
    if "timed out" in text or "connection closed by peer" in text or "connection reset" in text:
        return "another rank is gone or far behind: see the other files in logs/"
    return ""


if __name__ == "__main__":
    main()
