"""One rank's whole run, from settings to the last checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

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
from fp8ctl.precision.apply import fp8_linears, keep_quantized_weights, weights_changed
from fp8ctl.precision.coverage import check_required, coverage, load_counters, save_counters
from fp8ctl.track.record import State, StepStats, log_event, write_json
from fp8ctl.track.sinks import Tracker
from fp8ctl.train.loop import LoopState, Parts, train
from fp8ctl.worker.build import build_data, build_model, random_state, restore_random_state
from fp8ctl.worker.provenance import open_tracker, write_provenance

_MOST_PADDING = 0.01
"""Share of padding above which a run says so."""


def run(
    config: TrainConfig, paths: RunPaths, stop_requested: Callable[[], bool], resume_from: Path | None, command: str
) -> tuple[bool, int]:
    """Trains to the end or to a stop signal; returns (finished, step). Every rank calls it.

    `command` is what the user typed.

    Raises:
        Fp8ctlError: anything a user can mend; under `precision.require_fp8` also a coverage below the plan's.
    """
    check_train(config)
    rank = Rank(config, paths)
    state = rank.resume(resume_from) if resume_from else LoopState()
    tracker = None
    if rank.dist.is_main:
        write_provenance(
            config, paths, rank.dist, rank.planned, step=state.step, resumed_from=resume_from, command=command
        )
        tracker = open_tracker(config, paths, rank.planned)
    outcome: State = "failed"
    try:
        finished = train(config, rank.parts(tracker, stop_requested), state)
        rank.conclude()
        outcome = "finished" if finished else "preempted"
    finally:
        rank.layer_stats.close()
        rank.loader.close()
        if tracker is not None:
            tracker.close(outcome)
    rank.dist.barrier()
    rank.dist.shutdown()
    return finished, state.step


class Rank:
    """What one rank works with, and how its state goes to disk and back."""

    def __init__(self, config: TrainConfig, paths: RunPaths) -> None:
        self.config, self.paths = config, paths
        self.dist = Dist.start(config.engine, config.launch)
        self.planned = build_model(config, self.dist.device)
        self.loader, self.validation = build_data(config, self.planned.shape, self.dist)
        self.engine = Engine(self.planned.model, config, self.dist)
        # Stage 3 holds no whole weight between uses, and the emulation would keep the size of the weight itself
        if self.planned.backend.name != "reference" and self.engine.zero_stage < 3 and self.engine.grad_accum_steps > 1:
            keep_quantized_weights(self.planned.model)
        self.monitor = StabilityMonitor(config.monitor)
        self.layer_stats = LayerStats(
            list(fp8_linears(self.planned.model).items()),
            paths.layers if self.dist.is_main and config.monitor.policy != "off" else None,
            every_steps=config.monitor.layer_stats_every_steps,
        )

    def parts(self, tracker: Tracker | None, stop_requested: Callable[[], bool]) -> Parts:
        """What the loop gets."""

        def on_step(stats: StepStats, decision: Decision) -> None:
            if tracker is not None:
                tracker.log(stats)
                if decision.rule is not None:
                    log_event(self.paths, "monitor", stats.step, **decision.to_event())

        return Parts(
            model=self.planned.model,
            engine=self.engine,
            dist=self.dist,
            loader=self.loader,
            validation=self.validation,
            monitor=self.monitor,
            layer_stats=self.layer_stats,
            on_step=on_step,
            save=self.save,
            stop_requested=stop_requested,
        )

    def save(self, state: LoopState) -> None:
        """Writes the checkpoint of `state` and removes old ones."""
        folder = self.paths.checkpoint(state.step)
        source = Path(self.config.model.path) if self.config.model.path else None

        def write_weights(weights: dict[str, torch.Tensor], target: Path) -> None:
            save_hf(weights, self.planned.shape, target, tokenizer_from=source, dtype=torch.bfloat16)

        save_checkpoint(
            self.engine,
            folder,
            client_state={
                "step": state.step,
                "tokens_seen": state.tokens_seen,
                "loader": self.loader.state_dict(),
                "monitor": self.monitor.state_dict(),
                "plan": self.planned.plan.to_json(),
                "shape": self.planned.shape.model_dump(mode="json"),
            },
            rank_state={"random": random_state(), "counters": save_counters(self.planned.model)},
            write_weights=write_weights,
        )
        self.layer_stats.flush()
        if self.dist.is_main:
            prune(self.paths.checkpoints, keep=self.config.loop.keep_checkpoints)
            log_event(self.paths, "checkpoint", state.step, folder=folder.name)

    def resume(self, checkpoint: Path) -> LoopState:
        """Puts everything into the state of `checkpoint`; the next step is the one that would have followed it."""
        shape = self.planned.shape.model_dump(mode="json")
        client_state, rank_state = load_checkpoint(self.engine, checkpoint, shape=shape)
        weights_changed(self.planned.model)
        self.loader.load_state_dict(client_state["loader"])
        self.monitor.load_state_dict(client_state["monitor"])
        restore_random_state(rank_state["random"])
        load_counters(self.planned.model, rank_state["counters"])
        return LoopState(step=client_state["step"], tokens_seen=client_state["tokens_seen"])

    def conclude(self) -> None:
        """Writes what really ran in FP8; under `precision.require_fp8` refuses less than the plan says."""
        done = coverage(self.planned.model)
        if self.dist.is_main:
            write_json(self.paths.coverage, done.to_json())
            if done.padding_share > _MOST_PADDING:
                print(
                    f"{100 * done.padding_share:.1f} % of what the GEMMs computed was padding: FP8 GEMMs take sizes in multiples of 16"
                    " (batch.micro_batch_rows x batch.seq_len_tokens, and the model's widths)",
                    file=sys.stderr,
                )
        if self.config.precision.require_fp8:
            check_required(self.planned.plan, done)
