"""Settings of `fp8ctl bench`; see schema.py for the house rules."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from fp8ctl.config.schema import ModelConfig, PrecisionConfig
from fp8ctl.config.settings import Settings


class BenchGemmConfig(Settings):
    """Settings of `fp8ctl bench gemm`."""

    model: ModelConfig = ModelConfig()
    precisions: tuple[str, ...] = ("infir2", "infir2_x_block_wgrad", "row", "tensor")
    """Choices of `precision` whose recipes are measured beside BF16."""
    num_tokens: PositiveInt = 8192
    """M: tokens that a layer gets at once."""
    backend: Literal["auto", "reference", "native"] = "auto"
    """As precision.backend."""
    gemm: Literal["auto", "cublas", "triton"] = "auto"
    """As precision.gemm."""
    rounds: PositiveInt = 5
    """Times that everything is measured in turn; the medians are shown."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    seed: int = 1236
    """Seed of the random matrices."""


class BenchArmConfig(Settings):
    """What one arm of `fp8ctl bench step` that is this project's own model runs in."""

    precision: PrecisionConfig = PrecisionConfig()
    attention: Literal["auto", "cudnn", "flash", "any"] = "auto"
    """As engine.attention."""
    compile: Literal["off", "kernels", "blocks"] = "kernels"
    """As engine.compile."""
    keep_quantized_weights: bool = False
    """Quantise each weight once a step instead of once for each GEMM, as a run with gradient accumulation does; takes memory."""
    loss_chunk_tokens: PositiveInt | None = None
    """Tokens whose logits exist at once; default: the model's own."""


class BenchStepConfig(Settings):
    """Settings of `fp8ctl bench step`."""

    model: ModelConfig = ModelConfig()
    arms: tuple[str, ...] = ("bf16", "infir2")
    """What runs beside each other: choices of `precision`, peers (hf, te-block, ... see docs/bench.md), or one's own,
    "NAME: OVERRIDES", e.g. "emulated: precision=infir2 precision.backend=reference"."""
    rows: PositiveInt = 1
    """Rows of a batch."""
    seq_len_tokens: PositiveInt = 8192
    """Tokens of a row."""
    documents: Literal["single", "packed"] = "single"
    """single: a document fills a row. packed: documents of lognormal lengths follow each other and are cut at row ends."""
    rounds: PositiveInt = 7
    """Rounds; each runs every arm once, and the order moves on by one arm a round."""
    timed_steps: PositiveInt = 1
    """Timed steps of an arm's turn, after one that is not."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass."""
    optimizer: bool = False
    """Time AdamW with FP32 masters and moments too, for the arms of this project's own model."""
    profile: bool = False
    """After the rounds: which kernels take the time of one step of each arm (GPU)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    seed: int = 1236
    """Seed of weights and tokens."""


class BenchDataConfig(Settings):
    """Settings of `fp8ctl bench data`."""

    tokenizer: str | None = None
    """Folder with tokenizer.json."""
    arms: tuple[Literal["bare", "fp8ctl", "datatrove", "megatron"], ...] = ("bare", "fp8ctl", "datatrove", "megatron")
    """What runs beside each other on the same text."""
    workers: tuple[PositiveInt, ...] = (1, 2)
    """Numbers of processes, each on a core of its own."""
    text_mb: PositiveInt = 64
    """MiB of text for the comparison of speed."""
    rounds: PositiveInt = 3
    """Rounds; each runs every arm once, and the order moves on by one arm a round."""
    memory_mb: tuple[PositiveInt, ...] = (512, 2048)
    """MiB of text of the measurements of memory."""
    long_document_mb: NonNegativeInt = 100
    """MiB of the single document whose memory is measured; 0: none."""
    packing_samples: tuple[PositiveInt, ...] = (165_000, 1_000_000)
    """Numbers of samples that are packed."""
    scratch: str | None = None
    """Folder for text and data sets while it runs; default: the system's."""
