"""Builds what a rank works with from the resolved settings: model, plan, data, engine, monitor."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8ctl.config.schema import DataConfig, ModelShape, TrainConfig
from fp8ctl.data.loader import Loader, PackedBatch
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.mixing import source_paths
from fp8ctl.engine.dist import Dist
from fp8ctl.errors import DataError, ModelError, PrecisionError
from fp8ctl.fp8.backend import Backend, choose_backend, lacks_fp8_units
from fp8ctl.model.attention_choice import AttentionChoice, choose_attention
from fp8ctl.model.hf import load_hf, read_shape
from fp8ctl.model.transformer import Transformer
from fp8ctl.precision.apply import apply_plan
from fp8ctl.precision.plan import PrecisionPlan, make_plan

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class PlannedModel:
    """A model whose linears are ready to run in what the plan says."""

    model: Transformer
    shape: ModelShape
    plan: PrecisionPlan
    backend: Backend
    attention: AttentionChoice


def model_shape(config: TrainConfig) -> ModelShape:
    """The shape of the folder, which must agree with a shape in the settings.

    Raises:
        ModelError: the two differ; the first differing sizes are named.
    """
    if config.model.path is None:
        assert config.model.shape is not None, "checks.check_train asks for one of the two"
        return config.model.shape
    shape = read_shape(Path(config.model.path))
    if config.model.shape is not None:
        wanted, found = config.model.shape.model_dump(), shape.model_dump()
        ignored = ("init_std", "max_positions")  # neither changes what the weights compute
        differing = [
            f"{k} {found[k]} (settings: {wanted[k]})" for k in wanted if k not in ignored and wanted[k] != found[k]
        ]
        if differing:
            raise ModelError(
                f"model.path is not a {config.model.name}: {', '.join(differing[:3])}",
                "drop model=..., the folder knows its own shape",
            )
    return shape


def build_model(config: TrainConfig, device: torch.device) -> PlannedModel:
    """Weights from the folder, or random ones from the seed; linears swapped once, before the engine wraps them."""
    shape, dtype = model_shape(config), DTYPES[config.engine.dtype]
    torch.manual_seed(config.seed)
    if config.model.path is not None:
        model = load_hf(Path(config.model.path), dtype=dtype, device=device)
    else:
        model = Transformer(shape).to(device=device, dtype=dtype)
    model.activation_checkpointing = config.engine.activation_checkpointing
    plan = make_plan(model, config.precision)
    plan, backend, attention = choose_kernels(config, shape, plan, device)
    apply_plan(model, plan, config.precision, backend=backend)
    model.attention_kind = attention.name
    if device.type == "cuda":
        model.compile_kernels = config.engine.compile == "kernels"
        if config.engine.compile == "blocks":
            # one form for each precision of each linear that a plan mixes, with and without gradients
            torch._dynamo.config.recompile_limit = 32
            for block in model.model.layers:
                block.compile(dynamic=False)
    return PlannedModel(model, shape, plan, backend, attention)


def choose_kernels(
    config: TrainConfig, shape: ModelShape, plan: PrecisionPlan, device: torch.device
) -> tuple[PrecisionPlan, Backend, AttentionChoice]:
    """What executes FP8 GEMMs and attention on the device; on a GPU both are tried out.

    A GPU without FP8 units runs the plan in BF16, unless emulation is asked for by name: the plan that comes back says so.

    Raises:
        PrecisionError, ModelError: what is asked for by name, or required, can't run.
    """
    precision = config.precision
    lacking = lacks_fp8_units(device.type) if precision.backend == "auto" and plan.fp8_linears else None
    if lacking is not None:
        if precision.require_fp8:
            raise PrecisionError(
                f"FP8 is required, but {lacking}", "use another GPU, or set precision.backend=reference to emulate FP8"
            )
        plan = plan.in_bf16(lacking)
    backend = Backend("reference", lacking or "the plan runs nothing in FP8")
    if plan.fp8_linears:
        backend = choose_backend(
            precision.backend, recipe=precision.recipe, device_type=device.type, gemm=precision.gemm
        )
    attention = choose_attention(
        config.engine.attention,
        head_size=shape.head_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        device=device,
        dtype=DTYPES[config.engine.dtype],
    )
    return plan, backend, attention


def plan_of(config: TrainConfig, shape: ModelShape) -> PrecisionPlan:
    """The plan of a run, without weights."""
    with torch.device("meta"):
        return make_plan(Transformer(shape), config.precision)


def build_data(config: TrainConfig, shape: ModelShape, dist: Dist) -> tuple[Loader, dict[str, list[PackedBatch]]]:
    """The rank's training loader, and its share of the validation rows of each data set that has some.

    Raises:
        DataError: a data set is of the other stage, or holds tokens that the model's embedding lacks.
    """
    check_data(config, shape)
    options: dict[str, Any] = {
        "batch": config.batch,
        "seed": config.seed,
        "rank": dist.rank,
        "world_size": dist.world_size,
        "pin_memory": dist.device.type == "cuda",
    }
    loader = Loader(config.data, **options)
    held_out = {}
    for path in source_paths(config.data) if config.loop.validation_rows else []:
        if Manifest.read(path).has_split("validation"):
            data = DataConfig(path=path, packing=config.data.packing, prefetch_steps=0)
            validation = Loader(data, **options, split="validation")
            held_out[path] = validation.fixed_batches(config.loop.validation_rows)
    return loader, held_out


def loader_to_look_at(config: TrainConfig) -> Loader:
    """The training loader of rank 0, without a thread: for what is told before a run begins."""
    return Loader(
        config.data.model_copy(update={"prefetch_steps": 0}),
        batch=config.batch,
        seed=config.seed,
        rank=0,
        world_size=config.launch.num_ranks,
    )


def check_data(config: TrainConfig, shape: ModelShape) -> None:
    """Refuses data that this run can't be meant for, before anything is built."""
    for path in source_paths(config.data):
        manifest = Manifest.read(path)
        if manifest.kind != config.stage:
            raise DataError(
                f"{path} was prepared for {manifest.kind}, this run is {config.stage}",
                f"run `fp8ctl train {manifest.kind}`",
            )
        if manifest.max_token_id >= shape.vocab_size:
            raise DataError(
                f"{path} holds token {manifest.max_token_id:,}, the model's vocabulary has {shape.vocab_size:,}",
                "prepare the data with the tokenizer of this model",
            )
    if config.batch.seq_len_tokens > shape.max_positions:
        raise DataError(
            f"rows of {config.batch.seq_len_tokens:,} tokens are longer than the model's {shape.max_positions:,} positions",
            f"set batch.seq_len_tokens={shape.max_positions} or less",
        )


def random_state() -> dict[str, object]:
    """This rank's random number generators; part of its share of a checkpoint."""
    state: dict[str, object] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, object]) -> None:
    """Inverse of `random_state`."""
    torch.set_rng_state(state["torch"])  # type: ignore[arg-type]
    random.setstate(state["python"])  # type: ignore[arg-type]
    np.random.set_state(state["numpy"])  # type: ignore[arg-type]
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])  # type: ignore[arg-type]
