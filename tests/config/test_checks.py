from __future__ import annotations

import pytest

from fp8ctl.config.checks import check_data_prep, check_precision, check_train
from fp8ctl.config.compose import compose
from fp8ctl.config.schema import PrecisionConfig
from fp8ctl.errors import ConfigError

GOOD = ["model=tiny", "data.path=/data"]


def test_a_sound_run_passes() -> None:
    check_train(compose("train_cpt", GOOD))
    check_train(
        compose(
            "train_cpt",
            [
                *GOOD,
                "launch.num_ranks=2",
                "batch.global_batch_rows=4",
                "precision=infir2",
                "precision.require_fp8=true",
            ],
        )
    )


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        (["batch.global_batch_rows=3", "batch.micro_batch_rows=2"], "ranks = 2 x 1 = 2", "global_batch_rows=2 or 4"),
        (["batch.global_batch_rows=1", "launch.num_ranks=2"], "1 is no multiple", "set batch.global_batch_rows=2"),
        (["schedule.warmup_steps=90", "schedule.decay_steps=20", "loop.num_steps=100"], "warm-up 90 + decay 20 steps are more", "shorten"),
        (["schedule=cosine", "schedule.decay_steps=5"], "only the wsd schedule has a decay", "decay_steps=0"),
        (["precision.require_fp8=true"], "FP8 is required but the plan holds none", "precision=infir2"),
        (["optim.min_lr=1"], "1.0 is above optim.peak_lr = 0.0001", "optim.min_lr"),
        (["model.shape.num_kv_heads=3"], "3 does not divide num_heads = 4", None),
        (["model.shape.head_size=33"], "33 is odd", None),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(overrides, message, hint) -> None:
    with pytest.raises(ConfigError) as e:
        check_train(compose("train_cpt", GOOD + overrides))
    assert message in e.value.message
    assert (hint or "") in (e.value.hint or "")


def test_all_problems_come_together() -> None:
    with pytest.raises(ConfigError) as e:
        check_train(compose("train_cpt", ["batch.global_batch_rows=3", "batch.micro_batch_rows=2"]))
    assert "3 problems" in e.value.message
    for field in ("model.path", "data.path", "batch.global_batch_rows"):
        assert field in e.value.message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["source=python_stdlib", "tokenizer=t"], "out: no folder to write to"),
        (["source=python_stdlib", "out=o"], "tokenizer: no tokenizer"),
        (["out=o", "tokenizer=t"], "sources: no sources"),
        (["out=o", "tokenizer=t", "source=cpt_local"], "a jsonl source needs files"),
        (["out=o", "tokenizer=t", "source=reasoning_gym", "kind=cpt"], "reasoning_gym generates conversations"),
        (["out=o", "tokenizer=t", "source=python_stdlib", "kind=sft"], "python_stdlib gives documents"),
    ],
)
def test_data_prep_problems(overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_data_prep(compose("data_prep", overrides))


def test_data_prep_passes() -> None:
    check_data_prep(compose("data_prep", ["out=o", "tokenizer=t", "source=python_stdlib"]))


def test_recipes_that_exist_on_one_backend_only() -> None:
    def problems(**precision: object) -> str:
        return " ".join(str(p) for p in check_precision(PrecisionConfig.model_validate(precision)))

    assert "tensor_delayed exists on transformer-engine only" in problems(recipe={"granularity": "tensor_delayed"})
    assert "tensor_delayed has fp32 scales" in problems(backend="te", recipe={"granularity": "tensor_delayed"})
    assert "mxfp8 has pow2 scales" in problems(backend="te", recipe={"granularity": "mxfp8", "scale": "fp32"})
    delayed = {"granularity": "tensor_delayed", "scale": "fp32"}
    assert "recomputes its chunks" in problems(backend="te", recipe=delayed, head="fp8")
    assert "transformer-engine has no granularity row" in problems(backend="te", recipe={"granularity": "row"})
    assert "transformer-engine has no wgrad bf16" in problems(backend="te", recipe={"wgrad": "bf16"})
    assert "x_block is a switch of granularity block" in problems(recipe={"granularity": "tensor", "wgrad": "x_block"})
    assert problems() == problems(backend="te", recipe={"granularity": "mxfp8"}) == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=zero3", "engine.compile=blocks"], "blocks can't be compiled whole at zero_stage 3"),
        (["engine=zero3", "precision=infir2", "precision.backend=te"], "which undoes what zero_stage 3 saves"),
        (["precision=te_delayed", "engine.activation_checkpointing=true"], "would recompute with other scales"),
    ],
)
def test_what_an_engine_does_not_do(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_train(compose("train_cpt", [*GOOD, *overrides]))
