"""`fp8ctl bench step`: forward and backward of whole models, arms in turn in one process.

Every round runs each arm once, and the order moves on by one arm a round, so that a clock that changes or a card that
warms up meets all arms alike. A turn is one step that is not timed and then the timed ones, without a wait between them.
Gradients are dropped and quantised weights forgotten before each step, as after an update. An arm that can't be built or
fails keeps a row with the reason.

Memory of an arm: what its turn allocates at most on top of what lay there before, and the bytes of its own weights. So
weights that arms share count for each of them, and those of other arms for none.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fp8ctl.bench.arms import Arm, ArmPlan, read_arms
from fp8ctl.bench.batch import Batch, make_batch
from fp8ctl.bench.breakdown import kernel_rows
from fp8ctl.bench.clock import Clock
from fp8ctl.bench.hardware import choose_device
from fp8ctl.bench.ours import Weights, build_amp, build_deepspeed, build_ours
from fp8ctl.bench.peers import TeLayers, build_hf
from fp8ctl.config.bench_schema import BenchStepConfig
from fp8ctl.errors import ConfigError, Fp8ctlError, MissingPackageError
from fp8ctl.precision.coverage import coverage

Progress = Callable[[int, int, str], None]
WARMUP_STEPS = 2
"""Steps of each arm before the rounds: compilation, autotuning, the allocator's growth."""


@dataclass
class Measured:
    """What is known of an arm so far."""

    plan: ArmPlan
    status: str = "ok"
    """ok; oom; absent: what; failed: what; skipped: why."""
    arm: Arm | None = None
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    optimizer_ms: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float | None = None

    @property
    def name(self) -> str:
        """The arm's."""
        return self.plan.name

    @property
    def fwd_bwd_ms(self) -> list[float]:
        """Of each timed step."""
        return [f + b for f, b in zip(self.forward_ms, self.backward_ms, strict=True)]


