"""What a run would do, without starting it: `fp8ctl train ... --dry-run`."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table

from fp8ctl.config.schema import TrainConfig


def describe_run(config: TrainConfig) -> RenderableType:
    """Model, batch arithmetic, data, plan and DeepSpeed settings of a run. Needs torch; loads no weights."""
    import json

    import torch

    from fp8ctl.data.loader import Loader
    from fp8ctl.engine.ds_config import deepspeed_config, grad_accum_steps
    from fp8ctl.model.shapes import count_parameters
    from fp8ctl.worker.build import check_data, choose_kernels, model_shape, plan_of

    shape = model_shape(config)
    check_data(config, shape)
    loader = Loader(
        config.data.model_copy(update={"prefetch_steps": 0}),
        batch=config.batch,
        seed=config.seed,
        rank=0,
        world_size=config.launch.num_ranks,
    )
    plan = plan_of(config, shape)
    on_gpu = config.engine.device != "cpu" and torch.cuda.is_available()
    plan, backend, attention = choose_kernels(config, shape, plan, torch.device("cuda" if on_gpu else "cpu"))
    batch, accum = config.batch, grad_accum_steps(config.batch, config.launch.num_ranks)

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("model", f"{config.model.name}, {shape.family}, {count_parameters(shape):,} parameters")
    table.add_row("weights", config.model.path or f"random, seed {config.seed}")
    table.add_row(
        "batch",
        f"{batch.global_batch_rows} rows x {batch.seq_len_tokens:,} tokens = {batch.micro_batch_rows} rows"
        f" x {config.launch.num_ranks} ranks"
        f" x {accum} accumulation steps",
    )
    table.add_row(
        "length",
        f"{config.loop.num_steps:,} steps, {config.loop.num_steps * batch.global_batch_rows * batch.seq_len_tokens:,} positions",
    )
    described = loader.describe(config.loop.num_steps)
    for source in described.pop("sources"):
        table.add_row(
            "data: source",
            f"{source['path']}: {source['tokens']:,} tokens, {source['share']:.2%} of the rows, read {source['epochs']:.2f} times",
        )
    for warning in loader.warnings(config.loop.num_steps):
        table.add_row("warning", warning)
    for name, value in described.items():
        table.add_row(
            f"data: {name.replace('_', ' ')}",
            f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value),
        )
    table.add_row("precision", plan.summary())
    gemm = f"; GEMMs by {backend.gemm}: {backend.gemm_reason}" if backend.gemm else ""
    table.add_row("backend", f"{backend.name}: {backend.reason}{gemm}")
    table.add_row("attention", f"{attention.name}: {attention.reason}")
    table.add_row("deepspeed", json.dumps(deepspeed_config(config, config.launch.num_ranks, count_parameters(shape))))
    return Group(table, plan.table())
