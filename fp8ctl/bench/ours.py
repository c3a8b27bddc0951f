"""Arms that are this project's model: any precision, autocast, and DeepSpeed's BF16. They share one set of weights where they can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8ctl.bench.arms import Arm
from fp8ctl.bench.batch import Batch
from fp8ctl.config.bench_schema import BenchArmConfig, BenchStepConfig
from fp8ctl.config.schema import EngineConfig, LaunchConfig, ModelShape, OptimConfig
from fp8ctl.engine.dist import Dist
from fp8ctl.engine.engine import quiet
from fp8ctl.engine.optimizer import MasterAdamW, parameter_groups, sum_of_squares
from fp8ctl.fp8.backend import choose_backend
from fp8ctl.model.attention_choice import choose_attention
from fp8ctl.model.transformer import Transformer
from fp8ctl.precision.apply import apply_plan, keep_quantized_weights, weights_changed
from fp8ctl.precision.plan import make_plan

_LR = 1e-12
"""So small that no step moves a weight: all arms keep computing the same."""


class Weights:
    """Random weights by Hugging Face's names, one set on the device for all arms that can use it."""

    def __init__(self, shape: ModelShape, device: torch.device, seed: int) -> None:
        self.shape, self.device = shape, device
        torch.manual_seed(seed)
        home = _empty_model(shape).to(torch.bfloat16).to_empty(device=device)
        home.reset_parameters()
        self.parameters: dict[str, Tensor] = dict(home.named_parameters())
        self._optimizer: MasterAdamW | None = None

    @property
    def num_bytes(self) -> int:
        """Of the whole set."""
        return sum(p.nbytes for p in self.parameters.values())

    def model(self) -> Transformer:
        """A model of these very parameters."""
        model = _empty_model(self.shape)
        model.load_state_dict(self.parameters, assign=True)
        return model

    def optimizer(self) -> MasterAdamW:
        """AdamW as the engine runs it at ZeRO stage 0, on these parameters; made once."""
        if self._optimizer is None:
            model = self.model()
            optim = OptimConfig(peak_lr=_LR, min_lr=0.0)
            self._optimizer = MasterAdamW(parameter_groups(model, optim), optim)
        return self._optimizer


def _empty_model(shape: ModelShape) -> Transformer:
    with torch.device("meta"):
        return Transformer(shape)


def build_ours(settings: BenchArmConfig, config: BenchStepConfig, weights: Weights, batch: Batch) -> Arm:
    """The model with its linears in the precision of the settings.

    Raises:
        PrecisionError: the backend can't run here.
    """
    model, precision = weights.model(), settings.precision
    backend = choose_backend(
        precision.backend, recipe=precision.recipe, device_type=weights.device.type, gemm=precision.gemm
    )
    plan = make_plan(model, precision)
    apply_plan(model, plan, precision, backend=backend)
    if settings.keep_quantized_weights:
        keep_quantized_weights(model)
    facts = _prepare(model, settings, config, weights.device)
    if facts["compile"] == "blocks":
        for block in model.model.layers:
            block.compile(dynamic=False)
    arm = Arm(
        loss=lambda: mean_loss(model, batch),
        parameters=list(model.parameters()),
        own_bytes=weights.num_bytes,
        note=plan.summary(),
        begin=lambda: weights_changed(model),
        model=model,
        facts=facts,
    )
    if plan.fp8_linears:
        arm.facts |= {"backend": backend.name, "gemm": backend.gemm, "backend_reason": backend.reason}
    if config.optimizer:
        _add_optimizer(arm, weights)
    return arm


def _prepare(
    model: Transformer, settings: BenchArmConfig, config: BenchStepConfig, device: torch.device
) -> dict[str, Any]:
    """After linears are swapped: what is compiled depends on the modules. Gives what was chosen, for the arm's row."""
    shape = model.shape
    choice = choose_attention(
        settings.attention,
        head_size=shape.head_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        device=device,
    )
    model.attention_kind = choice.name
    model.activation_checkpointing = config.activation_checkpointing
    compiled = settings.compile if device.type == "cuda" else "off"
    model.compile_kernels = compiled == "kernels"
    if settings.loss_chunk_tokens is not None:
        model.loss_chunk_tokens = settings.loss_chunk_tokens
    return {"attention": choice.name, "attention_reason": choice.reason, "compile": compiled}


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Forward pass of this project's model."""
    loss: Tensor = model(
        batch.input_ids_T, batch.position_ids_T, batch.cu_seqlens, batch.max_seqlen, labels_T=batch.labels_T
    )
    return loss / batch.num_labels


