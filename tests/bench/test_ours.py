"""Arms of this project's model compute one loss and share one set of weights."""

from __future__ import annotations

import pytest
import torch
from bench_cases import SHAPE, step_config

from fp8ctl.bench.arms import Arm, read_arms
from fp8ctl.bench.batch import make_batch
from fp8ctl.bench.ours import Weights, build_amp, build_deepspeed, build_ours
from fp8ctl.model.transformer import Transformer

CPU = torch.device("cpu")
CONFIG = step_config()
BATCH = make_batch(CONFIG, SHAPE.vocab_size, CPU)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Weights(SHAPE, CPU, seed=1)


def arm_of(name: str, weights: Weights, **changes: object) -> Arm:
    (plan,) = read_arms([name])
    assert plan.settings is not None
    return build_ours(plan.settings, step_config(**changes), weights, BATCH)


def test_weights_are_those_of_training() -> None:
    torch.manual_seed(1)
    model = Transformer(SHAPE).to(torch.bfloat16)
    ours = Weights(SHAPE, CPU, seed=1)
    assert ours.parameters.keys() == dict(model.named_parameters()).keys()
    assert ours.num_bytes == sum(p.nbytes for p in model.parameters())
    # drawn in BF16 here and in FP32 there; what counts is the distribution
    for name, p in model.named_parameters():
        assert ours.parameters[name].float().std().item() == pytest.approx(p.float().std().item(), abs=0.004), name


def test_precisions_share_parameters_and_differ_in_loss(weights: Weights) -> None:
    bf16, infir2 = arm_of("bf16", weights), arm_of("infir2", weights)
    for arm in (bf16, infir2):
        assert [id(p) for p in arm.parameters] == [id(p) for p in weights.parameters.values()]
        assert arm.own_bytes == weights.num_bytes
    losses = [arm.loss().item() for arm in (bf16, infir2)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert infir2.facts["backend"] == "reference"
    assert "backend" not in bf16.facts and bf16.facts["attention"] == "any" and "none of" in bf16.note


def test_amp_has_fp32_weights_during_its_turn_only(weights: Weights) -> None:
    arm, bf16 = build_amp(CONFIG, weights, BATCH), arm_of("bf16", weights)
    assert sum(p.numel() for p in arm.parameters) == 0
    for _ in range(2):
        arm.enter()
        assert sum(p.nbytes for p in arm.parameters) == arm.own_bytes
        loss = arm.loss()
        loss.backward()
        assert loss.item() == pytest.approx(bf16.loss().item(), rel=1e-3)
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in arm.parameters)
        for p in arm.parameters:
            p.grad = None
        arm.leave()
        assert sum(p.numel() for p in arm.parameters) == 0


def test_deepspeed_has_weights_of_its_own_during_its_turn_only(weights: Weights) -> None:
    before = {n: p.detach().clone() for n, p in weights.parameters.items()}
    arm, bf16 = build_deepspeed(CONFIG, weights, BATCH), arm_of("bf16", weights)
    assert arm.model is not None
    for _ in range(2):
        assert all(p.untyped_storage().nbytes() == 0 for p in arm.model.parameters())
        arm.enter()
        for _ in range(2):
            loss = arm.loss()
            assert loss.item() == pytest.approx(bf16.loss().item(), rel=1e-4)
            arm.backward(loss)
            arm.finish()
        arm.leave()
    # weights, masters and two moments, all in BF16
    assert arm.own_bytes == 4 * weights.num_bytes
    assert all(torch.equal(before[n], p) for n, p in weights.parameters.items())


def test_the_optimizer_adds_gradients_up_in_fp32_and_moves_nothing() -> None:
    weights = Weights(SHAPE, CPU, seed=1)
    before = {n: p.detach().clone() for n, p in weights.parameters.items()}
    arm = arm_of("bf16", weights, optimizer=True)
    assert arm.optimizer_step is not None
    assert arm.own_bytes == weights.num_bytes + 16 * sum(p.numel() for p in arm.parameters)
    arm.loss().backward()
    assert weights.optimizer().gradients()[0].abs().sum() > 0
    arm.optimizer_step()
    assert weights.optimizer().gradients()[0].abs().sum() == 0
    assert all((before[n] - p).abs().max() < 1e-10 for n, p in weights.parameters.items())


def test_chunks_of_the_loss_change_no_loss(weights: Weights) -> None:
    plain = arm_of("bf16", weights)
    chunked = arm_of("c: loss_chunk_tokens=16", weights)
    assert chunked.loss().item() == pytest.approx(plain.loss().item(), rel=1e-4)
