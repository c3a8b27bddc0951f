"""Counts GEMM work where it is executed: the evidence behind coverage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["fprop", "dgrad", "wgrad"]
Precision = Literal["fp8", "bf16"]

DIRECTIONS: tuple[Direction, ...] = ("fprop", "dgrad", "wgrad")
PRECISIONS: tuple[Precision, ...] = ("fp8", "bf16")


def _zeros() -> dict[Direction, dict[Precision, int]]:
    return {direction: dict.fromkeys(PRECISIONS, 0) for direction in DIRECTIONS}


@dataclass
class GemmCounter:
    """FLOPs that one module's GEMMs executed, per direction and precision; a recomputed GEMM counts each time it runs.

    "bf16" stands for the dtype outside FP8, which a run may set to FP32.
    """

    flops: dict[Direction, dict[Precision, int]] = field(default_factory=_zeros)
    padding_flops: int = 0
    """FLOPs spent beside those on rows and columns of zeros that a backend's GEMM asks for."""

    def add(self, direction: Direction, precision: Precision, *, m: int, n: int, k: int) -> None:
        """Counts one M x N x K GEMM: 2 M N K FLOPs."""
        self.flops[direction][precision] += 2 * m * n * k

    def reset(self) -> None:
        """Sets everything back to zero."""
        self.flops = _zeros()
        self.padding_flops = 0