def _add_optimizer(arm: Arm, weights: Weights) -> None:
    optimizer = weights.optimizer()

    def step() -> None:
        norm = sum_of_squares(optimizer.gradients(), weights.device).sqrt().item()
        optimizer.grad_divisor = max(1.0, norm)
        optimizer.step()

    arm.optimizer_step = step
    # masters, both moments, and the gradients that are added up in FP32
    arm.own_bytes = weights.num_bytes + 16 * sum(p.numel() for p in arm.parameters)
    arm.note += "; gradients are added up in FP32 during backward"


def build_amp(config: BenchStepConfig, weights: Weights, batch: Batch) -> Arm:
    """FP32 weights under torch.autocast. They lie on the device during the arm's turns only, made from the shared set."""
    model, device = _empty_model(weights.shape), weights.device
    facts = _prepare(model, BenchArmConfig(), config, device)
    mine = {name: nn.Parameter(shared.detach().float()) for name, shared in weights.parameters.items()}
    model.load_state_dict(mine, assign=True)

    def enter() -> None:
        for name, shared in weights.parameters.items():
            mine[name].data = shared.detach().float()

    def leave() -> None:
        for parameter in mine.values():
            parameter.data = torch.empty(0, device=device)

    leave()

    def loss() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return mean_loss(model, batch)

    return Arm(
        loss=loss,
        parameters=list(mine.values()),
        own_bytes=2 * weights.num_bytes,
        note="FP32 weights, torch.autocast(bfloat16)",
        enter=enter,
        leave=leave,
        facts=facts,
    )


def build_deepspeed(config: BenchStepConfig, weights: Weights, batch: Batch) -> Arm:
    """The BF16 model in a DeepSpeed engine with its bf16 mode, masters and moments in BF16, at ZeRO stage 1."""
    Dist.start(
        EngineConfig(device="cuda" if weights.device.type == "cuda" else "cpu"),
        LaunchConfig(threads_per_rank=torch.get_num_threads()),
    )
    import deepspeed

    model = _empty_model(weights.shape)
    model.load_state_dict({n: nn.Parameter(p.detach().clone()) for n, p in weights.parameters.items()}, assign=True)
    plan = make_plan(model, BenchArmConfig().precision)
    apply_plan(model, plan, BenchArmConfig().precision)
    facts = _prepare(model, BenchArmConfig(), config, weights.device)
    num_parameters = sum(p.numel() for p in model.parameters())
    bucket = min(500_000_000, num_parameters + num_parameters % 2)
    settings: dict[str, Any] = {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        "optimizer": {"type": "AdamW", "params": {"lr": _LR, "torch_adam": True, "fused": True}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    with quiet():
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings)
    arm = Arm(
        loss=lambda: mean_loss(engine, batch),
        parameters=[],  # DeepSpeed clears gradients itself
        own_bytes=2 * weights.num_bytes,
        note="DeepSpeed ZeRO 1, masters, moments and gradients in BF16; backward copies the gradients into its buffers",
        backward=engine.backward,
        model=model,
        facts=facts,
    )
    if config.optimizer:
        arm.optimizer_step = engine.step
    else:
        arm.finish = engine.step
    _park_between_turns(arm, engine, weights)
    return arm


def _park_between_turns(arm: Arm, engine: Any, weights: Weights) -> None:
    """Gives the memory of DeepSpeed's copies of the weights and of its moments to the other arms while they run."""
    adamw = engine.optimizer.optimizer
    parked: list[tuple[torch.UntypedStorage, int]] = []

    def masters() -> list[Tensor]:
        return [p for group in adamw.param_groups for p in group["params"]]

    def moments() -> list[Tensor]:
        return [t for state in adamw.state.values() for t in state.values() if torch.is_tensor(t) and t.numel() > 1]

    def leave() -> None:
        tensors = [*arm.model.parameters(), *masters(), *moments()]  # type: ignore[union-attr]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        parked[:] = [(storage, storage.nbytes()) for storage in storages.values()]
        arm.own_bytes = sum(num_bytes for _, num_bytes in parked)
        for storage, _ in parked:
            storage.resize_(0)

    @torch.no_grad()
    def enter() -> None:
        if not parked:
            return
        for storage, num_bytes in parked:
            storage.resize_(num_bytes)
        for mine, shared in zip(arm.model.parameters(), weights.parameters.values(), strict=True):  # type: ignore[union-attr]
            mine.copy_(shared)
        for master, flat in zip(masters(), engine.optimizer.parallel_partitioned_bit16_groups, strict=True):
            master.copy_(flat[0])
        for moment in moments():
            moment.zero_()

    arm.enter, arm.leave = enter, leave
    leave()
