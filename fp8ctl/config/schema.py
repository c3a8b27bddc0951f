"""All settings: one frozen, typed tree per command, with the unit in the name and a docstring under each field.

Types and defaults live here and nowhere else. The YAML files of `conf/` hold only what differs, `compose.py` joins the two,
and `checks.py` knows the rules across fields. Nothing below this module reads a dict of settings.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from fp8ctl.config.settings import Settings

# ---------------------------------------------------------------- model


class RopeScaling(Settings):
    """Llama 3's frequency-dependent RoPE scaling (the field names are those of Hugging Face's `rope_type: llama3`)."""

    factor: PositiveFloat
    """How far the low frequencies are stretched."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths longer than original / low_freq_factor are stretched by the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths shorter than original / high_freq_factor stay as they are."""
    original_max_positions: PositiveInt
    """Context length the model was first trained with."""


class ModelShape(Settings):
    """Everything that fixes a transformer's parameter names and sizes; no weights."""

    family: Literal["llama", "qwen2", "qwen3"]
    """Architecture: llama (no bias), qwen2 (bias on q, k, v), qwen3 (RMSNorm on q and k heads)."""
    num_layers: PositiveInt
    """Transformer blocks."""
    hidden_size: PositiveInt
    """D: width of the residual stream."""
    ffn_size: PositiveInt
    """F: width of the SwiGLU feed-forward."""
    num_heads: PositiveInt
    """N: query heads."""
    num_kv_heads: PositiveInt
    """K: key/value heads; divides num_heads."""
    head_size: PositiveInt
    """H: size of one head."""
    vocab_size: PositiveInt
    """V: rows of the embedding."""
    max_positions: PositiveInt
    """Longest sequence the model is made for, in tokens."""
    rope_base: PositiveFloat = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling, if any."""
    rms_norm_eps: PositiveFloat = 1e-6
    """Epsilon of every RMSNorm."""
    tie_embeddings: bool = False
    """Whether the head shares the embedding's weight."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of random initial weights."""


class ModelConfig(Settings):
    """Which model: a Hugging Face folder (`path`), or a shape with random weights."""

    name: str = "hf"
    """Short name used in run names and reports."""
    path: str | None = None
    """Hugging Face folder (config.json + safetensors + tokenizer) to start from."""
    shape: ModelShape | None = None
    """Shape to start from with random weights; with `path` too, the two must agree."""


# ---------------------------------------------------------------- data


class MixSource(Settings):
    """One data set of a mixture."""

    path: str
    """Data set folder."""
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Its share of the rows, relative to the other sources."""
    epochs: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Instead of a weight, for all sources or none: how often its text is read, relative to the others."""


class PhaseConfig(Settings):
    """A stretch of the run with a mixture of its own."""

    from_step: int = Field(ge=0)
    """Steps that are done when it begins; the first phase begins at 0."""
    sources: tuple[MixSource, ...]
    """What is mixed."""


class DataConfig(Settings):
    """What a training run reads: one data set (`path`), a mixture (`sources`), or mixtures one after another (`phases`)."""

    path: str | None = None
    """Data set folder written by `fp8ctl data prep`."""
    sources: tuple[MixSource, ...] = ()
    """A mixture of data sets."""
    phases: tuple[PhaseConfig, ...] = ()
    """Mixtures by step, for example one for the stable and one for the decaying part of a WSD schedule. A resumed run may add a phase that
    begins where it stands; each source goes on where it was."""
    after: str | None = None
    """A run, or one of its checkpoints: begin with what it has not read of its epoch, whatever its row length was (packing stream)."""
    packing: Literal["stream", "best_fit"] = "stream"
    """stream: documents follow each other and are cut at row ends (CPT). best_fit: whole samples share rows (SFT)."""
    prefetch_steps: int = Field(default=2, ge=0)
    """Steps whose batches are made ahead, in a thread; 0: none."""


# ---------------------------------------------------------------- precision


