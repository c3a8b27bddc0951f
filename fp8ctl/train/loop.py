"""The training loop, for CPT and SFT alike: read from top to bottom, the order of the source is the order of the step.

Everything it works with is handed in by the worker. The gradient of a step is the sum of the token losses of the whole global
batch divided by the number of its trainable tokens, so neither accumulation nor the number of ranks changes it.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fp8ctl.config.schema import TrainConfig
from fp8ctl.data.loader import Loader, PackedBatch
from fp8ctl.engine.dist import Dist
from fp8ctl.engine.engine import Engine
from fp8ctl.monitor.layer_stats import LayerStats
from fp8ctl.monitor.monitor import StabilityMonitor
from fp8ctl.monitor.policy import Decision
from fp8ctl.precision.apply import weights_changed
from fp8ctl.precision.coverage import flops_by_precision
from fp8ctl.track.record import StepStats
from fp8ctl.train.schedule import learning_rate
from fp8ctl.train.timer import PhaseTimer


@dataclass
class LoopState:
    """Where the run stands; saved in every checkpoint."""

    step: int = 0
    tokens_seen: int = 0


@dataclass(frozen=True)
class Parts:
    """What the loop works with. The callables are the worker's: they write files, the loop never does."""

    model: torch.nn.Module
    engine: Engine
    dist: Dist
    loader: Loader
    validation: dict[str, list[PackedBatch]]
    """Fixed rows of each data set that has a validation split, by its path."""
    monitor: StabilityMonitor
    layer_stats: LayerStats
    on_step: Callable[[StepStats, Decision], None]
    save: Callable[[LoopState], None]
    stop_requested: Callable[[], bool]


def train(config: TrainConfig, parts: Parts, state: LoopState) -> bool:
    """Runs from `state` to `loop.num_steps`. True: finished; False: stopped by a signal, state saved."""
    timer = PhaseTimer(parts.dist.device)
    while state.step < config.loop.num_steps:
        stats, decision, stop = train_step(config, parts, state, timer)
        state.step, state.tokens_seen = stats.step, stats.tokens_seen

        is_last = state.step == config.loop.num_steps
        if is_last or (config.loop.validate_every_steps and state.step % config.loop.validate_every_steps == 0):
            losses = validate(parts)
            stats = replace(
                stats,
                validation_loss=weighted_mean(losses, parts.loader),
                validation_losses=losses if len(losses) > 1 else None,
            )
        parts.on_step(stats, decision)

        if stop or is_last or state.step % config.loop.save_every_steps == 0:
            parts.save(state)
        if stop and not is_last:
            return False
    return True


def train_step(
    config: TrainConfig, parts: Parts, state: LoopState, timer: PhaseTimer
) -> tuple[StepStats, Decision, bool]:
    """One optimizer step, or none when the monitor refuses the update. The last value says whether a signal asks to stop."""
    engine, dist, step = parts.engine, parts.dist, state.step + 1
    timer.start_step()
    flops_before = flops_by_precision(parts.model)
    lr = learning_rate(step, num_steps=config.loop.num_steps, schedule=config.schedule, optim=config.optim)
    parts.layer_stats.begin_step(step)

    with timer.phase("data", on_host=True):
        microbatches = parts.loader.next_step()
    trainable, tokens, positions = dist.all_reduce_floats(
        [
            sum(b.num_trainable for b in microbatches),
            sum(b.num_tokens for b in microbatches),
            sum(b.input_ids_T.numel() for b in microbatches),
        ]
    )

    loss_sum = torch.zeros((), dtype=torch.float64, device=dist.device)
    for microbatch in microbatches:
        batch = microbatch.to(dist.device)
        with timer.phase("forward"):
            loss = engine.forward(
                batch.input_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen, labels_T=batch.labels_T
            )
        with timer.phase("backward"):
            engine.backward(loss, num_trainable=max(trainable, 1))
        loss_sum += loss.detach().double()

    with timer.phase("optimizer"):
        grad_norm = engine.prepare_step()
    (total_loss,) = dist.all_reduce_floats([loss_sum.item()])
    mean_loss = total_loss / max(trainable, 1)
    finite = math.isfinite(mean_loss) and math.isfinite(grad_norm)
    not_finite, stop, memory = dist.all_reduce_floats(
        [not finite, parts.stop_requested(), peak_memory_bytes(dist.device)], op="max"
    )

    stats = StepStats(
        step=step,
        loss=mean_loss,
        grad_norm=grad_norm,
        lr=lr,
        trainable_tokens=int(trainable),
        tokens=int(tokens),
        tokens_seen=state.tokens_seen + int(tokens),
        padding_share=1 - tokens / positions,
        is_finite=not not_finite,
        sample_ids=tuple(i for b in microbatches for i in b.row_ids),
    )
    decision = parts.monitor.observe(stats)
    with timer.phase("optimizer"):
        if decision.action == "go":
            engine.apply_step(lr)
        else:
            engine.drop_step()
        weights_changed(parts.model)
    parts.layer_stats.end_step()

    seconds = timer.read()
    stats = replace(
        stats,
        step_time_s=seconds["step"],
        data_wait_s=seconds.get("data", 0.0),
        data_wait_share=seconds.get("data", 0.0) / seconds["step"],
        forward_s=seconds.get("forward", 0.0),
        backward_s=seconds.get("backward", 0.0),
        optimizer_s=seconds.get("optimizer", 0.0),
        tokens_per_second=tokens / seconds["step"],
        memory_peak_bytes=int(memory),
        fp8_flops_share=_fp8_share(flops_before, flops_by_precision(parts.model)),
    )
    return stats, decision, bool(stop)


@torch.no_grad()
def validate(parts: Parts) -> dict[str, float]:
    """Mean loss over the fixed validation rows of all ranks, for each data set that has some, by its path.

    Its GEMMs run in the plan's precision like those of training, and are counted with them.
    """
    losses = {}
    for path, microbatches in parts.validation.items():
        totals = torch.zeros(2, dtype=torch.float64)
        for microbatch in microbatches:
            batch = microbatch.to(parts.dist.device)
            loss = parts.engine.forward(
                batch.input_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen, labels_T=batch.labels_T
            )
            totals += torch.tensor([loss.item(), batch.num_trainable], dtype=torch.float64)
        loss_sum, trainable = parts.dist.all_reduce_floats(totals.tolist())
        if trainable:
            losses[path] = loss_sum / trainable
    return losses


def weighted_mean(losses: dict[str, float], loader: Loader) -> float | None:
    """Mean of the losses by each data set's share in the mixture that the loader is in; None where there is none."""
    shares = {source.path: share for source, share in zip(loader.sources, loader.shares(), strict=True)}
    total = sum(shares[path] for path in losses)
    return sum(shares[path] * loss for path, loss in losses.items()) / total if total else None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this process has held: allocated on its GPU, or its resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _fp8_share(before: dict[str, float], after: dict[str, float]) -> float:
    done = {precision: after[precision] - before.get(precision, 0.0) for precision in after}
    total = sum(done.values())
    return done.get("fp8", 0.0) / total if total else 0.0
