"""The machine around the GPU: nothing here needs torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from fp8ctl.doctor.finding import Answer

_GIB = 1 << 30
_LIMIT_S = 10


def python() -> Answer:
    """The interpreter's version."""
    return Answer("ok", ".".join(map(str, sys.version_info[:3])))


def cores() -> Answer:
    """Cores that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "unset (ranks get launch.threads_per_rank)")
    return Answer("ok", f"{count} cores, OMP_NUM_THREADS={threads}")


def memory() -> Answer:
    """Memory of the machine, or of the container where that is less."""
    import psutil

    from fp8ctl.track.environment import collect_environment

    total = collect_environment()["memory_bytes"] / _GIB
    free = min(psutil.virtual_memory().available / _GIB, total)
    detail = f"{total:.0f} GiB, {free:.1f} GiB available"
    if free < 2:
        return Answer("note", detail, "free memory: loading a model takes about 4 bytes a parameter on the host")
    return Answer("ok", detail)


def disk() -> Answer:
    """Room in the current folder, where run folders go."""
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    fix = "free space, or set run_dir to another disk: a checkpoint takes about 14 bytes a parameter"
    if free < 0.1:
        return Answer("broken", f"{free:.2f} GiB free here", fix)
    return Answer("ok", f"{free:.0f} GiB free here") if free >= 5 else Answer("note", f"{free:.1f} GiB free here", fix)


def shared_memory() -> Answer:
    """Room in /dev/shm, through which ranks and NCCL talk."""
    path = Path("/dev/shm")
    if not path.is_dir():
        return Answer("note", "no /dev/shm on this system")
    free = shutil.disk_usage(path).free / _GIB
    if free < 0.5:
        return Answer("broken", f"{free:.2f} GiB in /dev/shm", "make it larger (`docker run --shm-size=8g`)")
    return Answer("ok", f"{free:.1f} GiB in /dev/shm")


def compiler() -> Answer:
    """The C compiler with which Triton and Inductor build their launchers, and Python's headers; compiles against them."""
    needed_for = "Triton and torch.compile on a GPU need it"
    path = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    if path is None:
        return Answer("absent", f"no gcc or clang; {needed_for}", "apt-get install gcc, or set CC")
    include = sysconfig.get_paths()["include"]
    line = [path, "-fsyntax-only", f"-I{include}", "-x", "c", "-"]
    try:
        done = subprocess.run(line, input="#include <Python.h>\n", capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as e:
        return Answer("broken", f"{path} does not run: {e}; {needed_for}", "apt-get install gcc, or set CC")
    if done.returncode == 0:
        return Answer("ok", f"{path}, with Python's headers")
    if "Python.h" in done.stderr:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        return Answer("broken", f"{path} finds no Python.h in {include}; {needed_for}", f"apt-get install {package}")
    fault = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
    return Answer("broken", f"{path} compiles nothing: {fault[:120]}; {needed_for}", "apt-get install gcc, or set CC")


class Driver(NamedTuple):
    """What NVIDIA's driver says of itself; the newest CUDA it can run is None where nobody tells."""

    version: str
    cuda: tuple[int, int] | None
    num_gpus: int


def ask_driver() -> Driver | None:
    """The driver's own answer through NVML, else through nvidia-smi; None without a driver."""
    return _ask_nvml() or _ask_nvidia_smi()


def _ask_nvml() -> Driver | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
            cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            gpus = pynvml.nvmlDeviceGetCount()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # absent, without a driver, or of another generation: nvidia-smi may still know
        return None
    return Driver(version.decode() if isinstance(version, bytes) else version, (cuda // 1000, cuda % 1000 // 10), gpus)


def _ask_nvidia_smi() -> Driver | None:
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"Driver Version:\s*([\d.]+)", done.stdout)
    cuda = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", done.stdout)
    if version is None:
        return None
    gpus = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return Driver(version[1], (int(cuda[1]), int(cuda[2])) if cuda else None, gpus)