class RecipeConfig(Settings):
    """Number formats of the three GEMMs of one linear layer."""

    name: str = "infir2"
    """Name shown in plans and reports."""
    granularity: Literal["block", "row", "tensor", "tensor_delayed", "mxfp8"] = "block"
    """What shares a scale. block: activations and output gradients by 1x128 tile, weights by 128x128 block. row: each row along the
    contraction. tensor: the whole matrix, from its own amax. tensor_delayed (the amax of past steps) and mxfp8 (1x32, Blackwell)
    exist on backend te only."""
    scale: Literal["pow2", "fp32"] = "pow2"
    """pow2: scales rounded to a power of two. fp32: exact amax/448."""
    grad_format: Literal["e4m3", "e5m2"] = "e4m3"
    """Format of output gradients."""
    wgrad: Literal["fp8", "bf16", "x_block"] = "fp8"
    """The weight-gradient GEMM. x_block (granularity block only): FP8 with the input by 128x128 block instead of tile, faster and
    coarser."""


class PrecisionRule(Settings):
    """One ordered rule of the plan: the last rule that matches a linear decides."""

    match: str
    """Whole-name glob over module names, e.g. `model.layers.0.*` or `*.down_proj`."""
    precision: Literal["fp8", "bf16"]
    """What the matching linears run in."""
    reason: str
    """Why; printed and saved with the plan."""


class PrecisionConfig(Settings):
    """Which linear runs in what."""

    default: Literal["fp8", "bf16"] = "bf16"
    """Precision of every linear inside the blocks; embedding and norms are never FP8."""
    recipe: RecipeConfig = RecipeConfig()
    """Number formats where FP8 is used."""
    head: Literal["fp8", "bf16"] = "bf16"
    """Precision of the output head (FP8 only when it is not tied to the embedding)."""
    rules: tuple[PrecisionRule, ...] = ()
    """Exceptions, in order; a rule that matches nothing is an error."""
    backend: Literal["auto", "reference", "native", "te"] = "auto"
    """What executes FP8 GEMMs. reference: emulated anywhere. native: Triton quantisers and FP8 tensor cores. te:
    transformer-engine's modules. auto: the best that runs here, printed and stored with its reason."""
    gemm: Literal["auto", "cublas", "triton"] = "auto"
    """What multiplies on backend native. auto: for recipes by block cuBLAS where it has that (Hopper, CUDA 12.9), else Triton; by row
    and by tensor always cuBLAS. Printed and stored with its reason."""
    require_fp8: bool = False
    """Fail when less ran in FP8 than the plan says."""


# ---------------------------------------------------------------- training


class OptimConfig(Settings):
    """AdamW with FP32 master weights and states."""

    peak_lr: PositiveFloat = 1e-4
    """Highest learning rate."""
    min_lr: float = Field(default=1e-5, ge=0.0)
    """Learning rate at the end of the schedule."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Decoupled weight decay; not applied to norms and biases."""
    clip_grad_norm: float = Field(default=1.0, ge=0.0)
    """Largest global gradient norm; 0 turns clipping off."""


class ScheduleConfig(Settings):
    """Learning rate over steps."""

    kind: Literal["wsd", "cosine", "constant"] = "wsd"
    """wsd: warm up, stay, cosine decay over the last decay_steps. cosine: warm up, then cosine to min_lr."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    warmup_share: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the run that is linear warm-up, instead of warmup_steps. It becomes warmup_steps when the run starts."""
    decay_steps: int = Field(default=0, ge=0)
    """Length of the final decay (wsd only)."""


class BatchConfig(Settings):
    """Batch arithmetic, in packed rows of seq_len_tokens tokens."""

    seq_len_tokens: PositiveInt = 4096
    """Tokens per packed row."""
    micro_batch_rows: PositiveInt = 1
    """Rows that one rank runs in one forward-backward."""
    global_batch_rows: PositiveInt = 1
    """Rows per optimizer step over all ranks; gradient accumulation follows from it."""


