"""The results of `fp8ctl bench step`: rows of record, bars, the table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from fp8ctl.bench.arms import BF16_ARMS
from fp8ctl.bench.clock import iqr, median
from fp8ctl.bench.hardware import device_name, peak_of
from fp8ctl.bench.step import Measured, StepRun, executed_fp8_share
from fp8ctl.config.bench_schema import BenchStepConfig
from fp8ctl.model.shapes import flops_per_token
from fp8ctl.track.benchmark import Bar

CPU_NOTE = (
    "Measured on a CPU, where FP8 is emulated: the times are real and say nothing about the speed of FP8 on a GPU."
)
BREAKDOWN = "profile=true shows where the time goes"

# (model, rows, tokens of a row) -> least speed-up of infir2 over the best BF16 arm
_SPEED_BARS = {("qwen2_5_7b", 1, 8192): 1.25, ("qwen2_5_1_5b", 2, 8192): 1.12}
_MEMORY_CASE = ("qwen2_5_7b", 1, 8192)
_FAST_RECIPE_BAR = 1.38
_FAST_RECIPES = ("row", "tensor")


def case_of(config: BenchStepConfig) -> str:
    """The case in a few words, e.g. `qwen2_5_7b 1x8192`."""
    words = [config.model.name, f"{config.rows}x{config.seq_len_tokens}"]
    words += ["packed"] if config.documents == "packed" else []
    words += ["recompute"] if config.activation_checkpointing else []
    words += ["optimizer"] if config.optimizer else []
    return " ".join(words)


def step_rows(run: StepRun) -> list[dict[str, Any]]:
    """A row for each arm, whether it ran or not, then the kernels; ratios against the fastest BF16 arm."""
    case, fwd_bwd = case_of(run.config), fwd_bwd_ms(run)
    best = best_bf16(fwd_bwd)
    rows = [_row(m, run) for m in run.arms]
    for row in rows:
        ms = fwd_bwd.get(row["arm"])
        row["ratio_to_best_bf16"] = fwd_bwd[best] / ms if best and ms else None
        row["ratio_to_bf16"] = fwd_bwd["bf16"] / ms if ms and "bf16" in fwd_bwd else None
    return [{"case": case, **row} for row in [*rows, *run.kernels]]


def fwd_bwd_ms(run: StepRun) -> dict[str, float]:
    """Median forward + backward of the arms that ran to the end."""
    return {m.name: median(m.fwd_bwd_ms) for m in run.arms if m.status == "ok" and m.forward_ms}


def best_bf16(fwd_bwd: dict[str, float]) -> str | None:
    """The fastest arm without FP8."""
    return min((name for name in BF16_ARMS if name in fwd_bwd), key=lambda name: fwd_bwd[name], default=None)


def _row(m: Measured, run: StepRun) -> dict[str, Any]:
    config, device = run.config, run.clock.device
    shape = config.model.shape
    assert shape is not None
    row: dict[str, Any] = {"table": "arms", "arm": m.name, "status": m.status}
    if m.status != "ok" or m.arm is None or not m.forward_ms:
        return row
    ms, peak = median(m.fwd_bwd_ms), peak_of(device_name(device))
    # padding or not, every token is computed; a packed document's attention is shorter, which this formula leaves out
    flops = flops_per_token(shape, config.seq_len_tokens) * run.batch.num_tokens
    row |= {
        "num_steps": len(m.forward_ms),
        "forward_ms": median(m.forward_ms),
        "forward_iqr_ms": iqr(m.forward_ms),
        "backward_ms": median(m.backward_ms),
        "backward_iqr_ms": iqr(m.backward_ms),
        "fwd_bwd_ms": ms,
        "fwd_bwd_iqr_ms": iqr(m.fwd_bwd_ms),
        "optimizer_ms": median(m.optimizer_ms) if m.optimizer_ms else None,
        "optimizer_iqr_ms": iqr(m.optimizer_ms) if m.optimizer_ms else None,
        "tokens_per_s": run.batch.num_tokens / ms * 1e3,
        "model_tflops": flops / ms / 1e9,
        "mfu": flops / ms * 1e3 / peak.flops if peak else None,
        "mfu_peak": peak.name if peak else None,
        "peak_memory_bytes": m.peak_bytes if run.clock.is_gpu else None,
        "resident_memory_bytes": m.arm.own_bytes if run.clock.is_gpu else None,
        "loss": m.loss,
        "fp8_flops_share": executed_fp8_share(m.arm),
        "note": m.arm.note,
        **m.arm.facts,
    }
    return row


def step_bars(run: StepRun, reason: str = "") -> list[Bar]:
    """The bars of a case whose arms have run; none for other cases."""
    config = run.config
    key = (config.model.name, config.rows, config.seq_len_tokens)
    ms, case = fwd_bwd_ms(run), case_of(config)
    best = best_bf16(ms)
    is_plain = config.documents == "single" and not config.activation_checkpointing and not config.optimizer
    if key not in _SPEED_BARS or not is_plain or not run.clock.is_gpu or best is None:
        return []

    def why(*arms: str) -> str:
        return reason or ", ".join(f"{arm} {ms[arm]:.1f} ms" for arm in arms) + f"; {BREAKDOWN}"

    bars = []
    if "infir2" in ms:
        name = f"{case}: speed of infir2 over the best BF16 arm, {best}"
        bars.append(Bar(name, ms[best] / ms["infir2"], _SPEED_BARS[key], "x", "higher", why("infir2", best)))
        if "te-block" in ms:
            name = f"{case}: time of infir2 over te-block"
            bars.append(Bar(name, ms["infir2"] / ms["te-block"], 1.0, "x", "lower", why("infir2", "te-block")))
        if key == _MEMORY_CASE and "bf16" in ms:
            peaks = {m.name: m.peak_bytes for m in run.arms}
            gib = reason or f"infir2 {peaks['infir2'] / 2**30:.1f} GiB, bf16 {peaks['bf16'] / 2**30:.1f} GiB"
            name = f"{case}: peak memory of infir2 over bf16"
            bars.append(Bar(name, peaks["infir2"] / peaks["bf16"], 1.0, "x", "lower", gib))
    fast = min((a for a in _FAST_RECIPES if a in ms), key=lambda a: ms[a], default=None)
    if key == _MEMORY_CASE and fast:
        name = f"{case}: speed of {fast} over the best BF16 arm, {best}"
        bars.append(Bar(name, ms[best] / ms[fast], _FAST_RECIPE_BAR, "x", "higher", why(fast, best)))
    return bars


def step_tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Arms beside each other, and kernels by group where they were looked at."""
    arms = [r for r in rows if r["table"] == "arms"]
    table = Table(title=f"{rows[0]['case']}: medians +- half the distance of the quartiles", box=None, pad_edge=False)
    table.add_column("arm")
    columns = (
        "forward ms",
        "backward ms",
        "optimizer ms",
        "fwd + bwd ms",
        "tokens/s",
        "TFLOP/s",
        "MFU",
        "peak GiB",
        "x BF16",
    )
    timed = [c for c in columns if c != "optimizer ms" or any(r.get("optimizer_ms") for r in arms)]
    for column in timed:
        table.add_column(column, justify="right")
    for row in arms:
        table.add_row(
            row["arm"],
            *([_cells(row)[c] for c in timed] if row["status"] == "ok" else [row["status"].partition(":")[0]]),
        )
    groups = [r for r in rows if r["table"] == "kernels by group"]
    return [table, _kernel_table(groups)] if groups else [table]


