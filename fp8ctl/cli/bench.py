"""fp8ctl bench ..."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fp8ctl.cli.console import say, stdout
from fp8ctl.cli.options import AsJson, Overrides

app = typer.Typer(help="Measure side by side: GEMMs, whole steps, preparation of data.", no_args_is_help=True)
Benchmark = Annotated[
    str | None,
    typer.Option(
        "--benchmark", help="Also store the figures as docs/benchmarks/NAME.json and .md.", show_default=False
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="Stored with a bar that does not hold: why.", show_default=False)]


@app.command("gemm")
def gemm(
    overrides: Overrides = None, as_json: AsJson = False, benchmark: Benchmark = None, reason: Reason = ""
) -> None:
    """Each linear shape of a model, BF16 against FP8 recipes: fp8ctl bench gemm model=qwen2_5_7b num_tokens=8192."""
    from fp8ctl.cli.progress import progress
    from fp8ctl.config.compose import compose

    config = compose("bench_gemm", overrides or [])
    _check(benchmark)
    from fp8ctl.bench.gemm import measure_gemms
    from fp8ctl.bench.gemm_show import gemm_bars, gemm_notes, gemm_tables
    from fp8ctl.bench.hardware import choose_device, environment

    with progress("bench gemm") as report:
        result = measure_gemms(config, report)
    case = f"{config.model.name} {config.num_tokens}"
    rows = [{"case": case, **row} for row in result["rows"]]
    _show(
        rows,
        gemm_bars(result, case, reason),
        environment(choose_device(config.device)),
        as_json=as_json,
        benchmark=benchmark,
        case=case,
        tables=gemm_tables(result),
        notes=gemm_notes(result),
    )


@app.command("step")
def step(
    overrides: Overrides = None, as_json: AsJson = False, benchmark: Benchmark = None, reason: Reason = ""
) -> None:
    """Forward and backward of a whole model, arms in turn: fp8ctl bench step model=qwen2_5_7b 'arms=\\[bf16,infir2,te-block]'.

    Arms are choices of precision, the peers hf, te-bf16, te-block, te-current, te-delayed, torchao-tensorwise, torchao-rowwise, amp and
    deepspeed-bf16, or one's own, "NAME: OVERRIDES".
    """
    from fp8ctl.cli.progress import progress
    from fp8ctl.config.compose import compose

    config = compose("bench_step", overrides or [])
    _check(benchmark)
    from fp8ctl.bench.hardware import environment
    from fp8ctl.bench.step import measure_steps
    from fp8ctl.bench.step_show import case_of, step_bars, step_notes, step_rows, step_tables

    with progress("bench step") as report:
        run = measure_steps(config, report)
    rows = step_rows(run)
    _show(
        rows,
        step_bars(run, reason),
        environment(run.clock.device),
        as_json=as_json,
        benchmark=benchmark,
        case=case_of(config),
        tables=step_tables(rows),
        notes=step_notes(run),
    )


@app.command("data")
def data(
    overrides: Overrides = None, as_json: AsJson = False, benchmark: Benchmark = None, reason: Reason = ""
) -> None:
    """Preparation of text, beside the tokenizer alone, datatrove and Megatron's way: fp8ctl bench data tokenizer=FOLDER.

    Tokens per second and core, peak memory, and packing of fine-tuning samples.
    """
    from fp8ctl.cli.progress import progress
    from fp8ctl.config.compose import compose
    from fp8ctl.errors import ConfigError

    config = compose("bench_data", overrides or [])
    _check(benchmark)
    if config.tokenizer is None:
        raise ConfigError("tokenizer: no tokenizer", "set tokenizer=FOLDER, a Hugging Face model folder")
    from fp8ctl.bench.data import measure_data
    from fp8ctl.bench.data_show import data_bars, data_tables
    from fp8ctl.track.environment import collect_environment

    with progress("bench data") as report:
        rows = measure_data(config, report)["rows"]
    _show(
        rows,
        data_bars(rows, reason),
        collect_environment(),
        as_json=as_json,
        benchmark=benchmark,
        case="",
        tables=data_tables(rows),
        notes=[],
    )


def _check(benchmark: str | None) -> None:
    from fp8ctl.track.benchmark import check_name

    if benchmark is not None:
        check_name(benchmark)


def _show(
    rows: list[dict[str, Any]],
    bars: list[Any],
    environment: dict[str, Any],
    *,
    as_json: bool,
    benchmark: str | None,
    case: str,
    tables: list[Any],
    notes: list[str],
) -> None:
    import json
    import shlex

    from rich.text import Text

    from fp8ctl.track.benchmark import make_benchmark, number, store_benchmark

    record = make_benchmark(rows, bars, shlex.join(["fp8ctl", *environment["command"][1:]]), environment)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        out = stdout()
        for table in tables:
            out.print(table)
            out.print()
        for bar in record["bars"]:
            sign = ">=" if bar["better"] == "higher" else "<="
            verdict = "holds" if bar["holds"] else f"does not hold: {bar['reason']}"
            line = (
                f"{bar['name']}: {number(bar['value'])} {bar['unit']} (bar: {sign} {number(bar['target'])}), {verdict}"
            )
            out.print(Text(line), soft_wrap=True)
    for note in notes:
        say(note)
    if benchmark:
        say(f"benchmark written: {store_benchmark(benchmark, record, case=case)}")
