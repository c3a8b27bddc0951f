"""Whole pictures of run folders as a crash, a finish or a BF16 run leaves them."""

import io
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fp8ctl.errors import DataError
from fp8ctl.monitor.layer_table import LayerRow, LayerTable
from fp8ctl.monitor.policy import Decision
from fp8ctl.monitor.show import render
from fp8ctl.paths import RunPaths
from fp8ctl.track.record import RunRecord, StepStats, append_jsonl, log_event, write_json, write_status

KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def picture(paths: RunPaths, width: int = 100, **console: Any) -> str:
    out = io.StringIO()
    render(RunRecord(paths.root), Console(file=out, width=width, **console))
    return out.getvalue()


def step_line(step: int, loss: float = 2.0, grad_norm: float = 1.0, **values: Any) -> dict[str, Any]:
    stats = StepStats(
        step=step, loss=loss, grad_norm=grad_norm, lr=1e-4, trainable_tokens=1, tokens=1, tokens_seen=step, **values
    )
    return stats.to_line()


def layer_rows(step: int, precision: str = "fp8", blocks: int = 3) -> list[LayerRow]:
    roles = ("input", "weight", "grad_output")
    names = [f"model.layers.{b}.{kind}" for b in range(blocks) for kind in KINDS]
    return [LayerRow(step, name, role, precision, 1.5, 0.0, 0.0, 31.0) for name in names for role in roles]


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / "cpt-smol-infir2")
    paths.root.mkdir()
    paths.config.write_text("monitor: {policy: observe, layer_stats_every_steps: 10}\nloop: {num_steps: 200}\n")
    return paths


def fill(paths: RunPaths, num_steps: int = 200) -> None:
    write_json(paths.plan, {"summary": "infir2: 20 of 21 linears in FP8, 78.3 % of the linear GEMM FLOPs"})
    for step in range(1, num_steps + 1):
        append_jsonl(
            paths.metrics,
            step_line(step, loss=4 - step / 100, fp8_flops_share=0.783, validation_loss=2.5 if step == 200 else None),
        )
    table = LayerTable(paths.layers, flush_s=0)
    table.append(layer_rows(100))
    bad = LayerRow(200, "model.layers.1.mlp.down_proj", "input", "fp8", 448.0, 0.3, 0.0, 18.5)
    table.append([bad if r[1:3] == bad[1:3] else r for r in layer_rows(200)])


def test_a_finished_run(paths: RunPaths) -> None:
    fill(paths)
    share = {"fprop": 0.8, "dgrad": 0.8, "wgrad": 0.749, "total": 0.783}
    write_json(paths.coverage, {"num_linears": 21, "fp8_linears": 20, "fp8_share": share})
    log_event(paths, "checkpoint", 200, folder="step-00000200")
    write_status(paths, "finished", step=200, exit_code=0)
    text = picture(paths, width=120)
    for line in (
        "run        cpt-smol-infir2",
        "state      finished, step 200 of 200, last step ",
        "precision  plan: infir2: 20 of 21 linears in FP8, 78.3 % of the linear GEMM FLOPs",
        "ran in FP8: 20 of 21 linears, 78.3 % of the GEMM FLOPs (fprop 80.0 %, dgrad 80.0 %, wgrad 74.9 %)",
        "monitor    observe; no step was judged bad",
        "now 2, first 3.99, lowest 2 (step 200), highest 3.99 (step 1)",
        "validation loss 2.5000 at step 200",
        "quantisation by layer, step 200",
        "block  q    k    v    o    gate  up   down",
        "    0  ...  ...  ...  ...  ...   ...  ...",
        "    1  ...  ...  ...  ...  ...   ...  +..",
        "each group of three: input, weight, output gradient",
        "checkpoint: folder step-00000200",
    ):
        assert line in text, line
    assert "model.layers.1.mlp.down_proj input fp8 18.5 30.00 % 448" in " ".join(text.split())
    assert "in BF16" not in text


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_any_width_fits_and_no_cell_is_cut(paths: RunPaths, width: int) -> None:
    fill(paths, num_steps=50)
    text = picture(paths, width)
    assert max(map(len, text.splitlines())) <= width
    heat = text.split("quantisation by")[1].split("each group")[0].partition("\n")[2]
    assert heat.count("...") == 20 and heat.count("+..") == 1 and "\u2026" not in heat


def test_colour_only_on_terminals_and_never_needed(paths: RunPaths) -> None:
    fill(paths, num_steps=20)
    plain, coloured = picture(paths), picture(paths, force_terminal=True, color_system="256", legacy_windows=False)
    assert "\x1b" not in plain and "\x1b[" in coloured


def test_ascii_output(paths: RunPaths) -> None:
    fill(paths, num_steps=20)
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    render(RunRecord(paths.root), Console(file=file, width=80))
    file.seek(0)
    assert "loss ---" in file.read()


def test_a_running_run_whose_process_lives_or_is_gone(paths: RunPaths) -> None:
    fill(paths, num_steps=50)
    write_status(paths, "running", step=0)
    write_json(paths.env, {"hostname": platform.node()})
    gone = "its process is not there any more: it crashed, or was killed"
    text = picture(paths)
    assert "running, step 50 of 200, last step " in text and gone not in text
    assert "ran in FP8: 78.3 % of the linear GEMM FLOPs of the last step" in text

    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    write_json(paths.status, {"state": "running", "pid": process.pid})
    assert gone in picture(paths)
    write_json(paths.env, {"hostname": "another-machine"})
    assert gone not in picture(paths)


