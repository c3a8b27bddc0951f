"""A planned model inside the engine: every ZeRO stage trains the same numbers and counts the same GEMMs."""

from __future__ import annotations

import pytest
import torch

from fp8ctl.config.schema import BatchConfig, EngineConfig, LaunchConfig, ModelShape, PrecisionConfig, TrainConfig
from fp8ctl.engine.dist import Dist
from fp8ctl.engine.engine import Engine
from fp8ctl.model.transformer import Transformer
from fp8ctl.precision.apply import apply_plan
from fp8ctl.precision.coverage import Coverage, check_required, coverage
from fp8ctl.precision.plan import make_plan

SHAPE = ModelShape(
    family="qwen2", num_layers=2, hidden_size=64, ffn_size=96, num_heads=4, num_kv_heads=2, head_size=16,
    vocab_size=120, max_positions=64,
)  # fmt: skip
T, MICRO_STEPS, STEPS = 32, 2, 3


def train(stage: int, *, tied: bool, checkpointing: bool) -> tuple[list[float], Coverage]:
    config = TrainConfig(
        batch=BatchConfig(seq_len_tokens=T, global_batch_rows=MICRO_STEPS),
        engine=EngineConfig(zero_stage=stage, device="cpu"),  # type: ignore[arg-type]
        precision=PrecisionConfig(default="fp8"),
    )
    dist = Dist.start(config.engine, LaunchConfig(collective_timeout_s=60))
    torch.manual_seed(0)
    model = Transformer(SHAPE.model_copy(update={"tie_embeddings": tied})).bfloat16()
    model.activation_checkpointing = checkpointing
    plan = make_plan(model, config.precision)
    apply_plan(model, plan, config.precision)
    engine = Engine(model, config, dist)
    losses = []
    for step in range(STEPS):
        loss_sum = 0.0
        for micro in range(MICRO_STEPS):
            ids = torch.randint(0, 120, (T,), generator=torch.Generator().manual_seed(10 * step + micro))
            bounds = torch.tensor([0, 20, T], dtype=torch.int32)
            positions = torch.cat([torch.arange(20), torch.arange(12)])
            loss = engine.forward(ids, positions, bounds, 20, labels_T=ids)
            engine.backward(loss, num_trainable=T * MICRO_STEPS)
            loss_sum += loss.item()
        engine.prepare_step()
        engine.apply_step(1e-2)
        losses.append(loss_sum / (T * MICRO_STEPS))
    done = coverage(model)
    check_required(plan, done)
    return losses, done


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_all_stages_agree(tied: bool, checkpointing: bool) -> None:
    losses, done = train(1, tied=tied, checkpointing=checkpointing)
    assert losses[-1] < losses[0]
    tokens = T * MICRO_STEPS * STEPS
    up = 2 * tokens * 96 * 64
    assert done.linears["model.layers.0.mlp.up_proj"] == {
        "fprop": {"fp8": up * (2 if checkpointing else 1), "bf16": 0},
        "dgrad": {"fp8": up, "bf16": 0},
        "wgrad": {"fp8": up, "bf16": 0},
    }
    assert done.linears["lm_head"] == {
        d: {"fp8": 0, "bf16": 2 * tokens * 120 * 64} for d in ("fprop", "dgrad", "wgrad")
    }
    for stage in (0, 2, 3):
        other_losses, other = train(stage, tied=tied, checkpointing=checkpointing)
        assert other_losses == pytest.approx(losses, rel=2e-3)
        assert other == done
