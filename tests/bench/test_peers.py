"""Peers compute the same model."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from bench_cases import SHAPE, step_config

from fp8ctl.bench.arms import read_arms
from fp8ctl.bench.batch import make_batch
from fp8ctl.bench.ours import Weights, build_ours
from fp8ctl.bench.peers import TeLayers, build_hf
from fp8ctl.errors import MissingPackageError

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_gives_our_loss_and_gradients(family: str, tied: bool) -> None:
    shape = SHAPE.model_copy(update={"family": family, "tie_embeddings": tied})
    config = step_config(activation_checkpointing=tied)
    batch = make_batch(config, shape.vocab_size, CPU)
    weights = Weights(shape, CPU, seed=1)
    (plan,) = read_arms(["bf16"])
    assert plan.settings is not None
    ours, hf = build_ours(plan.settings, config, weights, batch), build_hf(config, weights, batch)
    assert {p.data_ptr() for p in hf.parameters} == {p.data_ptr() for p in ours.parameters}, "one set of weights"
    losses = [arm.loss() for arm in (ours, hf)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=2e-4)
    for arm, loss in zip((ours, hf), losses, strict=True):
        arm.backward(loss)
    for a, b in zip(ours.parameters, hf.parameters, strict=True):
        assert a.grad is not None and b.grad is not None and a.grad is not b.grad
        assert (a.grad - b.grad).float().norm() <= 0.05 * a.grad.float().norm()


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is here")
def test_torchao_may_be_absent() -> None:
    config = step_config()
    with pytest.raises(MissingPackageError, match="torchao is not here") as caught:
        build_hf(config, Weights(SHAPE, CPU, 1), make_batch(config, 199, CPU), "rowwise")
    assert caught.value.hint == "pip install torchao"


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="transformer-engine is here")
def test_transformer_engine_may_be_absent() -> None:
    config = step_config()
    with pytest.raises(MissingPackageError, match="transformer-engine is not here") as caught:
        TeLayers(config, Weights(SHAPE, CPU, 1), make_batch(config, 199, CPU)).build("block")
    assert caught.value.hint == "pip install 'fp8ctl[te]'"
