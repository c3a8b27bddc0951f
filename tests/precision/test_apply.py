from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8ctl.config.constants import IGNORE_INDEX
from fp8ctl.config.schema import ModelShape, PrecisionConfig, PrecisionRule, RecipeConfig
from fp8ctl.errors import PrecisionError
from fp8ctl.fp8.linear import Fp8Linear
from fp8ctl.model.transformer import Transformer
from fp8ctl.precision.apply import apply_plan, fp8_linears, left_to_bf16, set_precision
from fp8ctl.precision.coverage import coverage
from fp8ctl.precision.plan import make_plan, plan_linears

SHAPE = ModelShape(
    family="qwen2", num_layers=2, hidden_size=64, ffn_size=96, num_heads=4, num_kv_heads=2, head_size=16,
    vocab_size=120, max_positions=64,
)  # fmt: skip
T = 24


def build(tied: bool = False, **settings: object) -> Transformer:
    torch.manual_seed(0)
    return Transformer(SHAPE.model_copy(update={"tie_embeddings": tied})).bfloat16()


def planned(model: nn.Module, **settings: object) -> nn.Module:
    config = PrecisionConfig(**settings)  # type: ignore[arg-type]
    apply_plan(model, make_plan(model, config), config)
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(T) % 120
    labels = (ids + 1).masked_fill(ids % 5 == 0, IGNORE_INDEX)
    return model(ids, torch.arange(T), torch.tensor([0, T], dtype=torch.int32), T, labels_T=labels)


@pytest.mark.parametrize("tied", [True, False])
def test_swapping_keeps_parameters_names_and_the_state_dict(tied: bool) -> None:
    model = build(tied)
    before = dict(model.named_parameters())
    state = list(model.state_dict())
    planned(model, default="fp8")
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(before[n] is after[n] for n in before)
    assert list(model.state_dict()) == state
    assert len(fp8_linears(model)) == 14 + (not tied)
    assert not any(type(m) is nn.Linear for m in model.modules())


