"""One training step on DeepSpeed, cut where a monitor can still refuse it.

The order of a step, the same at every ZeRO stage:

    for each micro-batch:  loss_sum = engine.forward(...);  engine.backward(loss_sum, num_trainable=N)
    grad_norm = engine.prepare_step()      every rank's gradient is in; nothing has been changed yet
    engine.apply_step(lr)                  clip, AdamW        or      engine.drop_step()

N counts the trainable tokens of the whole global batch, so the gradient is d(sum of all token losses) / N whatever the
number of ranks and micro-steps. It is accumulated and reduced in FP32.

Where the veto sits. DeepSpeed reduces gradients in the backward pass of the last micro-step (the accumulation boundary,
which the engine sets by hand) and does everything else in one call, `DeepSpeedEngine.step`: norm, overflow check,
clipping, update. So the norm is computed here, between the two, from the reduced FP32 gradients that DeepSpeed's
optimizer holds, and DeepSpeed's own norm, check and clipping are off. Both ways out then run that one call, with the
optimizer underneath told either to divide by the clip factor or to do nothing (`optimizer.VetoableAdamW`). A refused
step thus takes DeepSpeed's ordinary way to cleared gradients and counters instead of a copy of it that would age; it
rewrites each weight with the rounded master that it already equals.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8ctl.config.schema import TrainConfig
from fp8ctl.engine.dist import Dist
from fp8ctl.engine.ds_config import deepspeed_config, grad_accum_steps, reduces_by_mean
from fp8ctl.engine.optimizer import MasterAdamW, VetoableAdamW, parameter_groups, sum_of_squares

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Engine:
    """A model with its gradients, FP32 masters and moments, spread over ranks by DeepSpeed.

    Takes the model over: casts its parameters (not its buffers) to `engine.dtype`, moves it to the device and gives
    every rank the weights of rank 0. At ZeRO stage 3 it keeps only this rank's share of each large parameter between uses.

    `deepspeed` is the DeepSpeedEngine underneath, for checkpoints.

    Raises:
        ConfigError: the global batch does not divide.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, dist: Dist) -> None:
        import deepspeed
        from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

        self.module = model
        self.dist = dist
        self.zero_stage: int = config.engine.zero_stage
        self.dtype = _DTYPES[config.engine.dtype]
        self.grad_accum_steps = grad_accum_steps(config.batch, dist.world_size)
        self.parameter_shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._clip_grad_norm = config.optim.clip_grad_norm
        self._micro_step = 0
        self._grad_norm: float | None = None
        self._linear = torch.nn.functional.linear

        for p in model.parameters():
            p.data = p.data.to(self.dtype)
        for module in model.modules():
            if getattr(module, "runs_linears_together", False):
                # Stage 3 gathers weights before a module's forward; such a module uses those of its children outside
                # theirs. (At other stages the mark means nothing.)
                deepspeed.utils.set_z3_leaf_module(module, True)
        settings = deepspeed_config(config, dist.world_size, sum(p.numel() for p in model.parameters()))

        def build_optimizer(_parameters: Any) -> VetoableAdamW:
            # Called by DeepSpeed after it has moved and broadcast the weights, which the masters copy
            adamw = MasterAdamW if self.zero_stage == 0 and self.dtype != torch.float32 else VetoableAdamW
            self._optimizer = adamw(parameter_groups(model, config.optim), config.optim)
            return self._optimizer

        with quiet():
            self.deepspeed, *_ = deepspeed.initialize(model=model, optimizer=build_optimizer, config=settings)
        self._holds_whole_gradient = self.zero_stage == 0 or isinstance(self.deepspeed.optimizer, BF16_Optimizer)
        if self._holds_whole_gradient and dist.world_size == 1:
            # DeepSpeed would copy it to all-reduce it with nobody
            self.deepspeed.enable_backward_allreduce = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The model's forward through DeepSpeed (stage 3 gathers weights there), for training and for validation."""
        return self.deepspeed(*args, **kwargs)

    def backward(self, loss_sum: Tensor, *, num_trainable: float) -> None:
        """Adds d(loss_sum) / num_trainable of one micro-batch to the gradient.

        Args:
            loss_sum: scalar, the sum of the token losses of this rank's micro-batch.
            num_trainable: tokens that carry loss in the global batch of this step, over all ranks and micro-batches.
        """
        assert self._micro_step < self.grad_accum_steps, "all micro-batches are in: prepare_step comes next"
        self._micro_step += 1
        self.deepspeed.set_gradient_accumulation_boundary(self._micro_step == self.grad_accum_steps)
        ranks = self.dist.world_size if reduces_by_mean(self.zero_stage) else 1
        self.deepspeed.backward(loss_sum * (ranks / num_trainable), scale_wrt_gas=False)

    @torch.no_grad()
    def prepare_step(self) -> float:
        """L2 norm of the whole gradient before clipping, the same on every rank; NaN or infinite when any part is."""
        assert self._micro_step == self.grad_accum_steps, (
            f"{self._micro_step} of {self.grad_accum_steps} micro-batches are in"
        )
        gradients, is_sharded = self._reduced_gradients()
        squares = sum_of_squares(gradients, self.dist.device).item()
        (squares,) = self.dist.all_reduce_floats([squares], op="sum" if is_sharded else "max")
        self._grad_norm = math.sqrt(squares)
        return self._grad_norm

    def apply_step(self, lr: float) -> bool:
        """Clips to `optim.clip_grad_norm`, updates masters, moments and weights, and clears the gradient.

        Returns whether it did: a gradient that is not finite is dropped, as nothing good can come of it.
        """
        assert self._grad_norm is not None, "prepare_step comes first"
        if not math.isfinite(self._grad_norm):
            self.drop_step()
            return False
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        clips = self._clip_grad_norm > 0.0
        # torch's and DeepSpeed's formula alike; never below 1, so small gradients keep their bits
        self._optimizer.grad_divisor = max(1.0, (self._grad_norm + 1e-6) / self._clip_grad_norm) if clips else 1.0
        self._finish_step(vetoed=False)
        return True

    def drop_step(self) -> None:
        """Clears the gradient; weights, masters, moments and step count are as if the batch had never been seen."""
        assert self._grad_norm is not None, "prepare_step comes first"
        self._finish_step(vetoed=True)

    @torch.no_grad()
    def gather_weights(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """All parameters by name on rank 0, on the CPU, in `dtype` (default: the engine's); {} on the other ranks.

        Collective at ZeRO stage 3, where it holds one whole parameter at a time on each rank's device.
        """
        import deepspeed

        weights: dict[str, Tensor] = {}
        for name, p in self.module.named_parameters():
            with deepspeed.zero.GatheredParameters([p], enabled=self.zero_stage == 3):
                if self.dist.is_main:
                    weights[name] = p.detach().to(device="cpu", dtype=dtype or self.dtype, copy=True)
        return weights

    def close(self) -> None:
        """Takes DeepSpeed's hooks off the model and frees its buffers."""
        self.deepspeed.destroy()
        # Stage 3 replaces it for the whole process, by one that does not keep gathered weights alive until backward
        torch.nn.functional.linear = self._linear

    def _finish_step(self, *, vetoed: bool) -> None:
        self._optimizer.vetoed = vetoed
        # DeepSpeed may warn that it skips a step, which is what was asked for
        with quiet() if vetoed else contextlib.nullcontext():
            self.deepspeed.step()
        self._micro_step, self._grad_norm = 0, None

    def _reduced_gradients(self) -> tuple[list[Tensor], bool]:
        """This rank's reduced FP32 gradients, and whether the other ranks hold the rest of them (else all hold all)."""
        optimizer = self.deepspeed.optimizer
        if self.zero_stage == 0:
            return self._optimizer.gradients(), False
        if self._holds_whole_gradient:  # stage 1 in BF16; this rank's part of it is enough
            return optimizer.fp32_groups_gradient_flat_partition, True
        return [part for parts in optimizer.averaged_gradients.values() for part in parts], True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what DeepSpeed prints and logs below an error while it is set up, saved or loaded."""
    from deepspeed.utils import logger

    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
