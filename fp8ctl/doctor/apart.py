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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from fp8ctl.doctor.finding import LONGEST_DETAIL, in_words

LIMIT_S = 120.0
"""Longest wait for one answer; the first one includes importing torch from a cold disk."""
_SPOILT = 70
"""Exit code of a process that a CUDA error made useless."""


class Job(NamedTuple):
    """A function `module:name` of plain arguments that returns what JSON can hold."""

    target: str
    arguments: tuple[str, ...] = ()


class Failed(NamedTuple):
    """How a job failed, in words."""

    how: str


def run_apart(jobs: Sequence[Job], *, limit_s: float = LIMIT_S) -> list[Any]:
    """The result of each job in order, or a `Failed`."""
    results: list[Any] = []
    while len(results) < len(jobs):
        results += _run_some(jobs[len(results) :], limit_s)
    return results


def _run_some(jobs: Sequence[Job], limit_s: float) -> list[Any]:
    """Results of the jobs that one process managed, at least one, the last perhaps `Failed`."""
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "fp8ctl.doctor.apart", json.dumps(jobs)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env=_environment(), start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=_pass_on, args=(process.stdout, lines), daemon=True).start()
        results: list[Any] = []
        try:
            while len(results) < len(jobs):
                line = lines.get(timeout=limit_s)
                if not line:
                    code = process.wait(timeout=limit_s)
                    if code == _SPOILT and results:
                        return results
                    return [*results, Failed(f"its process {_death(code)}{_last_words(stderr)}")]
                answer = json.loads(line)
                results.append(Failed(answer["error"]) if "error" in answer else answer["result"])
        except (queue.Empty, subprocess.TimeoutExpired):
            results.append(Failed(f"no answer within {limit_s:g} s"))
        finally:
            _end(process)
        return results


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **quiet, "PYTHONPATH": path}


def _pass_on(pipe: IO[bytes], lines: queue.Queue[bytes]) -> None:
    for line in pipe:
        lines.put(line)
    lines.put(b"")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and whatever it started (compilers)."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _death(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _last_words(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    lines = [line.strip() for line in stderr.read().decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1][:LONGEST_DETAIL]}" if lines else ""


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
