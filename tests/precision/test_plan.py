from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from fp8ctl.config.schema import ModelShape, PrecisionConfig, PrecisionRule, RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.model.shapes import linear_shapes
from fp8ctl.model.transformer import Transformer
from fp8ctl.precision.plan import PrecisionPlan, make_plan, plan_linears

SHAPE = ModelShape(
    family="qwen2", num_layers=4, hidden_size=64, ffn_size=96, num_heads=4, num_kv_heads=2, head_size=16,
    vocab_size=120, max_positions=64,
)  # fmt: skip
BLOCK = 64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 96
HEAD = 120 * 64


def rule(match: str, precision: str = "bf16", reason: str = "a reason") -> PrecisionRule:
    return PrecisionRule(match=match, precision=precision, reason=reason)  # type: ignore[arg-type]


def plan(tied: bool = False, **settings: object) -> PrecisionPlan:
    shape = SHAPE.model_copy(update={"tie_embeddings": tied})
    with torch.device("meta"):
        return make_plan(Transformer(shape), PrecisionConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [True, False])
def test_a_plan_lists_every_linear_with_its_size_and_the_head_last(tied: bool) -> None:
    made = plan(tied, default="fp8")
    assert {p.fqn: (p.out_features, p.in_features) for p in made.linears} == linear_shapes(SHAPE)
    assert [p.fqn for p in made.linears][-1] == "lm_head"
    assert {p.precision for p in made.linears[:-1]} == {"fp8"}
    assert made.linears[0].reason == "precision.default=fp8"
    head = made.linears[-1]
    assert (head.precision, head.reason) == ("bf16", "tied to the embedding" if tied else "precision.head=bf16")


def test_flops_share_follows_from_the_sizes() -> None:
    assert plan(default="fp8").fp8_flops_share == pytest.approx(4 * BLOCK / (4 * BLOCK + HEAD))
    assert plan(default="fp8", head="fp8").fp8_flops_share == 1.0
    half = plan(default="fp8", recipe=RecipeConfig(wgrad="bf16"))
    assert half.fp8_flops_share == pytest.approx(2 / 3 * 4 * BLOCK / (4 * BLOCK + HEAD))
    assert plan().fp8_flops_share == 0


def test_the_last_matching_rule_decides() -> None:
    made = plan(
        default="fp8",
        rules=(
            rule("model.layers.0.*", reason="first block"),
            rule("*.down_proj", "fp8", "fine anyway"),
            rule("lm_head", "fp8", "try"),
        ),
    )
    by_name = {p.fqn: p for p in made.linears}
    assert (by_name["model.layers.0.mlp.up_proj"].precision, by_name["model.layers.0.mlp.up_proj"].reason) == (
        "bf16",
        "first block",
    )
    assert (by_name["model.layers.0.mlp.down_proj"].precision, by_name["model.layers.0.mlp.down_proj"].reason) == (
        "fp8",
        "fine anyway",
    )
    assert by_name["lm_head"].precision == "fp8"
    assert by_name["model.layers.1.mlp.up_proj"].reason == "precision.default=fp8"


def test_globs_match_whole_names_and_case() -> None:
    with pytest.raises(PrecisionError, match="matches no linear"):
        plan(rules=(rule("down_proj"),))
    with pytest.raises(PrecisionError, match="matches no linear"):
        plan(rules=(rule("*.DOWN_PROJ"),))


def test_all_problems_come_in_one_error_with_the_nearest_names() -> None:
    with pytest.raises(PrecisionError) as e:
        plan(True, head="fp8", rules=(rule("*.down_porj"), rule("model.layer.3.*"), rule("lm_head", "fp8")))
    assert e.value.message == (
        "rule '*.down_porj' matches no linear (did you mean '*.down_proj'?); "
        "rule 'model.layer.3.*' matches no linear (did you mean 'model.layers.3.*'?); "
        "rule 'lm_head' asks for FP8 in the head, which is tied to the embedding; "
        "precision.head=fp8 asks for FP8 in the head, which is tied to the embedding"
    )
    assert e.value.hint == "change precision.rules or precision.head; a tied head is always BF16"


def test_a_rule_for_everything_leaves_a_tied_head_in_bf16() -> None:
    made = plan(True, rules=(rule("*", "fp8", "all"),))
    assert made.linears[-1].precision == "bf16" and len(made.fp8_linears) == 28


def test_required_fp8_needs_a_plan_that_has_some() -> None:
    with pytest.raises(PrecisionError, match="FP8 is required, but the plan runs nothing in FP8") as e:
        plan(require_fp8=True)
    assert e.value.hint == "choose precision=infir2 or precision.require_fp8=false"
    assert plan(require_fp8=True, default="fp8").fp8_linears


def test_json_round_trip_and_refusal_of_anything_else() -> None:
    made = plan(default="fp8", rules=(rule("*.o_proj"),), recipe=RecipeConfig(scale="fp32"))
    content = json.loads(json.dumps(made.to_json()))
    assert PrecisionPlan.from_json(content) == made
    assert content["summary"] == made.summary() and content["linears"][3]["reason"] == "a reason"
    for bad in ({}, {**content, "schema": 2}, {**content, "linears": [{"fqn": "x"}]}):
        with pytest.raises(PrecisionError, match="not a precision plan"):
            PrecisionPlan.from_json(bad)
    content["linears"][0]["precision"] = "int4"
    with pytest.raises(PrecisionError, match=r"not a precision plan: precision of model.layers.0.self_attn.q_proj"):
        PrecisionPlan.from_json(content)


def test_summary_and_table_say_it_in_words() -> None:
    made = plan(
        default="fp8",
        rules=(rule("model.layers.1.mlp.*", reason="spiky"), rule("model.layers.3.mlp.*", reason="spiky")),
    )
    share = 100 * made.fp8_flops_share
    assert made.summary() == f"infir2: 22 of 29 linears in FP8, {share:.1f} % of the linear GEMM FLOPs"
    assert plan().summary() == "bf16: none of 29 linears in FP8"
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(made.table())
    text = console.export_text()
    lines = {line.split()[1]: line for line in text.splitlines() if "_proj" in line or "lm_head" in line}
    assert "4" in lines["model.layers.0-3.self_attn.q_proj"] and "64 x 64" in lines["model.layers.0-3.self_attn.q_proj"]
    assert "BF16" in lines["model.layers.1,3.mlp.down_proj"] and "spiky" in lines["model.layers.1,3.mlp.down_proj"]
    assert "FP8" in lines["model.layers.0,2.mlp.down_proj"]
    assert len(lines) == 4 + 3 * 2 + 1


def test_plans_need_only_names_and_sizes() -> None:
    made = plan_linears({"a": (8, 4), "lm_head": (16, 4)}, PrecisionConfig(default="fp8"), tied_head="lm_head")
    assert [p.precision for p in made.linears] == ["fp8", "bf16"]
