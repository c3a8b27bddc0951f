"""One rank's whole run, from settings to the last checkpoint."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fp8ctl.config.checks import check_train
from fp8ctl.config.schema import TrainConfig
from fp8ctl.engine.checkpoint import load_checkpoint, prune, save_checkpoint
from fp8ctl.engine.dist import Dist
from fp8ctl.engine.engine import Engine
from fp8ctl.model.hf import save_hf
from fp8ctl.monitor.layer_stats import LayerStats
from fp8ctl.monitor.monitor import StabilityMonitor
from fp8ctl.monitor.policy import Decision
from fp8ctl.paths import RunPaths
from fp8ctl.precision.apply import fp8_linears
from fp8ctl.precision.coverage import check_required, coverage, load_counters, save_counters
from fp8ctl.track.environment import collect_environment
from fp8ctl.track.record import StepStats, log_event, write_json
from fp8ctl.track.sinks import Tracker
from fp8ctl.train.loop import LoopState, Parts, train
from fp8ctl.worker.build import PlannedModel, build_data, build_model, random_state, restore_random_state

if TYPE_CHECKING:
    from fp8ctl.worker.main import StopSignal


def run(config: TrainConfig, paths: RunPaths, stop: StopSignal, resume_from: Path | None) -> tuple[bool, int]:
    """Trains to the end or to a stop signal; returns (finished, step).

    Raises:
        Fp8ctlError: anything a user can mend; under `precision.require_fp8` also a coverage below the plan's.
    """
    check_train(config)
    dist = Dist.start(config.engine, config.launch)
    planned = build_model(config, dist.device)
    loader, validation = build_data(config, planned.shape, dist)
    engine = Engine(planned.model, config, dist)
    monitor = StabilityMonitor(config.monitor)
    state = LoopState()
    if resume_from is not None:
        state = _resume(resume_from, engine, planned, loader, monitor, config, dist)
    tracker = None
    if dist.rank == 0:
        _write_provenance(config, paths, dist, planned, state)
        tracker = Tracker(
            paths,
            config.track,
            run_name=config.name or paths.root.name,
            params=config.model_dump(mode="json"),
            tags=_tags(config, planned),
        )
        if resume_from is not None:
            log_event(paths, "resumed", state.step, checkpoint=resume_from.name)

    layer_stats = LayerStats(
        fp8_linears(planned.model),
        paths.layers if dist.rank == 0 else None,
        every_steps=config.monitor.layer_stats_every_steps,
    )
    parts = Parts(
        model=planned.model, engine=engine, dist=dist, loader=loader, validation=validation, monitor=monitor, layer_stats=layer_stats,
        on_step=functools.partial(_record, tracker, paths),
        save=lambda s: _save(s, paths, engine, planned, loader, monitor, config, dist),
        stop_requested=stop.requested,
    )  # fmt: skip
    outcome = "FAILED"
    try:
        finished = train(config, parts, state)
        outcome = "FINISHED" if finished else "KILLED"
        _conclude(config, paths, planned, dist)
    finally:
        layer_stats.close()
        if tracker is not None:
            tracker.close(outcome)
    dist.barrier()
    return finished, state.step


def _conclude(config: TrainConfig, paths: RunPaths, planned: PlannedModel, dist: Dist) -> None:
    done = coverage(planned.model)
    if dist.rank == 0:
        write_json(paths.coverage, done.to_json())
    if config.precision.require_fp8:
        check_required(planned.plan, done)


def _record(tracker: Tracker | None, paths: RunPaths, stats: StepStats, decision: Decision) -> None:
    if tracker is None:
        return
    tracker.log(stats)
    if decision.rule is not None:
        log_event(paths, "monitor", stats.step, **decision.to_json())


def _write_provenance(
    config: TrainConfig, paths: RunPaths, dist: Dist, planned: PlannedModel, state: LoopState
) -> None:
    backend = planned.backend
    environment = collect_environment(
        {
            "device": dist.device.type,
            "gpu": torch.cuda.get_device_name() if dist.device.type == "cuda" else None,
            "ranks": dist.world_size,
        }
    )
    write_json(paths.env, {**environment, "backend": {"name": backend.name, "reason": backend.reason}})
    write_json(paths.plan, planned.plan.to_json())
    print(planned.plan.summary(), file=sys.stderr)
    log_event(paths, "backend", state.step, name=backend.name, reason=backend.reason, plan=planned.plan.summary())


def _tags(config: TrainConfig, planned: PlannedModel) -> dict[str, str]:
    return {
        "stage": config.stage,
        "model": config.model.name,
        "recipe": planned.plan.summary(),
        "backend": planned.backend.name,
    }


def _save(
    state: LoopState,
    paths: RunPaths,
    engine: Engine,
    planned: PlannedModel,
    loader: Any,
    monitor: StabilityMonitor,
    config: TrainConfig,
    dist: Dist,
) -> None:
    folder = paths.checkpoint(state.step)

    def write_weights(weights: dict[str, torch.Tensor], target: Path) -> None:
        save_hf(
            weights,
            planned.shape,
            target,
            tokenizer_from=Path(config.model.path) if config.model.path else None,
            dtype=torch.bfloat16,
        )

    save_checkpoint(
        engine, folder,
        client_state={
            "step": state.step, "tokens_seen": state.tokens_seen, "loader": loader.state_dict(), "monitor": monitor.state_dict(),
            "plan": planned.plan.to_json(), "shape": planned.shape.model_dump(mode="json"),
        },
        rank_state={"random": random_state(), "counters": save_counters(planned.model)},
        write_weights=write_weights,
    )  # fmt: skip
    if dist.rank == 0:
        prune(paths.checkpoints, keep=config.loop.keep_checkpoints)
        log_event(paths, "checkpoint", state.step, folder=folder.name)


def _resume(
    checkpoint: Path,
    engine: Engine,
    planned: PlannedModel,
    loader: Any,
    monitor: StabilityMonitor,
    config: TrainConfig,
    dist: Dist,
) -> LoopState:
    client_state, rank_state = load_checkpoint(engine, checkpoint, shape=planned.shape.model_dump(mode="json"))
    loader.load_state_dict(client_state["loader"])
    monitor.load_state_dict(client_state["monitor"])
    restore_random_state(rank_state["random"])
    load_counters(planned.model, rank_state["counters"])
    return LoopState(step=client_state["step"], tokens_seen=client_state["tokens_seen"])
