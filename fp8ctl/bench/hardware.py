"""What was measured on: the device, its datasheet peak, the bandwidth of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8ctl.bench.clock import Clock, time_in_turn
from fp8ctl.errors import ConfigError
from fp8ctl.track.environment import collect_environment

COPY_BYTES = 2**30
"""Bytes that the copy reads and writes once: far more than a GPU's cache."""


@dataclass(frozen=True)
class Peak:
    """Most BF16 FLOP/s that a datasheet promises, without sparsity."""

    name: str
    flops: float


# The vendor's datasheets; where they print the figure with sparsity, half of it. Longer names come first.
_PEAKS = (
    ("H200 NVL", Peak("H200 NVL dense BF16 835 TFLOP/s", 835e12)),
    ("H200", Peak("H200 SXM dense BF16 989 TFLOP/s", 989e12)),
    ("H100 NVL", Peak("H100 NVL dense BF16 835 TFLOP/s", 835e12)),
    ("H100 PCIe", Peak("H100 PCIe dense BF16 756 TFLOP/s", 756e12)),
    ("H100", Peak("H100 SXM dense BF16 989 TFLOP/s", 989e12)),
    ("A100", Peak("A100 dense BF16 312 TFLOP/s", 312e12)),
    ("L40S", Peak("L40S dense BF16 362 TFLOP/s", 362e12)),
)


def peak_of(device_name: str | None) -> Peak | None:
    """The datasheet's peak of a GPU by its name; None where it is not in the table."""
    return next((peak for name, peak in _PEAKS if device_name and name in device_name), None)


def choose_device(asked: str) -> torch.device:
    """The device for `device=asked`.

    Raises:
        ConfigError: a GPU was asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if asked == "cuda" and not has_gpu:
        raise ConfigError("device=cuda, but torch sees no GPU", "run `fp8ctl doctor`, or set device=auto")
    return torch.device("cuda" if has_gpu and asked != "cpu" else "cpu")


def device_name(device: torch.device) -> str | None:
    """The GPU's name; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def environment(device: torch.device, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, code and machine, the GPU in use included."""
    gpus = []
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        gpus = [
            {
                "name": p.name,
                "memory_bytes": p.total_memory,
                "capability": f"{p.major}.{p.minor}",
                "cuda": torch.version.cuda,
            }
        ]
    return collect_environment(gpus=gpus, argv=argv)


def copy_bandwidth(clock: Clock, rounds: int) -> float:
    """TB/s of a copy from the device's memory to itself, bytes read and bytes written both counted."""
    num_bytes = COPY_BYTES if clock.is_gpu else COPY_BYTES // 16
    source = torch.empty(num_bytes, dtype=torch.uint8, device=clock.device).fill_(1)
    target = torch.empty_like(source)
    (ms,) = time_in_turn(clock, [lambda: target.copy_(source)], rounds)
    return 2 * num_bytes / (ms * 1e9)
