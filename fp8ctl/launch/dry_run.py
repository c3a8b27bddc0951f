"""What a run would do, without starting it: `fp8ctl train ... --dry-run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table

from fp8ctl.config.schema import BatchConfig, TrainConfig
from fp8ctl.errors import DataError

if TYPE_CHECKING:
    from fp8ctl.data.loader import Loader


def describe_run(config: TrainConfig) -> RenderableType:
    """Model, batch arithmetic, data, plan and DeepSpeed settings of a run. Needs torch; loads no weights."""
    import json

    import torch

    from fp8ctl.engine.ds_config import deepspeed_config, grad_accum_steps
    from fp8ctl.model.shapes import count_parameters
    from fp8ctl.worker.build import check_data, choose_kernels, loader_to_look_at, model_shape, plan_of
    from fp8ctl.worker.parent import check_hand_off, find_parent

    shape = model_shape(config)
    check_data(config, shape)
    loader = loader_to_look_at(config)
    plan = plan_of(config, shape)
    on_gpu = config.engine.device != "cpu" and torch.cuda.is_available()
    plan, backend, attention = choose_kernels(config, shape, plan, torch.device("cuda" if on_gpu else "cpu"))
    batch, accum = config.batch, grad_accum_steps(config.batch, config.launch.num_ranks)

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("model", f"{config.model.name}, {shape.family}, {count_parameters(shape):,} parameters")
    table.add_row("weights", config.model.path or f"random, seed {config.seed}")
    parent = find_parent(config)
    if parent is not None and parent.step is not None:
        table.add_row("parent", f"{parent.stage} run {parent.path}, step {parent.step:,}, {parent.hash}")
    table.add_row(
        "batch",
        f"{batch.global_batch_rows} rows x {batch.seq_len_tokens:,} tokens = {batch.micro_batch_rows} rows"
        f" x {config.launch.num_ranks} ranks"
        f" x {accum} accumulation steps",
    )
    num_rows = config.loop.num_steps * batch.global_batch_rows
    table.add_row(
        "length",
        f"{config.loop.num_steps:,} steps, {num_rows * batch.seq_len_tokens:,} positions, {num_rows / loader.rows_per_epoch:.2f} epochs",
    )
    described = loader.describe(config.loop.num_steps)
    for source in described.pop("sources"):
        table.add_row(
            "data: source",
            f"{source['path']}: {source['tokens']:,} tokens, {source['share']:.2%} of the rows, read {source['epochs']:.2f} times"
            + (
                f"; {source['tokens_left']:,} tokens left of the epoch begun"
                if source["tokens_left"] is not None
                else ""
            ),
        )
    schedule = config.schedule
    table.add_row(
        "learning rate",
        f"{schedule.kind}, {schedule.warmup_steps:,} steps of warm-up, {config.optim.peak_lr:g} down to {config.optim.min_lr:g}"
        if schedule.kind != "constant"
        else f"constant, {schedule.warmup_steps:,} steps of warm-up, {config.optim.peak_lr:g}",
    )
    for warning in [*check_hand_off(config), *loader.warnings(config.loop.num_steps)]:
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
    sample = add_sft_rows(table, loader, batch) if config.stage == "sft" else []
    return Group(table, *sample, plan.table())


def add_sft_rows(table: Table, loader: Loader, batch: BatchConfig) -> list[RenderableType]:
    """What became of the conversations, lengths, and samples a step; returns one decoded sample to show below."""
    import numpy as np

    from fp8ctl.data.inspect import show_document
    from fp8ctl.data.inspect_sft import add_lengths, add_outcomes, length_percentiles, marked_text

    for source in loader.sources:
        counters = source.manifest.counters
        table.add_row("rows", f"{counters.get('rows', 0):,} in, {counters.get('kept', 0):,} kept: {source.path}")
        add_outcomes(table, counters, sum(source.manifest.tokens(split) for split in source.manifest.splits))
    lengths = np.concatenate([source.corpus.lengths for source in loader.sources])
    add_lengths(table, length_percentiles(lengths))
    table.add_row("samples", f"{len(lengths) / loader.rows_per_epoch * batch.global_batch_rows:,.1f} a step on average")
    try:
        shown = show_document(loader.sources[0].path, 0)
    except DataError as error:
        return [f"no sample to show: {error.message}"]
    return ["", "the first sample, what is trained in green between >>> and <<<:", marked_text(shown.pieces), ""]