def test_a_failed_run_says_why(paths: RunPaths) -> None:
    append_jsonl(paths.metrics, step_line(1))
    append_jsonl(paths.metrics, step_line(2, loss=math.nan, grad_norm=math.inf))
    write_status(paths, "failed", step=2, cause="rank 1: out of memory", hint="smaller micro-batches", exit_code=1)
    text = picture(paths)
    assert "failed, step 2 of 200" in text
    assert "cause: rank 1: out of memory" in text and "hint: smaller micro-batches" in text
    assert "now nan, first 2, lowest 2 (step 1), highest 2 (step 1), not finite 1 times" in text
    assert "no layers.parquet: no statistics were written" in text


def test_a_bf16_run(paths: RunPaths) -> None:
    write_json(paths.plan, {"summary": "bf16: none of 21 linears in FP8"})
    append_jsonl(paths.metrics, step_line(10, fp8_flops_share=0.0))
    table = LayerTable(paths.layers, flush_s=0)
    table.append(layer_rows(10, "bf16"))
    text = picture(paths)
    assert "plan: bf16: none of 21 linears in FP8" in text and "ran in FP8: 0.0 % of" in text
    assert "all run in BF16: the symbols say what FP8 would do" in text
    table.append([r._replace(precision="bf16") if "layers.2" in r.fqn else r for r in layer_rows(20)])
    text = picture(paths)
    assert "    2  ...b  ...b" in text and "    1  ...   ..." in text
    assert "b runs in BF16: the symbols say what FP8 would do" in text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("{}", "no layers.parquet: no statistics were written"),
        ("monitor: {policy: 'off'}", "no layers.parquet: monitor.policy is off"),
        (
            "monitor: {layer_stats_every_steps: 5}",
            "no layers.parquet yet: the first statistics come with the first step",
        ),
        ("][", "monitor    unknown policy"),
    ],
)
def test_what_is_missing_is_said(paths: RunPaths, config: str, expected: str) -> None:
    paths.config.write_text(config)
    paths.status.write_text('{"state": "runn')
    text = picture(paths)
    for words in (
        expected,
        "unknown: no status.json that can be read, step 0",
        "no plan.json",
        "no steps yet: metrics.jsonl is absent or empty",
        "none: events.jsonl is absent or empty",
    ):
        assert words in text


def test_incidents_are_one_line_each(paths: RunPaths) -> None:
    def judged(step: int, rule: str, reason: str) -> None:
        log_event(
            paths,
            "monitor",
            step,
            **Decision(step=step, action="go", verdict="skip", rule=rule, reason=reason).to_event(),
        )

    log_event(paths, "backend", 0, name="reference", reason="no GPU")
    for step in range(101, 131):
        judged(step, "D1", f"loss at {step}")
        if step == 110:
            log_event(paths, "checkpoint", step, folder="step-00000110")
    judged(131, "D0", "loss is nan")
    judged(140, "D0", "loss is nan")
    text = picture(paths, width=160)
    lines = [line.split("  ") for line in text.split("events")[1].splitlines()[2:]]
    assert [
        (line[0].strip() or line[1].strip(), line[-1].strip()) for line in [[w for w in ln if w] for ln in lines]
    ] == [
        ("0", "backend: name reference, reason no GPU"),
        ("101-130", "D1 would skip: loss at 101"),
        ("110", "checkpoint: folder step-00000110"),
        ("131", "D0 would skip: loss is nan"),
        ("140", "D0 would skip: loss is nan"),
    ]
    assert (
        "observe; 32 steps were judged bad: 2 x D0 (loss or gradient norm is not finite), "
        "30 x D1 (loss far above its recent course)" in text
    )


def test_only_the_last_events_are_listed(paths: RunPaths) -> None:
    for step in range(1, 21):
        log_event(paths, "checkpoint", step, folder=f"step-{step:08d}")
    text = picture(paths)
    assert "events, the last 12 of 20" in text and "step-00000009" in text and "step-00000008" not in text


def test_text_from_files_is_only_text(paths: RunPaths) -> None:
    log_event(paths, "failed", 3, cause="[red]\x1b[2Jbad[/red]\nnext")
    write_status(paths, "failed", step=3, cause="\x1b]0;title\x07[bold]x[/bold]")
    text = picture(paths)
    assert "\x1b" not in text and "\x07" not in text
    assert "cause [red] [2Jbad[/red] next" in text and "[bold]x[/bold]" in text


def test_damage_in_the_middle_is_the_users_error(paths: RunPaths) -> None:
    paths.metrics.write_text('{"step": 1}\nxx\n{"step": 2}\n')
    with pytest.raises(DataError, match="metrics.jsonl line 2 is not JSON"):
        picture(paths)


def test_torch_is_not_needed(paths: RunPaths) -> None:
    fill(paths, num_steps=20)
    code = (
        "import sys; from rich.console import Console; from fp8ctl.monitor.show import render;"
        "from fp8ctl.track.record import RunRecord; render(RunRecord(sys.argv[1]), Console());"
        "assert not {'torch', 'mlflow', 'deepspeed'} & set(sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(paths.root)], check=True, env=env, stdout=subprocess.DEVNULL)


def test_a_long_run_is_drawn_at_once(paths: RunPaths) -> None:
    with open(paths.metrics, "w") as f:
        for step in range(1, 20_001):
            f.write(f'{{"step": {step}, "loss": 2.5, "grad_norm": 1.0, "time": 1.0}}\n')
    started = time.monotonic()
    assert "step 20,000 of 200" in picture(paths)
    assert time.monotonic() - started < 10.0
