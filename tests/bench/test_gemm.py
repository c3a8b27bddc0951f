"""Linears one by one, through the calls of training."""

from __future__ import annotations

import pytest
import torch
from bench_cases import MODEL, SHAPE, silent

from fp8ctl.bench.gemm import linear_groups, measure_gemms
from fp8ctl.bench.gemm_show import gemm_bars, gemm_notes, gemm_tables
from fp8ctl.config.bench_schema import BenchGemmConfig
from fp8ctl.config.compose import compose
from fp8ctl.errors import ConfigError, PrecisionError
from fp8ctl.model.shapes import linear_shapes


def gemm_config(**changes: object) -> BenchGemmConfig:
    defaults = {"model": MODEL, "num_tokens": 48, "rounds": 1, "device": "cpu", "precisions": ("infir2", "row")}
    return BenchGemmConfig.model_validate({**defaults, **changes})


@pytest.fixture(scope="module")
def result() -> dict:
    return measure_gemms(gemm_config(), silent)


def test_groups_are_what_training_runs_and_then_each_shape_alone() -> None:
    groups = linear_groups(SHAPE)
    assert [(g.name, g.heights, g.in_features, g.calls_per_block) for g in groups] == [
        ("q_proj + k_proj + v_proj", (64, 32, 32), 64, 1),
        ("o_proj", (64,), 64, 1),
        ("gate_proj + up_proj", (160, 160), 64, 1),
        ("down_proj", (64,), 160, 1),
        ("lm_head", (199,), 64, 0),
        ("k_proj, v_proj", (32,), 64, 0),
        ("gate_proj, up_proj", (160,), 64, 0),
    ]


@pytest.mark.parametrize("name", ["qwen2_5_7b", "qwen2_5_1_5b", "llama3_1_8b", "smollm2_135m"])
def test_groups_of_a_block_hold_all_its_linears(name: str) -> None:
    shape = compose("bench_gemm", [f"model={name}"]).model.shape
    weights = sum(sum(g.heights) * g.in_features * g.calls_per_block for g in linear_groups(shape))
    linears = {fqn: n * k for fqn, (n, k) in linear_shapes(shape).items() if fqn != "lm_head"}
    assert weights * shape.num_layers == sum(linears.values())
    measured = {(g.heights, g.in_features) for g in linear_groups(shape)}
    assert len(measured) == len(linear_groups(shape)), "nothing is measured twice"


def test_every_linear_in_every_direction(result: dict) -> None:
    rows = [r for r in result["rows"] if r["table"] == "linears"]
    assert len(rows) == 7 * 2 * 4
    for row in rows:
        assert row["bf16_ms"] > 0 and row["gemm_ms"] > 0
        assert row["ratio"] == pytest.approx(row["bf16_ms"] / (row["gemm_ms"] + row["quantize_ms"]))
        assert row["pays"] == (row["ratio"] > 1)
        assert (row["quantize_ms"] == 0) == (row["direction"] == "wgrad")
        directions = 3 if row["direction"] == "all" else 1
        flops = 2 * 48 * row["n"] * row["k"] * directions
        assert row["gemm_tflops"] * row["gemm_ms"] == pytest.approx(flops / 1e9)
    first = {r["direction"]: r for r in rows if r["linear"] == "o_proj" and r["precision"] == "infir2"}
    for key in ("bf16_ms", "gemm_ms", "quantize_ms"):
        assert first["all"][key] == pytest.approx(sum(first[d][key] for d in ("fprop", "dgrad", "wgrad")))


def test_a_block_is_the_sum_of_its_calls(result: dict) -> None:
    calls = ("q_proj + k_proj + v_proj", "o_proj", "gate_proj + up_proj", "down_proj")
    for precision in ("infir2", "row"):
        (block,) = [r for r in result["rows"] if r["table"].startswith("one block") and r["precision"] == precision]
        of = [
            r
            for r in result["rows"]
            if (r.get("linear") in calls, r.get("direction"), r["precision"]) == (True, "all", precision)
        ]
        assert len(of) == 4
        assert block["bf16_ms"] == pytest.approx(sum(r["bf16_ms"] for r in of))
        assert block["quantize_ms"] == pytest.approx(sum(r["quantize_ms"] for r in of))
        assert block["backend"] == "reference"


