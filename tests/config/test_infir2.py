"""The experiments of conf/ hold the numbers that InfiR2's scripts were run with."""

from __future__ import annotations

import math

import pytest

from fp8ctl.config.checks import check_train
from fp8ctl.config.compose import compose
from fp8ctl.config.schema import TrainConfig
from fp8ctl.train.schedule import learning_rate

SIZES = ["1_5b", "7b"]
SHAPES = {  # layers, hidden, FFN, heads, KV groups, tied
    "1_5b": (28, 1536, 8960, 12, 2, True),
    "7b": (28, 3584, 18944, 28, 4, False),
}
PLACES = ["model.path=/m", "data.path=/d"]


def experiment(name: str, stage: str) -> TrainConfig:
    config = compose(f"train_{stage}", [f"experiment={name}", *PLACES])
    check_train(config)
    shape = config.model.shape
    found = (
        shape.num_layers,
        shape.hidden_size,
        shape.ffn_size,
        shape.num_heads,
        shape.num_kv_heads,
        shape.tie_embeddings,
    )
    assert found == SHAPES[name.split("_", 2)[2].removeprefix("decay_")]
    assert (shape.rope_base, shape.rms_norm_eps) == (1_000_000, 1e-6)
    assert (config.precision.default, config.precision.recipe.name, config.precision.head) == ("fp8", "infir2", "bf16")
    assert (config.batch.seq_len_tokens, config.batch.micro_batch_rows, config.seed) == (32_768, 1, 1236)
    assert (config.optim.beta1, config.optim.beta2, config.optim.clip_grad_norm) == (0.9, 0.95, 1.0)
    return config


def rate(config: TrainConfig, step: int) -> float:
    return learning_rate(step, num_steps=config.loop.num_steps, schedule=config.schedule, optim=config.optim)


@pytest.mark.parametrize("size", SIZES)
def test_continual_pre_training(size: str) -> None:
    config = experiment(f"infir2_cpt_{size}", "cpt")
    assert (config.loop.num_steps, config.batch.global_batch_rows) == (40_000, 128)
    assert config.batch.global_batch_rows * config.batch.seq_len_tokens == 4_194_304
    assert (config.optim.peak_lr, config.optim.min_lr, config.optim.weight_decay) == (1e-4, 1e-5, 0.1)
    assert (config.schedule.kind, config.schedule.warmup_steps, config.schedule.decay_steps) == ("wsd", 5000, 5000)
    assert [rate(config, s) for s in (2500, 5000, 35_000, 40_000)] == pytest.approx([5e-5, 1e-4, 1e-4, 1e-5])
    loop = config.loop
    assert (loop.save_every_steps, loop.validate_every_steps, loop.log_every_steps) == (1000, 100, 1)
    assert loop.validation_rows == 10 * config.batch.global_batch_rows
    assert loop.keep_checkpoints * loop.save_every_steps > 40_000 - 35_000
    assert not config.engine.activation_checkpointing


@pytest.mark.parametrize("size", SIZES)
def test_decay_alone(size: str) -> None:
    config = experiment(f"infir2_cpt_decay_{size}", "cpt")
    assert (config.loop.num_steps, config.schedule.warmup_steps, config.schedule.decay_steps) == (5000, 0, 5000)
    whole = experiment(f"infir2_cpt_{size}", "cpt")
    for step in (1, 2500, 5000):  # the same rates as the end of the whole run
        assert rate(config, step) == pytest.approx(rate(whole, 35_000 + step))
    assert (config.optim, config.batch) == (whole.optim, whole.batch)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", [1, 2])
def test_fine_tuning(size: str, stage: int) -> None:
    config = experiment(f"infir2_sft{stage}_{size}", "sft")
    rates = {"1_5b": (5e-5, 5e-6), "7b": (2e-5, 2e-6)}[size]
    assert (config.optim.peak_lr, config.optim.min_lr) == rates
    assert config.optim.weight_decay == 0.0
    assert (config.schedule.kind, config.schedule.warmup_share, config.schedule.warmup_steps) == ("cosine", 0.05, 0)
    assert (config.loop.num_epochs, config.data.packing) == (5, "best_fit")
    assert config.engine.activation_checkpointing
    # 64 samples of 8,192 tokens a step
    assert config.batch.global_batch_rows * config.batch.seq_len_tokens == 64 * 8192


@pytest.mark.parametrize(("samples", "steps"), [(72_000, 5625), (165_000, 12_891)])
def test_steps_that_follow_from_64_samples(samples: int, steps: int) -> None:
    assert math.ceil(5 * samples / 64) == steps