@dataclass
class StepRun:
    """All arms of one command."""

    config: BenchStepConfig
    clock: Clock
    batch: Batch
    arms: list[Measured]
    order: list[tuple[str, ...]] = field(default_factory=list)
    """Arms of each round as they ran."""
    kernels: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the breakdown, where it was asked for."""


def measure_steps(config: BenchStepConfig, on_progress: Progress) -> StepRun:
    """Builds, warms up and times every arm.

    Raises:
        ConfigError: unknown arms, a model without shape, rows longer than the model's positions, profile without a GPU.
    """
    plans = read_arms(config.arms)
    # Arms leave holes of different sizes behind; without this the allocator would run out of memory before the card does
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    device = _checked(config)
    assert config.model.shape is not None
    clock = Clock(device)
    weights = Weights(config.model.shape, device, config.seed)
    batch = make_batch(config, config.model.shape.vocab_size, device)
    run = StepRun(config, clock, batch, [Measured(plan) for plan in plans])
    te_layers = TeLayers(config, weights, batch)
    total = len(plans) * (1 + config.rounds + int(config.profile))
    for number, measured in enumerate(run.arms):
        on_progress(number, total, f"building {measured.name}")
        _guarded(measured, _build, config, weights, batch, te_layers)
        _guarded(measured, _turn, run, timed=0, steps=WARMUP_STEPS)
    for number in range(config.rounds):
        turns = [run.arms[(number + i) % len(run.arms)] for i in range(len(run.arms))]
        run.order.append(tuple(m.name for m in turns if m.arm is not None))
        for place, measured in enumerate(turns):
            on_progress((1 + number) * len(plans) + place, total, f"round {number + 1}, {measured.name}")
            _guarded(measured, _turn, run, timed=config.timed_steps, steps=1 + config.timed_steps)
    for place, measured in enumerate(run.arms if config.profile else ()):
        on_progress((1 + config.rounds) * len(plans) + place, total, f"kernels, {measured.name}")
        _guarded(measured, _kernels, run)
    on_progress(total, total, "")
    return run


def _checked(config: BenchStepConfig) -> torch.device:
    shape = config.model.shape
    if shape is None:
        raise ConfigError("model.shape: no shape", "choose model=NAME of conf/model, e.g. model=qwen2_5_7b")
    if config.seq_len_tokens > shape.max_positions:
        raise ConfigError(
            f"seq_len_tokens: {config.seq_len_tokens:,} tokens are more than the model's {shape.max_positions:,} positions",
            f"set seq_len_tokens={shape.max_positions} or less",
        )
    device = choose_device(config.device)
    if config.profile and device.type != "cuda":
        raise ConfigError("profile: the breakdown is one of GPU kernels, this is a CPU", "drop profile=true")
    return device


def _build(measured: Measured, config: BenchStepConfig, weights: Weights, batch: Batch, te_layers: TeLayers) -> None:
    plan = measured.plan
    if plan.settings is not None:
        measured.arm = build_ours(plan.settings, config, weights, batch)
    elif plan.name == "amp":
        measured.arm = build_amp(config, weights, batch)
    elif plan.name == "deepspeed-bf16":
        measured.arm = build_deepspeed(config, weights, batch)
    elif config.documents == "packed":
        measured.status = "skipped: its rows are one document each"
    elif plan.name.startswith("te-"):
        measured.arm = te_layers.build(plan.name.removeprefix("te-"))
    elif plan.name == "hf":
        measured.arm = build_hf(config, weights, batch)
    else:
        measured.arm = build_hf(config, weights, batch, plan.name.removeprefix("torchao-"))


def _guarded(measured: Measured, work: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Runs a part of an arm's work; what goes wrong becomes its status and ends its part in the run."""
    if measured.status != "ok":
        return
    try:
        work(measured, *args, **kwargs)
    except torch.OutOfMemoryError:
        measured.status = "oom"
    except MissingPackageError as e:
        measured.status = f"absent: {e.message}"
    except ImportError as e:
        measured.status = f"absent: {e}".splitlines()[0]
    except Fp8ctlError as e:
        measured.status = f"failed: {e.message}"
    except Exception as e:  # somebody else's code, or a kernel that this GPU lacks: the other arms go on
        measured.status = f"failed: {type(e).__name__}: {e}".splitlines()[0][:300]
    if measured.status != "ok":
        arm, measured.arm = measured.arm, None
        if arm is not None:
            _drop_gradients(arm)
            arm.leave()
        del arm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _turn(measured: Measured, run: StepRun, *, timed: int, steps: int) -> None:
    """`steps` steps of an arm, the last `timed` of them timed."""
    arm, clock = measured.arm, run.clock
    if arm is None:
        return
    arm.enter()
    arm.begin()
    clock.wait()
    before = _allocated(clock)
    if clock.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    marks = [_step(arm, clock, measured) for _ in range(steps)][steps - timed :]
    clock.wait()
    if clock.is_gpu and timed:  # the first turn creates an optimizer's state, which is among the arm's own bytes
        added = torch.cuda.max_memory_allocated() - before
        measured.peak_bytes = max(measured.peak_bytes, added + arm.own_bytes)
    for begin, middle, end, after in marks:
        measured.forward_ms.append(clock.ms(begin, middle))
        measured.backward_ms.append(clock.ms(middle, end))
        if arm.optimizer_step is not None:
            measured.optimizer_ms.append(clock.ms(end, after))
    _drop_gradients(arm)
    arm.begin()
    arm.leave()


def _step(arm: Arm, clock: Clock, measured: Measured | None = None) -> tuple[Any, Any, Any, Any]:
    _drop_gradients(arm)
    arm.begin()
    begin = clock.mark()
    loss = arm.loss()
    middle = clock.mark()
    arm.backward(loss)
    end = clock.mark()
    if arm.optimizer_step is not None:
        arm.optimizer_step()
    after = clock.mark()
    arm.finish()
    if measured is not None and measured.loss is None:
        measured.loss = float(loss.detach())
    return begin, middle, end, after


def _kernels(measured: Measured, run: StepRun) -> None:
    arm = measured.arm
    if arm is None:
        return
    arm.enter()
    _step(arm, run.clock)
    run.clock.wait()
    run.kernels += kernel_rows(measured.name, lambda: _step(arm, run.clock))
    _drop_gradients(arm)
    arm.begin()
    arm.leave()


def executed_fp8_share(arm: Arm) -> float | None:
    """Share of the linear GEMM FLOPs that ran in FP8, from the counters; None where nothing counts."""
    return coverage(arm.model).fp8_share() if arm.model is not None else None


def _drop_gradients(arm: Arm) -> None:
    for parameter in arm.parameters:
        parameter.grad = None


def _allocated(clock: Clock) -> int:
    return torch.cuda.memory_allocated() if clock.is_gpu else 0
