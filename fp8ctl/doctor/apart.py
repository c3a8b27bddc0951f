"""Runs checks in a process of their own: one that hangs, aborts or crashes is an answer, and the others still run.

The process answers on a pipe of its own, one JSON line a job, because libraries print to stdout. A job whose process dies is
blamed with the signal and its last words, and a new process takes the jobs that are left. After a CUDA error nothing works any
more in that process, so it says what it found and leaves.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from fp8ctl.doctor.finding import LONGEST_DETAIL, in_words

LIMIT_S = 180.0
"""Longest wait for one answer; the first one includes importing torch from a cold disk, others compile kernels."""
_SPOILT = 70
"""Exit code of a process that a CUDA error made useless."""


class Job(NamedTuple):
    """A function `module:name` of plain arguments that returns what JSON can hold."""

    target: str
    arguments: tuple[str, ...] = ()


class Failed(NamedTuple):
    """How a job failed, in words."""

    how: str


def run_apart(*groups: Sequence[Job], limit_s: float = LIMIT_S) -> list[list[Any]]:
    """The results of each group's jobs in order, `Failed` for those that failed.

    Groups run side by side, the jobs of one after each other in one process as long as it lives.
    """
    lines: _Lines = queue.Queue()
    running = [_Group(jobs, lines, limit_s) for jobs in groups]
    try:
        while waiting := [group for group in running if group.is_waiting]:
            try:
                group, process, line = lines.get(timeout=max(0.0, min(g.deadline for g in waiting) - time.monotonic()))
            except queue.Empty:
                for late in (g for g in waiting if g.deadline <= time.monotonic()):
                    late.give_up()
            else:
                group.take(process, line)
    finally:
        for group in running:
            group.end()
    return [group.results for group in running]


class _Group:
    """Jobs, the results so far, and the process that works on the rest."""

    def __init__(self, jobs: Sequence[Job], lines: _Lines, limit_s: float) -> None:
        self._jobs, self._lines, self._limit_s = list(jobs), lines, limit_s
        self.results: list[Any] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._start()

    @property
    def is_waiting(self) -> bool:
        return len(self.results) < len(self._jobs)

    def take(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        """An answer; or the end of the process, which is the fault of the job that it was at."""
        if process is not self._process or not self.is_waiting:
            return
        self.deadline = time.monotonic() + self._limit_s
        if line:
            answer = json.loads(line)
            self.results.append(Failed(answer["error"]) if "error" in answer else answer["result"])
            self._has_answered = True
            return
        code = process.wait()
        if code != _SPOILT or not self._has_answered:
            self.results.append(Failed(f"its process {_death(code)}{self._last_words()}"))
        self.end()
        self._start()

    def give_up(self) -> None:
        """The job at hand took too long."""
        self.results.append(Failed(f"no answer within {self._limit_s:g} s"))
        self.end()
        self._start()

    def end(self) -> None:
        """Ends the process and whatever it started (compilers)."""
        if self._process is not None and self._stderr is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._stderr.close()
        self._process = None

    def _start(self) -> None:
        """A process for the jobs that are left."""
        if not self.is_waiting:
            return
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fp8ctl.doctor.apart", json.dumps(self._jobs[len(self.results) :])],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._stderr, env=_environment(), start_new_session=True,
        )  # fmt: skip
        self._has_answered = False
        self.deadline = time.monotonic() + self._limit_s
        threading.Thread(target=self._pass_on, args=(self._process,), daemon=True).start()

    def _pass_on(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as pipe:
            for line in pipe:
                self._lines.put((self, process, line))
        self._lines.put((self, process, b""))

    def _last_words(self) -> str:
        assert self._stderr is not None
        self._stderr.seek(0)
        lines = [x.strip() for x in self._stderr.read().decode(errors="replace").splitlines() if x.strip()]
        return f": {lines[-1][:LONGEST_DETAIL]}" if lines else ""


_Lines: TypeAlias = "queue.Queue[tuple[_Group, subprocess.Popen[bytes], bytes]]"


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **quiet, "PYTHONPATH": path}


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def main() -> None:
    """Answers the jobs of the command line, each as soon as it is done."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for target, arguments in json.loads(sys.argv[1]):
        module, _, name = target.partition(":")
        try:
            answer = {"result": getattr(importlib.import_module(module), name)(*arguments)}
        except Exception as e:  # any fault of any library is an answer
            answer = {"error": in_words(e)}
        print(json.dumps(answer), file=answers)
        if _cuda_is_spoilt():
            os._exit(_SPOILT)
    os._exit(0)  # a library that is broken may well crash on its way out


def _cuda_is_spoilt() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    main()
