"""`fp8ctl bench gemm`: the linears of a model one by one, BF16 against FP8 recipes, through the calls that training makes.

Each linear, and each group that training runs as one (q, k, v; gate, up), is one `LinearCall`: its quantisers and its three GEMMs
are timed apart, all recipes in turn. What quantisation costs is booked where it happens: to fprop the input in both directions (wgrad
reads the second) and the weight; to dgrad the output gradient in both directions and the weight transposed; to wgrad nothing.

Letters: M tokens, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8ctl.bench.clock import Clock, time_in_turn
from fp8ctl.bench.hardware import choose_device, copy_bandwidth, device_name
from fp8ctl.config.bench_schema import BenchArmConfig, BenchGemmConfig
from fp8ctl.config.compose import compose
from fp8ctl.config.schema import ModelShape, PrecisionConfig, RecipeConfig
from fp8ctl.errors import ConfigError
from fp8ctl.fp8.backend import Backend, choose_backend
from fp8ctl.fp8.calls import LinearCall
from fp8ctl.fp8.gemms import gemms_of
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.model.shapes import linear_shapes

DIRECTIONS = ("fprop", "dgrad", "wgrad")
QUANTIZERS = {"fprop": ("input", "weight"), "dgrad": ("gradient", "weight_transposed"), "wgrad": ()}
"""Whose time is booked to which direction."""
Progress = Callable[[int, int, str], None]
_CACHE_BYTES = 2**28  # inputs of quantisers rotate through this much, more than any GPU's cache


@dataclass(frozen=True)
class LinearGroup:
    """Linears that share an input and run as one call."""

    name: str
    heights: tuple[int, ...]
    """N of each."""
    in_features: int
    calls_per_block: int
    """How often a transformer block makes this call in training; 0: measured for itself only."""


@dataclass(frozen=True)
class Measured:
    """A recipe and what runs it."""

    name: str
    recipe: RecipeConfig
    backend: Backend | None
    """None: BF16."""


def linear_groups(shape: ModelShape) -> list[LinearGroup]:
    """The calls of a block as training makes them, the head, then each other shape that a linear has by itself."""
    last = f"model.layers.{shape.num_layers - 1}."
    sizes = {fqn.rpartition(".")[2]: s for fqn, s in linear_shapes(shape).items() if fqn.startswith((last, "lm_head"))}
    calls = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("lm_head",)]
    groups = [
        LinearGroup(
            " + ".join(names), tuple(sizes[n][0] for n in names), sizes[names[0]][1], int(names != ("lm_head",))
        )
        for names in calls
    ]
    seen = {(g.heights, g.in_features) for g in groups}
    alone: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        key = (sizes[name][:1], sizes[name][1])
        if key not in seen:
            alone.setdefault(key, []).append(name)
    return groups + [LinearGroup(", ".join(names), *key, 0) for key, names in alone.items()]


def measure_gemms(config: BenchGemmConfig, on_progress: Progress) -> dict[str, Any]:
    """Measures; gives {rows, notes, device, ...} for `gemm_show`.

    Raises:
        ConfigError: no such choice of `precision`, a model without shape, or no GPU where one was asked for.
        PrecisionError: a recipe can't run on the backend that was asked for.
    """
    if config.model.shape is None:
        raise ConfigError("model.shape: no shape", "choose model=NAME of conf/model, e.g. model=qwen2_5_7b")
    device = choose_device(config.device)
    clock, generator = Clock(device), torch.Generator(device).manual_seed(config.seed)
    measured = [Measured("bf16", RecipeConfig(name="bf16"), None), *_recipes(config, device)]
    groups = linear_groups(config.model.shape)
    rows: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        on_progress(number, len(groups) + 1, group.name)
        rows += _measure_group(group, measured, config, clock, generator)
    on_progress(len(groups), len(groups) + 1, "quantisers")
    copy_tb_s = copy_bandwidth(clock, config.rounds)
    rows += _block_rows(rows, groups, measured)
    rows += _measure_quantizers(groups, measured, config, clock, generator, copy_tb_s)
    on_progress(len(groups) + 1, len(groups) + 1, "")
    return {
        "rows": rows,
        "copy_tb_s": copy_tb_s,
        "device": device_name(device) or "CPU",
        "is_gpu": clock.is_gpu,
        "backends": {m.name: f"{m.backend.name}, {m.backend.reason}" for m in measured if m.backend is not None},
    }


def _recipes(config: BenchGemmConfig, device: torch.device) -> Iterator[Measured]:
    for name in config.precisions:
        arm: BenchArmConfig = compose("bench_arm", [f"precision={name}"])
        precision: PrecisionConfig = arm.precision
        if precision.default == "bf16":
            raise ConfigError(f"precisions: {name} is BF16, which is measured anyway", f"drop {name}")
        backend = choose_backend(config.backend, recipe=precision.recipe, device_type=device.type, gemm=config.gemm)
        yield Measured(name, precision.recipe, backend)


def _call(group: LinearGroup, m: Measured, device: torch.device) -> LinearCall:
    name, kernel = (m.backend.name, m.backend.gemm or "cublas") if m.backend else ("reference", "cublas")
    layers = [
        Fp8Linear(
            group.in_features,
            n,
            bias=False,
            precision="fp8" if m.backend else "bf16",
            recipe=m.recipe,
            backend=name,  # type: ignore[arg-type]
            kernel=kernel,  # type: ignore[arg-type]
            device="meta",
            dtype=torch.bfloat16,
        )
        for n in group.heights
    ]
    return LinearCall.of(layers, is_training=True)


def _steps(call: LinearCall, x_MK: Tensor, weights: list[Tensor], dys: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """What is timed of one call, by name."""
    recipe, is_fp8 = call.recipe, call.gemms.precision == "fp8"
    wgrad_is_fp8 = call.wgrad_gemms is call.gemms
    a, _ = call.gemms.input(x_MK, recipe, rows=True, columns=False)
    _, x_columns = call.wgrad_gemms.input(x_MK, recipe, rows=False, columns=True)
    assert a is not None and x_columns is not None
    w, w_transposed = call.weights(weights, transposed=False), call.weights(weights, transposed=True)
    dy_rows, dy_columns = call.gradients(dys, rows=True, columns=True)
    no_biases = [None] * len(weights)
    steps: dict[str, Callable[[], Any]] = {
        "fprop": lambda: call.fprop(a, w, no_biases, x_MK),
        "dgrad": lambda: call.dgrad(dy_rows, w_transposed, dys[0]),
        "wgrad": lambda: call.wgrad(dy_columns, x_columns, dys[0]),
    }
    if is_fp8:
        steps |= {
            "input": lambda: call.gemms.input(x_MK, recipe, rows=True, columns=wgrad_is_fp8),
            "weight": lambda: call.weights(weights, transposed=False),
            "gradient": lambda: call.gradients(dys, rows=True, columns=True),
            "weight_transposed": lambda: call.weights(weights, transposed=True),
        }
    return steps


def _measure_group(
    group: LinearGroup, measured: list[Measured], config: BenchGemmConfig, clock: Clock, generator: torch.Generator
) -> list[dict[str, Any]]:
    m, k = config.num_tokens, group.in_features
    x_MK = _randn(m, k, generator)
    weights = [_randn(n, k, generator).mul_(0.02) for n in group.heights]
    dys = [_randn(m, n, generator).mul_(1e-3) for n in group.heights]
    with torch.no_grad():
        steps = [_steps(_call(group, r, clock.device), x_MK, weights, dys) for r in measured]
        flat = [(index, name, call) for index, of_one in enumerate(steps) for name, call in of_one.items()]
        times = time_in_turn(clock, [call for _, _, call in flat], config.rounds)
    ms: list[dict[str, float]] = [{} for _ in measured]
    for (index, name, _), t in zip(flat, times, strict=True):
        ms[index][name] = t
    flops = 2.0 * m * k * sum(group.heights)
    return [row for r, t in zip(measured[1:], ms[1:], strict=True) for row in _rows(group, m, r, t, ms[0], flops)]


def _rows(
    group: LinearGroup, m: int, measured: Measured, ms: dict[str, float], bf16: dict[str, float], flops: float
) -> list[dict[str, Any]]:
    """A row for each direction, and their sum."""
    rows = []
    for direction in (*DIRECTIONS, "all"):
        of = DIRECTIONS if direction == "all" else (direction,)
        gemm, plain = sum(ms[d] for d in of), sum(bf16[d] for d in of)
        quantize = sum(ms[q] for d in of for q in QUANTIZERS[d])
        tflops = flops * len(of) / 1e9
        rows.append(
            {
                "table": "linears",
                "linear": group.name,
                "m": m,
                "n": sum(group.heights),
                "k": group.in_features,
                "direction": direction,
                "precision": measured.name,
                "bf16_ms": plain,
                "gemm_ms": gemm,
                "quantize_ms": quantize,
                "bf16_tflops": tflops / plain,
                "gemm_tflops": tflops / gemm,
                "tflops": tflops / (gemm + quantize),
                "gemm_ratio": plain / gemm,
                "ratio": plain / (gemm + quantize),
                "pays": plain > gemm + quantize,
            }
        )
    return rows


def _block_rows(
    rows: list[dict[str, Any]], groups: list[LinearGroup], measured: list[Measured]
) -> list[dict[str, Any]]:
    """Sums over the calls of one transformer block, forward and backward."""
    calls = {g.name: g.calls_per_block for g in groups}
    found = []
    for m in measured[1:]:
        of = [r for r in rows if r["precision"] == m.name and r["direction"] == "all" and calls[r["linear"]]]
        plain, gemm, quantize = (
            sum(r[key] * calls[r["linear"]] for r in of) for key in ("bf16_ms", "gemm_ms", "quantize_ms")
        )
        found.append(
            {
                "table": "one block, all linears",
                "precision": m.name,
                "backend": m.backend.name if m.backend else None,
                "gemm": m.backend.gemm if m.backend else None,
                "bf16_ms": plain,
                "gemm_ms": gemm,
                "quantize_ms": quantize,
                "gemm_ratio": plain / gemm,
                "ratio": plain / (gemm + quantize),
                "linears_that_pay": ", ".join(r["linear"] for r in of if r["pays"]) or "none",
                "linears_that_do_not": ", ".join(r["linear"] for r in of if not r["pays"]) or "none",
            }
        )
    return found


def _measure_quantizers(
    groups: list[LinearGroup],
    measured: list[Measured],
    config: BenchGemmConfig,
    clock: Clock,
    generator: torch.Generator,
    copy_tb_s: float,
) -> list[dict[str, Any]]:
    """Activations in both directions: bytes that must be read and written, by time."""
    widths = sorted(
        {g.in_features for g in groups if g.calls_per_block} | {sum(g.heights) for g in groups if g.calls_per_block}
    )
    rows = []
    for width in widths:
        num = max(1, _CACHE_BYTES // (2 * config.num_tokens * width)) if clock.is_gpu else 1
        xs = [_randn(config.num_tokens, width, generator) for _ in range(num)]
        in_turn = [_quantizer(r, xs) for r in measured[1:]]
        times = time_in_turn(clock, [call for call, _ in in_turn], config.rounds)
        for r, (_, num_bytes), ms in zip(measured[1:], in_turn, times, strict=True):
            tb_s = num_bytes / (ms * 1e9)
            rows.append(
                {
                    "table": "quantisers, both directions",
                    "precision": r.name,
                    "m": config.num_tokens,
                    "k": width,
                    "ms": ms,
                    "tb_s": tb_s,
                    "copy_tb_s": copy_tb_s,
                    "share_of_copy": tb_s / copy_tb_s,
                }
            )
    return rows


def _quantizer(measured: Measured, xs: list[Tensor]) -> tuple[Callable[[], Any], int]:
    """(The call, which takes the next input each time; bytes that it has to move.)"""
    assert measured.backend is not None
    gemms = gemms_of("fp8", measured.backend.name, measured.backend.gemm or "cublas")
    place = 0

    def call() -> tuple[Any, Any]:
        nonlocal place
        place = (place + 1) % len(xs)
        return gemms.input(xs[place], measured.recipe, rows=True, columns=True)

    rows, columns = call()
    return call, xs[0].nbytes + sum(t.nbytes for t in (*rows, *columns))


def _randn(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, device=generator.device, dtype=torch.bfloat16)