def _cells(row: dict[str, Any]) -> dict[str, str]:
    def spread(name: str) -> str:
        value = row[f"{name}_ms"]
        return "-" if value is None else f"{value:.1f} +- {row[f'{name}_iqr_ms'] / 2:.1f}"

    mfu, peak, ratio = row["mfu"], row["peak_memory_bytes"], row["ratio_to_best_bf16"]
    return {
        "forward ms": spread("forward"),
        "backward ms": spread("backward"),
        "optimizer ms": spread("optimizer"),
        "fwd + bwd ms": spread("fwd_bwd"),
        "tokens/s": f"{row['tokens_per_s']:,.0f}",
        "TFLOP/s": f"{row['model_tflops']:.3g}",
        "MFU": "-" if mfu is None else f"{100 * mfu:.1f} %",
        "peak GiB": "-" if peak is None else f"{peak / 2**30:.1f}",
        "x BF16": "-" if ratio is None else f"{ratio:.2f}x",
    }


def _kernel_table(groups: list[dict[str, Any]]) -> Table:
    arms = list(dict.fromkeys(r["arm"] for r in groups))
    table = Table(title="GPU time of a step by kernels, ms", box=None, pad_edge=False)
    table.add_column("kernels")
    for arm in arms:
        table.add_column(arm, justify="right")
    for group in dict.fromkeys(r["group"] for r in groups):
        ms = {r["arm"]: r["ms"] for r in groups if r["group"] == group}
        table.add_row(group, *(f"{ms[arm]:.1f}" if arm in ms else "-" for arm in arms))
    return table


def step_notes(run: StepRun) -> list[str]:
    """What one must know to read the table."""
    peak = peak_of(device_name(run.clock.device))
    notes = [] if run.clock.is_gpu else [CPU_NOTE]
    notes += [f"MFU against {peak.name}"] if peak else []
    best = best_bf16(fwd_bwd_ms(run))
    notes += [f"x BF16 against {best}, the fastest arm without FP8"] if best else []
    for m in run.arms:
        note = m.arm.note if m.arm is not None else m.status
        notes += [f"{m.name}: {note}"] if note else []
    return notes
