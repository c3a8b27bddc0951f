"""What executes FP8 GEMMs: chosen once, with the reason in words for the run's record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fp8ctl.errors import PrecisionError


@dataclass(frozen=True)
class Backend:
    """The chosen backend and why."""

    name: Literal["reference"]
    reason: str


def choose_backend(asked: str) -> Backend:
    """The backend for `precision.backend=asked`.

    Raises PrecisionError for one that does not exist.
    """
    if asked == "reference":
        return Backend("reference", "asked for: values are rounded to FP8, GEMMs run in the dtype outside FP8")
    if asked == "auto":
        return Backend("reference", "auto: the only backend so far; values are rounded to FP8, no GEMM gets faster")
    raise PrecisionError(f"unknown FP8 backend {asked!r}", "use precision.backend=auto or precision.backend=reference")
