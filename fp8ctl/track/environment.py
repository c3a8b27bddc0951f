"""What a run ran on, for env.json: versions, code, machine, command line. Nothing heavy is imported to find out."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import fp8ctl
from fp8ctl.track.redact import redact, redact_argv

PACKAGES = (
    "torch", "deepspeed", "triton", "transformer-engine", "torchao", "transformers", "tokenizers", "safetensors", "gguf", "numpy",
    "pyarrow", "hydra-core", "omegaconf", "pydantic", "mlflow", "reasoning-gym", "vllm", "nvidia-cublas",
    "nvidia-cudnn-cu13", "nvidia-nccl-cu13",
)  # fmt: skip
"""Distributions whose version can change a result."""

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "WORLD_SIZE",
    "DS_ACCELERATOR",
    "PYTHONHASHSEED",
)
_VARIABLE_PREFIXES = ("NCCL_", "CUBLAS_", "CUDA_", "NVTE_", "PYTORCH_", "TORCH_", "TRITON_", "SLURM_JOB_")


def collect_environment(
    *, gpus: Sequence[Mapping[str, Any]] = (), argv: Sequence[str] | None = None, folder: Path | str | None = None
) -> dict[str, Any]:
    """Facts about software, code and machine as plain data; what can't be found out is None or left out.

    Args:
        gpus: facts about each GPU (name, memory_bytes, driver, ...), asked from torch by a caller that has it.
        argv: the command line to record; default: this process's. Secrets are redacted.
        folder: the working directory whose git state is recorded; default: the current one.

    Returns:
        Keys: time, fp8ctl, python, platform, hostname, packages {name: version}, cpu {model, cores, usable_cores},
        memory_bytes (of the machine, or of the container where that is less), gpus, git {commit, is_dirty}, command,
        variables. Of environment variables only a short list that changes results is taken.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fp8ctl": fp8ctl.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "packages": package_versions(),
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "usable_cores": _usable_cores()},
        "memory_bytes": _memory_bytes(),
        "gpus": redact([dict(gpu) for gpu in gpus]),
        "git": git_state(folder),
        "command": redact_argv(sys.argv if argv is None else argv),
        "variables": redact({k: v for k, v in sorted(os.environ.items()) if _is_recorded(k)}),
    }


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of those of the distributions that are installed, read from their metadata without importing them."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path | str | None = None) -> dict[str, Any]:
    """{commit, is_dirty} of the git work tree around `folder`; outside of one the commit is FP8CTL_COMMIT, or None.

    `is_dirty` tells whether tracked files differ from the commit; None where git can't say.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {"commit": os.environ.get("FP8CTL_COMMIT") or None, "is_dirty": None}
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "is_dirty": None if changes is None else bool(changes)}


def _git(folder: Path | str | None, *arguments: str) -> str | None:
    # Without optional locks a status never disturbs a git command that the user runs at the same time.
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _is_recorded(variable: str) -> bool:
    return variable in _VARIABLES or variable.startswith(_VARIABLE_PREFIXES)


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux
    return platform.processor() or platform.machine() or None


def _usable_cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _memory_bytes() -> int:
    import psutil

    total = int(psutil.virtual_memory().total)
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit_file).read_text()))
        except (OSError, ValueError):
            continue  # no such file, or "max": no limit
    return total
