"""fp8ctl: trains reasoning language models in FP8 and proves that it was worth it.

Public names load on first use, so that `import fp8ctl` and `fp8ctl --help` need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Fp8ctlError": "fp8ctl.errors",
    "compose": "fp8ctl.config.compose",
    "TrainConfig": "fp8ctl.config.schema",
    "EvalConfig": "fp8ctl.config.schema",
    "DataPrepConfig": "fp8ctl.config.data_schema",
    "PrecisionConfig": "fp8ctl.config.schema",
    "MonitorConfig": "fp8ctl.config.schema",
    "ModelShape": "fp8ctl.config.schema",
    "RunRecord": "fp8ctl.track.record",
    "StepStats": "fp8ctl.track.record",
    "quantize_tile": "fp8ctl.fp8.reference",
    "quantize_block": "fp8ctl.fp8.reference",
    "dequantize": "fp8ctl.fp8.reference",
    "gemm_nt": "fp8ctl.fp8.reference",
    "Fp8Linear": "fp8ctl.fp8.linear",
    "PrecisionPlan": "fp8ctl.precision.plan",
    "make_plan": "fp8ctl.precision.plan",
    "apply_plan": "fp8ctl.precision.apply",
    "coverage": "fp8ctl.precision.coverage",
    "StabilityMonitor": "fp8ctl.monitor.monitor",
    "Decision": "fp8ctl.monitor.policy",
    "Transformer": "fp8ctl.model.transformer",
    "load_hf": "fp8ctl.model.hf",
    "save_hf": "fp8ctl.model.hf",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'fp8ctl' has no attribute {name!r}")