class EngineConfig(Settings):
    """How DeepSpeed runs the model."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """What DeepSpeed shards: 1 optimizer states, 2 gradients too, 3 weights too; 0 nothing."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of weights and activations outside FP8; master weights are FP32 either way."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward pass instead of storing its activations."""
    attention: Literal["auto", "cudnn", "flash", "any"] = "auto"
    """Attention on a GPU. auto: the fastest measured for it, tried out at start. cudnn, flash: that one or an error. any: whatever
    PyTorch picks, slow paths included. A CPU has one way only."""
    compile: Literal["off", "kernels", "blocks"] = "kernels"
    """torch.compile on a GPU. kernels: norm, rotary embedding and SwiGLU are fused. blocks: whole transformer blocks are compiled (not at
    zero_stage 3). off: plain PyTorch. A CPU runs plain PyTorch always."""


class LaunchConfig(Settings):
    """How ranks are started on this node."""

    num_ranks: PositiveInt = 1
    """Ranks on this node."""
    threads_per_rank: PositiveInt = 1
    """CPU threads of each rank (OMP_NUM_THREADS)."""
    collective_timeout_s: PositiveInt = 1800
    """Longest wait in a collective operation."""
    grace_s: PositiveInt = 600
    """After a stop signal: how long the ranks may take for their checkpoint before they are killed."""


class MonitorConfig(Settings):
    """What is watched."""

    policy: Literal["off", "observe"] = "observe"
    """off: nothing. observe: statistics are recorded and judged, nothing is changed."""
    layer_stats_every_steps: PositiveInt = 50
    """Steps between two recordings of per-layer quantisation statistics in layers.parquet; the first step is always recorded."""


class TrackConfig(Settings):
    """Where metrics go besides the run folder."""

    mlflow: bool = False
    """Feed the metrics to MLflow too; its failure never stops a run."""
    mlflow_uri: str | None = None
    """MLflow store; default: mlflow.db (SQLite) beside the run folders."""
    experiment: str = "fp8ctl"
    """MLflow experiment."""


class LoopConfig(Settings):
    """Length and rhythm of the run."""

    num_steps: PositiveInt = 1000
    """Optimizer steps."""
    num_epochs: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """How often the data set is read, instead of num_steps (one data set, no mixture). It becomes num_steps when the run starts."""
    log_every_steps: PositiveInt = 1
    """Steps between two progress lines (metrics.jsonl has every step)."""
    save_every_steps: PositiveInt = 500
    """Steps between two checkpoints; the last step is always saved."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept."""
    validate_every_steps: int = Field(default=0, ge=0)
    """Steps between two validation losses; 0: only at the end. Without a validation split there are none."""
    validation_rows: int = Field(default=16, ge=0)
    """Rows of the validation split to use; 0 turns validation off."""


class TrainConfig(Settings):
    """Settings of `fp8ctl train cpt` and `fp8ctl train sft`."""

    stage: Literal["cpt", "sft"] = "cpt"
    """Continual pre-training or supervised fine-tuning."""
    name: str | None = None
    """Name of the run; default: stage, model and recipe."""
    run_dir: str | None = None
    """Run folder; default: runs/<time>-<name>."""
    seed: int = 1236
    """Seed of data order and of random weights."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    precision: PrecisionConfig = PrecisionConfig()
    monitor: MonitorConfig = MonitorConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    batch: BatchConfig = BatchConfig()
    engine: EngineConfig = EngineConfig()
    launch: LaunchConfig = LaunchConfig()
    loop: LoopConfig = LoopConfig()
    track: TrackConfig = TrackConfig()


# ---------------------------------------------------------------- evaluation


class SuiteConfig(Settings):
    """Questions and sampling protocol."""

    name: str = "smoke"
    """Name of the suite."""
    families: tuple[str, ...] = ()
    """reasoning-gym families."""
    num_questions: PositiveInt = 5
    """Questions per family."""
    seed: int = 90_001
    """Seed of the questions; must differ from every seed trained on."""
    num_samples: PositiveInt = 1
    """Answers per question."""
    max_new_tokens: PositiveInt = 256
    """Budget of one answer."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0: greedy."""
    top_p: float = Field(default=0.95, gt=0.0, le=1.0)
    """Nucleus; unused when greedy."""
    system_prompt: str | None = None
    """System message; default: the same instruction that SFT data from reasoning-gym uses."""


class EvalConfig(Settings):
    """Settings of `fp8ctl eval`."""

    model: str | None = None
    """A run folder, a checkpoint folder or a Hugging Face folder."""
    name: str | None = None
    """Name of the result; default: suite and precision."""
    out: str | None = None
    """Folder of the results; default: eval/ inside the run, or eval-<name> here."""
    chat_template: str | None = None
    """Name of a template in templates/chat or a path; default: the one the run was fine-tuned with, or else the model folder's own."""
    suite: SuiteConfig = SuiteConfig()
    precision: PrecisionConfig = PrecisionConfig()
    batch_size: PositiveInt = 16
    """Answers generated at once; the results do not depend on it in FP32."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of weights and activations outside FP8."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    seed: int = 1236
    """Seed of sampling; each (question, sample) has its own stream."""
