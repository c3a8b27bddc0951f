"""What this machine can run. Every check answers on its own: a broken package is a finding, never a crash."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "absent", "broken", "note"]
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    name: str
    state: State
    detail: str
    fix: str = ""
    needed: bool = True
    """Whether training needs it; an absent optional thing is no fault."""


def examine() -> list[Finding]:
    """Runs every check in order."""
    checks: list[Callable[[], Finding]] = [
        _python, _torch, _gpu, _fp8_hardware, _fp8_reference, _gloo, _deepspeed, _hydra, _mlflow, _tokenizers, _reasoning_gym,
        _transformer_engine, _cores, _disk, _shared_memory,
    ]  # fmt: skip
    findings = []
    for check in checks:
        try:
            findings.append(check())
        except (
            Exception
        ) as e:  # TransformerEngine alone raises ImportError, RuntimeError and OSError, depending on how it is broken
            name = check.__name__.strip("_").replace("_", " ")
            findings.append(
                Finding(name, "broken", f"{type(e).__name__}: {e}".splitlines()[0][:200], "reinstall with `make setup`")
            )
    return findings


def recipes(findings: list[Finding]) -> list[dict[str, str]]:
    """Which recipe runs on which backend here, with the reason."""
    broken = [f.name for f in findings if f.name in ("torch", "FP8 reference") and f.state != "ok"]
    runs, why = (
        ("no", f"{' and '.join(broken)} not working")
        if broken
        else ("yes", "emulated: plain PyTorch, for numerics and tests, no speed claim")
    )
    native_runs, native_why = ("no", why) if broken else _native()
    return [
        {"recipe": "bf16", "backend": "torch", "runs": "no" if "torch" in broken else "yes", "reason": "plain PyTorch"},
        {"recipe": "infir2 and its variants", "backend": "reference", "runs": runs, "reason": why},
        {
            "recipe": "infir2 and its variants with E4M3 gradients",
            "backend": "native",
            "runs": native_runs,
            "reason": native_why,
        },
    ]


def _native() -> tuple[str, str]:
    """Whether the three block-scaled GEMMs run here, by running them."""
    import torch

    from fp8ctl.config.schema import RecipeConfig
    from fp8ctl.fp8.backend import native_obstacle

    obstacle = native_obstacle(RecipeConfig(), "cuda")
    return ("yes", f"ran right on {torch.cuda.get_device_name()}") if obstacle is None else ("no", obstacle)


def to_json(findings: list[Finding]) -> dict[str, Any]:
    """The whole examination as data."""
    return {
        "schema": 1,
        "findings": [asdict(f) for f in findings],
        "recipes": recipes(findings),
        "ok": not faults(findings),
    }


def faults(findings: list[Finding]) -> list[Finding]:
    """Findings that keep training from running."""
    return [f for f in findings if f.needed and f.state in ("absent", "broken")]


def _version(distribution: str) -> str:
    return importlib.metadata.version(distribution)


def _package(module: str, distribution: str, name: str, fix: str, *, needed: bool = True) -> Finding:
    try:
        version = _version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "absent", "not installed", fix, needed)
    try:
        importlib.import_module(module)
    except Exception as e:
        return Finding(
            name, "broken", f"{version} does not import: {type(e).__name__}: {e}".splitlines()[0][:200], fix, needed
        )
    return Finding(name, "ok", version, needed=needed)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return (
        Finding("python", "ok", version)
        if sys.version_info >= (3, 11)
        else Finding("python", "broken", version, "use Python 3.11 or newer")
    )


def _torch() -> Finding:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", "ok", f"{torch.__version__}, {build}")


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "note", "none: everything runs on the CPU, FP8 is emulated", needed=False)
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    memory = torch.cuda.get_device_properties(0).total_memory / _GIB
    return Finding(
        "GPU", "ok", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, {memory:.0f} GiB", needed=False
    )


def _fp8_hardware() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("FP8 tensor cores", "note", "no GPU", needed=False)
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        return Finding(
            "FP8 tensor cores",
            "absent",
            f"compute capability {major}.{minor} has none",
            "use a GPU of capability 8.9 or newer",
            False,
        )
    return Finding("FP8 tensor cores", "ok", f"compute capability {major}.{minor}", needed=False)


def _fp8_reference() -> Finding:
    import torch

    from fp8ctl.fp8.reference import dequantize, quantize_tile

    x_MK = torch.linspace(-3, 3, 256).reshape(2, 128)
    error = (dequantize(*quantize_tile(x_MK)) - x_MK).abs().max().item()
    if error > 3 / 16:  # half a step of E4M3 at 3 is 1/8
        return Finding(
            "FP8 reference", "broken", f"a round trip is off by {error:.3g}", "report this with `fp8ctl doctor --json`"
        )
    return Finding("FP8 reference", "ok", f"quantised a tile and back, largest error {error:.3g} of 3")


def _gloo() -> Finding:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("gloo", "absent", "torch was built without it", "install a torch build with gloo")
    return Finding("gloo", "ok", "collectives between CPU ranks")


def _deepspeed() -> Finding:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns at import when it has to find out
    return _package("deepspeed", "deepspeed", "deepspeed", "pip install -c constraints.txt deepspeed")


def _hydra() -> Finding:
    antlr = _version("antlr4-python3-runtime")
    if not antlr.startswith("4.9."):
        return Finding(
            "hydra",
            "broken",
            f"antlr4-python3-runtime {antlr}; Hydra 1.3 needs 4.9",
            "pip install antlr4-python3-runtime==4.9.3",
        )
    from fp8ctl.config.compose import compose

    compose("train_cpt")
    return Finding("hydra", "ok", f"{_version('hydra-core')}, conf/ composes")


def _mlflow() -> Finding:
    return _package(
        "mlflow", "mlflow", "mlflow", "pip install -c constraints.txt mlflow, or run with track=jsonl", needed=False
    )


def _tokenizers() -> Finding:
    return _package("tokenizers", "tokenizers", "tokenizers", "pip install -c constraints.txt tokenizers")


def _reasoning_gym() -> Finding:
    fix = "pip install -c constraints.txt reasoning-gym (generated questions and evaluation need it)"
    return _package("reasoning_gym", "reasoning-gym", "reasoning-gym", fix, needed=False)


def _transformer_engine() -> Finding:
    fix = "pip install 'fp8ctl[te]' on a machine with CUDA (optional)"
    try:
        version = _version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return Finding("transformer-engine", "absent", "not installed", fix, needed=False)
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as e:
        return Finding(
            "transformer-engine",
            "broken",
            f"{version} does not import: {type(e).__name__}: {e}".splitlines()[0][:200],
            fix,
            needed=False,
        )
    return Finding("transformer-engine", "ok", version, needed=False)


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    return Finding(
        "CPU", "ok", f"{cores} cores, OMP_NUM_THREADS={threads or 'unset (ranks get launch.threads_per_rank)'}"
    )


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / _GIB
    if free < 5:
        return Finding(
            "disk", "broken", f"{free:.1f} GiB free here", "free space: a checkpoint takes about 14 bytes per parameter"
        )
    return Finding("disk", "ok", f"{free:.0f} GiB free here")


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", "note", "no /dev/shm on this system", needed=False)
    free = shutil.disk_usage(path).free / _GIB
    if free < 0.5:
        return Finding(
            "shared memory",
            "broken",
            f"{free:.2f} GiB in /dev/shm",
            "make it larger (`docker run --shm-size=8g`)",
            needed=False,
        )
    return Finding("shared memory", "ok", f"{free:.1f} GiB in /dev/shm", needed=False)
