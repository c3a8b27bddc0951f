"""Settings -> the dict that DeepSpeed takes; the one place where batch arithmetic is done. Needs no torch.

What DeepSpeed is told, and why:

- BF16 at stages 1 to 3 is DeepSpeed's `bf16` mode: FP32 masters and moments, weights cast from them after each update.
- BF16 at stage 0 has **no** `bf16` block: DeepSpeed's own wrapper there (FP16_UnfusedOptimizer) takes a dummy step when
  it is built, so that Adam's bias correction starts at step 2, and it refuses FP32 accumulation. Without the block
  DeepSpeed hands our optimizer back untouched, and `optimizer.MasterAdamW` holds masters, moments and accumulators in
  FP32.
- Gradients are accumulated over micro-steps and reduced over ranks in FP32 at every stage (`grad_accum_dtype`,
  `communication_data_type`). At stage 1 in BF16 this selects DeepSpeed's BF16_Optimizer, and `immediate_grad_update`
  lets it free each BF16 gradient as soon as it is added to the FP32 one.
- Reduction is a plain sum, because the loss is already divided by the global token count. Stage 3 can only average
  (`reduces_by_mean`); the engine multiplies by the number of ranks there.
- Clipping, the overflow check and the norm are the engine's own (`engine.py`): DeepSpeed does them inside the update,
  where nothing can be vetoed any more.
"""

from __future__ import annotations

from typing import Any

from fp8ctl.config.schema import BatchConfig, TrainConfig
from fp8ctl.errors import ConfigError

_LARGEST_BUCKET = 500_000_000


def grad_accum_steps(batch: BatchConfig, world_size: int) -> int:
    """Micro-steps per optimizer step on each of `world_size` ranks.

    Raises ConfigError when the global batch is no multiple of micro-batch times ranks.
    """
    rows_per_micro_step = batch.micro_batch_rows * world_size
    steps, rest = divmod(batch.global_batch_rows, rows_per_micro_step)
    if rest:
        fitting = [steps * rows_per_micro_step, (steps + 1) * rows_per_micro_step]
        raise ConfigError(
            f"batch.global_batch_rows = {batch.global_batch_rows} is no multiple of micro_batch_rows x ranks = "
            f"{batch.micro_batch_rows} x {world_size} = {rows_per_micro_step}",
            f"set batch.global_batch_rows={' or '.join(str(n) for n in fitting if n)}, or change the number of ranks",
        )
    return steps


def reduces_by_mean(zero_stage: int) -> bool:
    """Whether DeepSpeed divides the reduced gradient by the number of ranks at this stage."""
    return zero_stage == 3


def uses_deepspeed_bf16(config: TrainConfig) -> bool:
    """Whether DeepSpeed's own bf16 mode is on (see the module's text for stage 0)."""
    return config.engine.dtype == "bf16" and config.engine.zero_stage > 0


def deepspeed_config(config: TrainConfig, world_size: int, num_parameters: int | None = None) -> dict[str, Any]:
    """The dict for `deepspeed.initialize`.

    `num_parameters` bounds the communication buffers, which DeepSpeed allocates whole (unknown: 500M elements).
    Raises ConfigError when the batch does not divide.
    """
    stage = config.engine.zero_stage
    settings: dict[str, Any] = {
        "train_batch_size": config.batch.global_batch_rows,
        "train_micro_batch_size_per_gpu": config.batch.micro_batch_rows,
        "gradient_accumulation_steps": grad_accum_steps(config.batch, world_size),
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it waits for the GPU at every forward
        "gradient_clipping": 0.0,
        "gradient_allreduce_op": "mean" if reduces_by_mean(stage) else "sum",
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,  # DeepSpeed knows AdamW by its exact class; ours is a subclass
    }
    if stage > 0:
        settings["zero_optimization"] = _zero_settings(config, num_parameters)
    if uses_deepspeed_bf16(config):
        settings["bf16"] = {"enabled": True, "immediate_grad_update": True, "check_grad_overflow": False}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _zero_settings(config: TrainConfig, num_parameters: int | None) -> dict[str, Any]:
    stage = config.engine.zero_stage
    bucket = min(_LARGEST_BUCKET, num_parameters or _LARGEST_BUCKET)
    bucket += bucket % 2  # DeepSpeed wants an even allgather bucket
    settings: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 2 or (stage == 1 and config.engine.dtype == "fp32"):
        settings["compute_grad_norm"] = False  # the engine has already computed it; DeepSpeed refuses this elsewhere
    return settings
