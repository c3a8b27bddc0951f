"""What a run records about itself before the first step: machine, versions, backend, plan, and where its metrics go."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fp8ctl.config.checks import wants_fp8
from fp8ctl.config.schema import TrainConfig
from fp8ctl.engine.dist import Dist
from fp8ctl.paths import RunPaths
from fp8ctl.precision.apply import left_to_bf16
from fp8ctl.track.environment import collect_environment
from fp8ctl.track.record import log_event, write_json
from fp8ctl.track.sinks import Tracker
from fp8ctl.worker.build import PlannedModel
from fp8ctl.worker.parent import find_parent


def write_provenance(
    config: TrainConfig,
    paths: RunPaths,
    dist: Dist,
    planned: PlannedModel,
    *,
    step: int,
    resumed_from: Path | None,
    command: str,
) -> None:
    """Writes env.json and plan.json, and the events that say what was chosen."""
    backend = {k: v for k, v in asdict(planned.backend).items() if v}
    attention = asdict(planned.attention)
    parent = find_parent(config)
    facts = {
        "device": dist.device.type,
        "ranks": dist.world_size,
        "dtype": config.engine.dtype,
        "backend": backend,
        "attention": attention,
        "parent": asdict(parent) if parent is not None else None,
        "compile": config.engine.compile if dist.device.type == "cuda" else "off",
    }
    write_json(paths.env, {**collect_environment(gpus=_gpus(dist), argv=shlex.split(command)), **facts})
    write_json(paths.plan, planned.plan.to_json())
    print(planned.plan.summary(), file=sys.stderr)
    if wants_fp8(config.precision):
        gemm = f"; GEMMs by {backend['gemm']}: {backend['gemm_reason']}" if "gemm" in backend else ""
        print(f"backend {backend['name']}: {backend['reason']}{gemm}", file=sys.stderr)
    if left := left_to_bf16(planned.model):
        fqn, why = next(iter(left.items()))
        print(f"{len(left)} linears that the plan has in FP8 run in BF16, the first is {fqn}: {why}", file=sys.stderr)
        log_event(paths, "left_to_bf16", step, linears=left)
    print(f"attention {attention['name']}: {attention['reason']}", file=sys.stderr)
    log_event(paths, "backend", step, **backend, plan=planned.plan.summary())
    log_event(paths, "attention", step, **attention)
    if parent is not None and parent.step is not None:
        print(f"weights of {parent.path} at step {parent.step}, with a fresh optimizer", file=sys.stderr)
    if resumed_from is not None:
        log_event(paths, "resumed", step, checkpoint=resumed_from.name)


def open_tracker(config: TrainConfig, paths: RunPaths, planned: PlannedModel) -> Tracker:
    """The run's metrics writer; its MLflow run carries the settings as parameters."""
    tags = {
        "stage": config.stage,
        "model": config.model.name,
        "plan": planned.plan.summary(),
        "backend": planned.backend.name,
    }
    return Tracker(
        paths,
        config.track,
        run_name=config.name or paths.root.name,
        params=config.model_dump(mode="json"),
        tags=tags,
    )


def _gpus(dist: Dist) -> list[dict[str, Any]]:
    if dist.device.type != "cuda":
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"} for p in properties]