def test_quantisers_beside_a_copy(result: dict) -> None:
    rows = [r for r in result["rows"] if r["table"].startswith("quantisers")]
    assert {r["k"] for r in rows} == {64, 128, 160, 320}
    for row in rows:
        assert row["share_of_copy"] == pytest.approx(row["tb_s"] / result["copy_tb_s"])
        # BF16 in; on a CPU the emulation writes BF16 or FP32 values twice
        moved = row["tb_s"] * row["ms"] * 1e9 / (row["m"] * row["k"])
        assert moved in (pytest.approx(2 + 2 * 2), pytest.approx(2 + 2 * 4))


def test_a_cpu_claims_nothing(result: dict) -> None:
    assert gemm_bars(result, "mini 48", "") == []
    assert gemm_notes(result)[0].endswith("say nothing about the speed of FP8 on a GPU.")
    assert [table.row_count for table in gemm_tables(result)] == [7 * 2, 2, 4 * 2]


def test_the_quantisers_bar_is_that_of_the_largest_activation() -> None:
    def row(k: int, share: float, precision: str = "infir2") -> dict:
        return {
            "table": "quantisers, both directions", "precision": precision, "m": 8192, "k": k,
            "tb_s": share * 4, "copy_tb_s": 4.0, "share_of_copy": share,
        }  # fmt: skip

    rows = [row(3584, 0.9), row(37888, 0.75), row(37888, 0.95, "row")]
    (bar,) = gemm_bars({"rows": rows, "is_gpu": True}, "7b", "")
    assert bar.name == "7b: two-direction quantiser, 8192 x 37888, of the bandwidth of a copy"
    assert (bar.value, bar.holds, bar.reason) == (75.0, False, "3.00 TB/s, a copy moves 4.00")


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"precisions": ("bf16",)}, ConfigError, "precisions: bf16 is BF16, which is measured anyway"),
        ({"precisions": ("infer2",)}, ConfigError, "precision: no choice named 'infer2'"),
        ({"model": {"name": "hf"}}, ConfigError, "model.shape: no shape"),
        ({"precisions": ("te_mxfp8",)}, PrecisionError, "the mxfp8 recipe exists on transformer-engine only"),
    ],
)
def test_mistakes(changes: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        measure_gemms(gemm_config(**changes), silent)
    assert str(caught.value).startswith(message)


def test_training_makes_the_same_calls() -> None:
    """The three GEMMs of a measured call are those of a real forward and backward pass, to the bit."""
    from fp8ctl.bench.gemm import LinearGroup, Measured, _call, _steps
    from fp8ctl.config.schema import RecipeConfig
    from fp8ctl.fp8.backend import Backend
    from fp8ctl.fp8.linear import Fp8Linear

    torch.manual_seed(0)
    recipe = RecipeConfig()
    group, measured = LinearGroup("g", (32, 48), 64, 1), Measured("infir2", recipe, Backend("reference", ""))
    x, dys = torch.randn(20, 64).bfloat16(), [torch.randn(20, n).bfloat16() for n in group.heights]
    layers = [Fp8Linear(64, n, bias=False, recipe=recipe, dtype=torch.bfloat16) for n in group.heights]
    x.requires_grad_()
    ys = layers[0].forward_together(x, layers)
    torch.autograd.backward(ys, dys)
    with torch.no_grad():
        steps = _steps(_call(group, measured, x.device), x, [layer.weight for layer in layers], dys)
        assert all(torch.equal(a, b) for a, b in zip(steps["fprop"](), ys, strict=True))
        assert torch.equal(steps["dgrad"](), x.grad)
        assert all(torch.equal(dw, layer.weight.grad) for dw, layer in zip(steps["wgrad"](), layers, strict=True))