@pytest.mark.parametrize("tied", [True, False])
def test_a_bf16_plan_computes_the_very_same_bits(tied: bool) -> None:
    plain, counted = build(tied), planned(build(tied))
    a, b = loss_of(plain), loss_of(counted)
    assert torch.equal(a, b)
    a.backward()
    b.backward()
    # the same but for the order in which gradients of a shared input are summed
    for p, q in zip(plain.parameters(), counted.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 0.01 * p.grad.norm()


def test_an_fp8_plan_changes_the_result_a_little() -> None:
    exact, rounded = loss_of(build()).item(), loss_of(planned(build(), default="fp8")).item()
    assert exact != rounded and rounded == pytest.approx(exact, rel=0.01)


def test_a_second_call_sets_precisions_and_recipe_without_swapping() -> None:
    model = planned(build(), default="fp8")
    layers = fp8_linears(model)
    planned(model, default="bf16", recipe=RecipeConfig(scale="fp32"))
    assert all(fp8_linears(model)[fqn] is layer for fqn, layer in layers.items())
    assert {layer.precision for layer in layers.values()} == {"bf16"}
    assert {layer.recipe.scale for layer in layers.values()} == {"fp32"}


def test_a_module_that_hangs_in_two_places_is_swapped_in_both() -> None:
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    config = PrecisionConfig(default="fp8")
    apply_plan(model, make_plan(model, config), config)
    assert isinstance(model["a"], Fp8Linear) and model["b"][0] is model["a"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_tied_head_is_counted_like_the_untied_one(checkpointing: bool, chunked: bool) -> None:
    """Tied or not, with the loss in one piece or in chunks: the head executes the same FLOPs, each once."""
    counted = []
    for tied in (True, False):
        model = planned(build(tied), default="fp8")
        model.activation_checkpointing = checkpointing
        model.loss_chunk_tokens = 8 if chunked else T
        loss_of(model).backward()
        counted.append(coverage(model).linears)
    assert counted[0] == counted[1]
    head = 2 * T * 120 * 64
    assert counted[0]["lm_head"] == {
        "fprop": {"fp8": 0, "bf16": head},
        "dgrad": {"fp8": 0, "bf16": head},
        "wgrad": {"fp8": 0, "bf16": head},
    }
    up = 2 * T * 96 * 64
    assert counted[0]["model.layers.1.mlp.up_proj"]["fprop"] == {"fp8": up * (2 if checkpointing else 1), "bf16": 0}


def test_the_tied_head_counts_only_what_runs() -> None:
    model = planned(build(True))
    with torch.no_grad():
        model.logits(torch.zeros(3, 64, dtype=torch.bfloat16))
    head = coverage(model).linears["lm_head"]
    assert [head[d]["bf16"] for d in ("fprop", "dgrad", "wgrad")] == [2 * 3 * 120 * 64, 0, 0]  # type: ignore[index]
    model.head_weight.requires_grad_(False)
    model.logits(torch.zeros(3, 64, dtype=torch.bfloat16).requires_grad_()).sum().backward()
    head = coverage(model).linears["lm_head"]
    assert [head[d]["bf16"] for d in ("dgrad", "wgrad")] == [2 * 3 * 120 * 64, 0]  # type: ignore[index]


def test_an_untied_head_may_run_in_fp8() -> None:
    model = planned(build(), head="fp8")
    loss_of(model).backward()
    done = coverage(model)
    assert done.fp8_linears == 1 and done.linears["lm_head"]["wgrad"]["fp8"] == 2 * T * 120 * 64


def test_set_precision() -> None:
    model = planned(build(), default="fp8")
    set_precision(model, "model.layers.0.mlp.up_proj", "bf16")
    assert fp8_linears(model)["model.layers.0.mlp.up_proj"].precision == "bf16"
    with pytest.raises(PrecisionError) as e:
        set_precision(model, "model.layers.0.mlp.uq_proj", "bf16")
    assert e.value.message == "no linear 'model.layers.0.mlp.uq_proj' (did you mean 'model.layers.0.mlp.up_proj'?)"
    with pytest.raises(PrecisionError, match="no precision 'int8'"):
        set_precision(model, "lm_head", "int8")  # type: ignore[arg-type]


def test_frozen_weights_for_inference() -> None:
    config = PrecisionConfig(default="fp8")
    model = build()
    apply_plan(model, make_plan(model, config), config, weights_are_frozen=True)
    with torch.no_grad():
        assert torch.equal(loss_of(model), loss_of(model))
        assert torch.equal(loss_of(model), loss_of(planned(build(), default="fp8")))
    layer = fp8_linears(model)["model.layers.0.mlp.up_proj"]
    assert layer.quantized_weight() is layer.quantized_weight()


def test_a_plan_of_another_model_or_recipe_is_refused() -> None:
    config = PrecisionConfig()
    other = plan_linears({"model.layers.0.mlp.up_proj": (96, 64)}, config)
    with pytest.raises(
        PrecisionError,
        match="does not fit the model: 14 linears differ, the first is 'model.layers.0.self_attn.q_proj'",
    ):
        apply_plan(build(), other, config)
    model = build()
    with pytest.raises(PrecisionError, match="the plan's recipe 'infir2' is not that of the settings, 'mine'"):
        apply_plan(model, make_plan(model, config), PrecisionConfig(recipe=RecipeConfig(name="mine")))


def test_linears_that_transformer_engine_can_not_quantise_are_told() -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(36, 64), "c": nn.Linear(36, 64)})
    config = PrecisionConfig(default="fp8", rules=(PrecisionRule(match="c", precision="bf16", reason="test"),))
    apply_plan(model, make_plan(model, config), config)
    assert left_to_bf16(model) == {}
    for layer in fp8_linears(model).values():
        layer.backend = "te"
    assert left_to_bf16(model) == {"b": "transformer-engine takes multiples of 16, in_features is 36"}
