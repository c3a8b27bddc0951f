"""What the engine's tests share: a small tied transformer, batches, settings, and steps driven as the training loop drives them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from fp8ctl.config.schema import BatchConfig, EngineConfig, LaunchConfig, ModelShape, OptimConfig, TrainConfig
from fp8ctl.engine.dist import Dist
from fp8ctl.engine.engine import Engine
from fp8ctl.model.transformer import Transformer

STAGES = (0, 1, 2, 3)
DTYPES = ("fp32", "bf16")
ROWS, TOKENS, VOCABULARY = 4, 16, 64
SHAPE = ModelShape(
    family="qwen2",  # its biases and norms are vectors without weight decay
    num_layers=2,
    hidden_size=32,
    ffn_size=64,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    vocab_size=VOCABULARY,
    max_positions=64,
    tie_embeddings=True,
)


def settings(stage: int, dtype: str, *, rows: int = ROWS, micro_rows: int = 1, **optim: float) -> TrainConfig:
    """Settings of a run whose global batch has `rows` rows, on the CPU unless FP8CTL_TEST_DEVICE says otherwise."""
    device = os.environ.get("FP8CTL_TEST_DEVICE", "cpu")
    return TrainConfig(
        batch=BatchConfig(seq_len_tokens=TOKENS, micro_batch_rows=micro_rows, global_batch_rows=rows),
        engine=EngineConfig(zero_stage=stage, dtype=dtype, device=device),
        optim=OptimConfig(**{"clip_grad_norm": 1.0, **optim}),
    )


def start(config: TrainConfig) -> Dist:
    """This process's place among the ranks."""
    dist = Dist.start(config.engine, LaunchConfig(collective_timeout_s=60))
    import deepspeed.runtime.bf16_optimizer

    # A report of memory use, which collects garbage six times per engine: seconds in a test process
    deepspeed.runtime.bf16_optimizer.see_memory_usage = lambda *args, **kwargs: None
    return dist


def make_engine(
    config: TrainConfig, *, seed: int = 0, shape: ModelShape = SHAPE, checkpointing: bool = False
) -> Engine:
    """An engine around a transformer with seeded random weights."""
    torch.manual_seed(seed)
    model = Transformer(shape)
    model.activation_checkpointing = checkpointing
    return Engine(model, config, start(config))


def rows_batch(step: int, rows: list[int], vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor | int]:
    """Rows of a step as one packed micro-batch of documents; the same rows whatever the number of ranks."""
    ids, labels = [], []
    for row in rows:
        generator = torch.Generator().manual_seed(1000 * step + row)
        tokens = torch.randint(0, vocabulary, (TOKENS + 1,), generator=generator)
        ids.append(tokens[:-1])
        labels.append(tokens[1:])
    n = len(rows)
    return {
        "input_ids_T": torch.cat(ids),
        "position_ids_T": torch.arange(TOKENS).repeat(n),
        "cu_seqlens": torch.arange(0, (n + 1) * TOKENS, TOKENS, dtype=torch.int32),
        "max_seqlen": TOKENS,
        "labels_T": torch.cat(labels),
    }


def run_backward(engine: Engine, config: TrainConfig, step: int, *, poison: float = 1.0) -> tuple[float, float]:
    """All micro-batches of one step; (mean loss over all ranks, gradient norm)."""
    rows, micro, world = config.batch.global_batch_rows, config.batch.micro_batch_rows, engine.dist.world_size
    vocabulary = engine.parameter_shapes["model.embed_tokens.weight"][0]
    total = 0.0
    for i in range(engine.grad_accum_steps):
        first = i * world * micro + engine.dist.rank * micro
        batch = rows_batch(step, list(range(first, first + micro)), vocabulary)
        on_device = {k: v.to(engine.dist.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        loss = engine.forward(**on_device)
        engine.backward(loss * poison, num_trainable=rows * TOKENS)
        total += loss.item()
    (total,) = engine.dist.all_reduce_floats([total])
    return total / (rows * TOKENS), engine.prepare_step()


def run_step(engine: Engine, config: TrainConfig, step: int, lr: float = 1e-3) -> tuple[float, float]:
    """One whole step with an update."""
    numbers = run_backward(engine, config, step)
    assert engine.apply_step(lr)
    return numbers


def write_weights(weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Stands for the writer of Hugging Face folders."""
    torch.save(weights, folder / "weights.pt")


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
