"""A model and settings so small that whole runs take a second."""

from __future__ import annotations

from typing import Any

from fp8ctl.config.bench_schema import BenchStepConfig
from fp8ctl.config.schema import ModelConfig, ModelShape

SHAPE = ModelShape(
    family="qwen2",
    num_layers=2,
    hidden_size=64,
    ffn_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    vocab_size=199,
    max_positions=256,
    tie_embeddings=False,
)
MODEL = ModelConfig(name="mini", shape=SHAPE)


def step_config(**changes: Any) -> BenchStepConfig:
    """Two rows of 64 tokens, two rounds, on the CPU."""
    defaults: dict[str, Any] = {"model": MODEL, "rows": 2, "seq_len_tokens": 64, "rounds": 2, "device": "cpu"}
    return BenchStepConfig(**{**defaults, **changes})


def silent(done: int, total: int, what: str) -> None:
    """A progress report that nobody sees."""
