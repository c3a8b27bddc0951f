from __future__ import annotations

import shutil
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from fp8ctl.doctor import machine
from fp8ctl.doctor.finding import Answer
from fp8ctl.doctor.machine import Driver

GIB = 1 << 30
HEADER = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.159.04             Driver Version: 580.159.04     CUDA Version: 13.0     |
"""


@pytest.fixture
def free(monkeypatch):
    def pretend(gib: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(gib * GIB)))

    return pretend


@pytest.mark.parametrize(
    ("gib", "state", "detail"),
    [(56, "ok", "56 GiB free here"), (3.2, "note", "3.2 GiB free here"), (0.05, "broken", "0.05 GiB free here")],
)
def test_disk(free, gib, state, detail) -> None:
    free(gib)
    answer = machine.disk()
    assert (answer.state, answer.detail) == (state, detail)
    assert ("14 bytes a parameter" in answer.fix) == (state != "ok")


def test_shared_memory(free, monkeypatch) -> None:
    free(23.5)
    assert machine.shared_memory() == Answer("ok", "23.5 GiB in /dev/shm")
    free(0.0625)  # docker's default of 64 MiB
    assert machine.shared_memory() == Answer(
        "broken", "0.06 GiB in /dev/shm", "make it larger (`docker run --shm-size=8g`)"
    )
    monkeypatch.setattr("pathlib.Path.is_dir", lambda path: False)
    assert machine.shared_memory() == Answer("note", "no /dev/shm on this system")


def test_memory_names_what_is_scarce(monkeypatch) -> None:
    assert machine.memory().state in ("ok", "note")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=8 * GIB, available=GIB))
    answer = machine.memory()
    assert answer.state == "note" and "1.0 GiB available" in answer.detail and answer.fix.startswith("free memory")


def test_cores_and_threads(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert machine.cores().detail.endswith("cores, OMP_NUM_THREADS=3")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert machine.cores().detail.endswith("unset (ranks get launch.threads_per_rank)")
    assert machine.python() == Answer("ok", ".".join(map(str, sys.version_info[:3])))


def test_the_compiler_is_tried_out(monkeypatch, tmp_path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"

    def pretend(script: str) -> str:
        path = tmp_path / "cc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))
        return str(path)

    path = pretend("grep -q Python.h")
    assert machine.compiler() == Answer("ok", f"{path}, with Python's headers")
    pretend("echo 'fatal error: Python.h: No such file or directory' >&2; exit 1")
    answer = machine.compiler()
    assert (answer.state, answer.fix) == ("broken", f"apt-get install {version}")
    assert "finds no Python.h in " in answer.detail
    pretend("echo 'cc1: out of memory' >&2; exit 1")
    assert f"{path} compiles nothing: cc1: out of memory" in machine.compiler().detail
    monkeypatch.setenv("CC", "/no/such/cc")
    answer = machine.compiler()
    assert answer.state == "broken" and answer.detail.startswith("/no/such/cc does not run: ")
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert machine.compiler() == Answer(
        "absent", "no gcc or clang; Triton and torch.compile on a GPU need it", "apt-get install gcc, or set CC"
    )


def nvml(**changes):
    facts = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.159.04",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
        "nvmlDeviceGetCount": lambda: 2,
    }
    return SimpleNamespace(**{**facts, **changes})


def test_the_driver_answers_through_nvml(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    assert machine.ask_driver() == Driver("580.159.04", (13, 0), 2)
    old = nvml(
        nvmlSystemGetDriverVersion=lambda: b"550.54.15", nvmlSystemGetCudaDriverVersion_v2=lambda: 12040
    )  # older releases of pynvml give bytes
    monkeypatch.setitem(sys.modules, "pynvml", old)
    assert machine.ask_driver() == Driver("550.54.15", (12, 4), 2)


def test_nvidia_smi_answers_where_nvml_does_not(monkeypatch) -> None:
    def no_library() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    def smi(line, **_):
        text = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n" if line[1:] == ["-L"] else HEADER
        return SimpleNamespace(stdout=text)

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=no_library))
    monkeypatch.setattr(subprocess, "run", smi)
    assert machine.ask_driver() == Driver("580.159.04", (13, 0), 1)
    monkeypatch.setattr(subprocess, "run", lambda line, **_: SimpleNamespace(stdout="NVIDIA-SMI has failed"))
    assert machine.ask_driver() is None

    def absent(line, **_):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(subprocess, "run", absent)
    assert machine.ask_driver() is None

    def hangs(line, **_):
        raise subprocess.TimeoutExpired(line, 10)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert machine.ask_driver() is None
