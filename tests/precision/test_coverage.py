from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from fp8ctl.config.schema import PrecisionConfig, PrecisionRule, RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.precision.apply import apply_plan, set_precision
from fp8ctl.precision.coverage import (
    check_required,
    coverage,
    flops_by_precision,
    load_counters,
    reset_counters,
    save_counters,
)
from fp8ctl.precision.plan import PrecisionPlan, make_plan

SIZE, ROWS = 64, 10
GEMM = 2 * ROWS * SIZE * SIZE


def build(**settings: object) -> tuple[nn.Sequential, PrecisionPlan]:
    """Three linears of equal size; the third is named like a head and stays BF16."""
    model = nn.Sequential()
    for name in ("a", "b", "lm_head"):
        model.add_module(name, nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16))
    config = PrecisionConfig(**{"default": "fp8", **settings})  # type: ignore[arg-type]
    plan = make_plan(model, config)
    apply_plan(model, plan, config)
    return model, plan


def step(model: nn.Module) -> None:
    model(torch.randn(ROWS, SIZE, dtype=torch.bfloat16).requires_grad_()).sum().backward()


def test_counts_and_shares_of_a_clean_run() -> None:
    model, plan = build()
    step(model)
    done = coverage(model)
    assert (done.num_linears, done.fp8_linears, done.mixed_linears) == (3, 2, 0)
    assert done.flops("fp8") == 6 * GEMM and done.flops("bf16") == 3 * GEMM
    assert done.fp8_share() == done.fp8_share("fprop") == done.fp8_share("wgrad") == pytest.approx(2 / 3)
    assert done.fp8_share() == pytest.approx(plan.fp8_flops_share)
    assert flops_by_precision(model) == {"fp8": 6.0 * GEMM, "bf16": 3.0 * GEMM}
    check_required(plan, done)


def test_nothing_ran() -> None:
    model, plan = build()
    assert coverage(model).fp8_share() is None
    with pytest.raises(PrecisionError, match=r"less ran in FP8 than planned: no GEMM ran \(a never ran, b never ran\)"):
        check_required(plan, coverage(model))


def test_inference_has_no_share_in_the_backward_directions() -> None:
    model, plan = build()
    with torch.no_grad():
        model(torch.randn(ROWS, SIZE, dtype=torch.bfloat16))
    done = coverage(model)
    assert done.to_json()["fp8_share"] == {
        "fprop": pytest.approx(2 / 3),
        "dgrad": None,
        "wgrad": None,
        "total": pytest.approx(2 / 3),
    }
    check_required(plan, done)


def test_a_layer_switched_in_mid_run_lowers_coverage_and_fails_the_requirement() -> None:
    model, plan = build()
    step(model)
    set_precision(model, "b", "bf16")
    step(model)
    done = coverage(model)
    assert (done.fp8_linears, done.mixed_linears) == (1, 1)
    assert done.fp8_share() == pytest.approx(3 / 6)
    with pytest.raises(PrecisionError) as e:
        check_required(plan, done)
    assert e.value.message == (
        "less ran in FP8 than planned: 50.0 % of the GEMM FLOPs instead of 66.7 % "
        "(b fprop ran in BF16, b dgrad ran in BF16, b wgrad ran in BF16)"
    )
    assert (
        e.value.hint == "coverage.json has the counts of every linear; set precision.require_fp8=false to accept them"
    )


def test_a_layer_that_never_ran_fails_the_requirement() -> None:
    model, plan = build()
    model.a(torch.randn(ROWS, SIZE, dtype=torch.bfloat16))
    with pytest.raises(PrecisionError, match="b never ran"):
        check_required(plan, coverage(model))


def test_bf16_wgrad_is_what_that_recipe_plans() -> None:
    model, plan = build(recipe=RecipeConfig(wgrad="bf16"))
    step(model)
    done = coverage(model)
    assert done.fp8_share("wgrad") == 0 and done.fp8_share("dgrad") == pytest.approx(2 / 3)
    assert done.fp8_share() == pytest.approx(plan.fp8_flops_share) == pytest.approx(4 / 9)
    check_required(plan, done)


def test_a_plan_with_exceptions_is_held_to_its_own_share() -> None:
    model, plan = build(rules=(PrecisionRule(match="a", precision="bf16", reason="first"),))
    step(model)
    assert coverage(model).fp8_share() == pytest.approx(1 / 3)
    check_required(plan, coverage(model))


def test_json_has_what_reports_read() -> None:
    model, _ = build()
    step(model)
    content = json.loads(json.dumps(coverage(model).to_json()))
    assert content["num_linears"] == 3 and content["fp8_linears"] == 2
    assert content["flops"]["dgrad"] == {"fp8": 2 * GEMM, "bf16": GEMM}
    assert content["linears"]["lm_head"]["fprop"] == {"fp8": 0, "bf16": GEMM}


def test_counters_survive_a_resume_and_can_be_reset() -> None:
    model, _ = build()
    step(model)
    model[0].counter.padding_flops = 4 * GEMM  # type: ignore[union-attr]
    saved = json.loads(json.dumps(save_counters(model)))
    resumed, _ = build()
    load_counters(resumed, saved)
    step(resumed)
    assert coverage(resumed).flops("fp8") == 12 * GEMM
    total = coverage(resumed).flops("fp8") + coverage(resumed).flops("bf16")
    assert (
        coverage(resumed).padding_share == 4 * GEMM / (total + 4 * GEMM) == coverage(resumed).to_json()["padding_share"]
    )
    reset_counters(resumed)
    assert coverage(resumed).flops("fp8") == 0
    del saved["b"]
    with pytest.raises(PrecisionError, match="saved counters are of another model: 'b' is in one of the two"):
        load_counters(resumed, saved)
