"""Processes of their own: answers come in order, and what dies or hangs is blamed while the rest still runs."""

from __future__ import annotations

import signal
import subprocess
import textwrap

import pytest

from fp8ctl.doctor import apart
from fp8ctl.doctor.apart import Failed, Job, run_apart


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """A module of jobs that misbehave, importable in the other process."""
    (tmp_path / "misbehave.py").write_text(
        textwrap.dedent("""
        import os, signal, subprocess, sys, time

        def add(a, b): return int(a) + int(b)
        def refuse(): raise ValueError("no such thing\\nmore")
        def chat():
            print("a library that talks"); subprocess.run(["echo", "its child talks too"]); return ["said", True]
        def crash():
            print("libfoo.so: undefined symbol: bar", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        def leave(): os._exit(3)
        def hang(): time.sleep(600)
        def nap():
            start = time.time()
            time.sleep(1)
            return [start, time.time()]
        def process(): return os.getpid()
        class Cuda:
            def is_initialized(self): return True
            def synchronize(self): raise RuntimeError("CUDA error: an illegal memory access was encountered")
        def spoil():
            sys.modules["torch"] = type(sys)("torch"); sys.modules["torch"].cuda = Cuda()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda *names: [Job(f"misbehave:{name}") for name in names]


def test_answers_come_in_order_whatever_libraries_print(jobs) -> None:
    [results] = run_apart([Job("misbehave:add", ("2", "3")), *jobs("chat", "refuse", "chat")])
    assert results == [5, ["said", True], Failed("ValueError: no such thing"), ["said", True]]
    assert run_apart([]) == [[]]


def test_a_crash_is_blamed_on_its_job_and_the_rest_still_runs(jobs) -> None:
    [[first, crashed, left, second, third]] = run_apart(jobs("process", "crash", "leave", "process", "process"))
    assert crashed == Failed("its process was killed by SIGSEGV: libfoo.so: undefined symbol: bar")
    assert left == Failed("its process ended with exit code 3")
    assert isinstance(first, int) and second == third != first


def test_a_hang_is_ended(jobs) -> None:
    [[hung, after]] = run_apart(jobs("hang", "chat"), limit_s=2)
    assert hung == Failed("no answer within 2 s")
    assert after == ["said", True]


def test_after_a_cuda_error_others_get_a_fresh_process(jobs) -> None:
    [[first, spoilt, after]] = run_apart(jobs("process", "spoil", "process"))
    assert spoilt == Failed("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert isinstance(after, int) and after != first


def test_a_job_that_does_not_exist_is_an_answer(jobs) -> None:
    [[module, name]] = run_apart([Job("nowhere:x"), Job("misbehave:nothing")])
    assert module == Failed("ModuleNotFoundError: No module named 'nowhere'")
    assert "has no attribute 'nothing'" in name.how


def test_groups_run_side_by_side(jobs) -> None:
    one, crashing, two = run_apart(jobs("nap", "process"), jobs("crash", "process"), jobs("nap", "process"))
    assert max(one[0][0], two[0][0]) < min(one[0][1], two[0][1]), "both slept at the same time"
    assert one[1] != two[1]
    assert crashing[0].how.startswith("its process was killed by SIGSEGV") and isinstance(crashing[1], int)


def test_an_interrupt_leaves_no_process_behind(jobs, monkeypatch) -> None:
    started = []

    class Watched(subprocess.Popen):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    def interrupt(self, process, line) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(apart.subprocess, "Popen", Watched)
    monkeypatch.setattr(apart._Group, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_apart(jobs("hang"), jobs("process"))
    assert started[0].returncode == -signal.SIGKILL
    assert started[1].returncode in (0, -signal.SIGKILL)
