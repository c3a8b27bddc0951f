"""Rules across fields that need no file and no GPU. Each gives back a Problem; they are raised together."""

from __future__ import annotations

from fp8ctl.config.data_schema import DataPrepConfig, DecontaminateConfig, DedupConfig, InspectConfig, SourceConfig
from fp8ctl.config.problems import Problem, raise_problems
from fp8ctl.config.schema import DataConfig, ModelShape, PrecisionConfig, TrainConfig


def check_train(config: TrainConfig) -> None:
    """Raises ConfigError with everything that does not fit together in a training run."""
    problems: list[Problem] = []
    if config.model.path is None and config.model.shape is None:
        problems.append(
            Problem(
                "model.path",
                "no model",
                "set model.path=FOLDER (Hugging Face folder) or model=NAME of conf/model for random weights",
            )
        )
    problems += _data(config.data)
    if config.model.shape is not None:
        problems += check_shape(config.model.shape)
    problems += _batch(config) + _epochs(config) + _precision(config)
    if config.loop.num_epochs is None:  # else the number of steps is known later
        problems += _schedule(config)
    if config.optim.min_lr > config.optim.peak_lr:
        problems.append(
            Problem(
                "optim.min_lr",
                f"{config.optim.min_lr} is above optim.peak_lr = {config.optim.peak_lr}",
                "set optim.min_lr at or below optim.peak_lr",
            )
        )
    if config.engine.compile == "blocks" and config.engine.zero_stage == 3:
        problems.append(
            Problem(
                "engine.compile",
                "blocks can't be compiled whole at zero_stage 3, which gathers weights between their layers",
                "set engine.compile=kernels, or engine.zero_stage=2 or less",
            )
        )
    if config.precision.backend == "te" and config.engine.zero_stage == 3:
        problems.append(
            Problem(
                "precision.backend",
                "transformer-engine keeps FP8 copies of all weights from forward to backward, which undoes what zero_stage 3 saves",
                "set engine.zero_stage=2 or less, or precision.backend=native",
            )
        )
    if config.precision.recipe.granularity == "tensor_delayed" and config.engine.activation_checkpointing:
        problems.append(
            Problem(
                "engine.activation_checkpointing",
                "delayed scaling would recompute with other scales than forward had",
                "set precision.recipe.granularity=tensor, or engine.activation_checkpointing=false",
            )
        )
    raise_problems(problems)


def check_shape(shape: ModelShape) -> list[Problem]:
    """Sizes that no transformer can have."""
    problems = []
    if shape.num_heads % shape.num_kv_heads:
        problems.append(
            Problem("model.shape.num_kv_heads", f"{shape.num_kv_heads} does not divide num_heads = {shape.num_heads}")
        )
    if shape.head_size % 2:
        problems.append(Problem("model.shape.head_size", f"{shape.head_size} is odd; RoPE turns pairs"))
    return problems


def _batch(config: TrainConfig) -> list[Problem]:
    batch, ranks = config.batch, config.launch.num_ranks
    per_micro_step = batch.micro_batch_rows * ranks
    if batch.global_batch_rows % per_micro_step:
        low = batch.global_batch_rows // per_micro_step * per_micro_step
        fits = [str(n) for n in (low, low + per_micro_step) if n]
        return [
            Problem(
                "batch.global_batch_rows",
                f"{batch.global_batch_rows} is no multiple of micro_batch_rows x ranks = "
                f"{batch.micro_batch_rows} x {ranks} = {per_micro_step}",
                f"set batch.global_batch_rows={' or '.join(fits)}",
            )
        ]
    return []


def _schedule(config: TrainConfig) -> list[Problem]:
    schedule, steps = config.schedule, config.loop.num_steps
    decay = schedule.decay_steps if schedule.kind == "wsd" else 0
    problems = []
    if schedule.warmup_steps + decay > steps:
        problems.append(
            Problem(
                "schedule.warmup_steps",
                f"warm-up {schedule.warmup_steps} + decay {decay} steps are more than loop.num_steps = {steps}",
                "shorten schedule.warmup_steps or schedule.decay_steps, or raise loop.num_steps",
            )
        )
    if schedule.kind != "wsd" and schedule.decay_steps:
        problems.append(
            Problem(
                "schedule.decay_steps",
                f"only the wsd schedule has a decay phase, this is {schedule.kind}",
                "set schedule.decay_steps=0",
            )
        )
    return problems


def check_schedule(config: TrainConfig) -> None:
    """Raises ConfigError when the learning rate's phases don't fit into the run."""
    raise_problems(_schedule(config))


def _epochs(config: TrainConfig) -> list[Problem]:
    problems, schedule = [], config.schedule
    if config.loop.num_epochs is not None and (config.data.sources or config.data.phases):
        problems.append(
            Problem(
                "loop.num_epochs", "a mixture has no epochs of its own", "set loop.num_epochs=null and loop.num_steps"
            )
        )
    if schedule.warmup_share is not None and schedule.warmup_steps:
        problems.append(
            Problem(
                "schedule.warmup_share",
                "schedule.warmup_steps is set too",
                "leave one of them at its default: schedule.warmup_share=null or schedule.warmup_steps=0",
            )
        )
    return problems


def check_precision(precision: PrecisionConfig) -> list[Problem]:
    """What recipes and backends can't do whatever the machine."""
    recipe, problems = precision.recipe, []
    if recipe.granularity in ("tensor_delayed", "mxfp8") and precision.backend != "te":
        problems.append(
            Problem(
                "precision.recipe.granularity",
                f"{recipe.granularity} exists on transformer-engine only",
                "set precision.backend=te, or precision.recipe.granularity=tensor or block",
            )
        )
    fixed = {"tensor_delayed": "fp32", "mxfp8": "pow2"}.get(recipe.granularity, recipe.scale)
    if recipe.scale != fixed:
        problems.append(
            Problem(
                "precision.recipe.scale",
                f"{recipe.granularity} has {fixed} scales, this asks for {recipe.scale}",
                f"set precision.recipe.scale={fixed}",
            )
        )
    if recipe.granularity == "tensor_delayed" and precision.head == "fp8":
        problems.append(
            Problem(
                "precision.head",
                "the loss of an FP8 head recomputes its chunks, and delayed scaling changes scales in between",
                "set precision.head=bf16",
            )
        )
    if recipe.wgrad == "x_block" and recipe.granularity != "block":
        problems.append(
            Problem(
                "precision.recipe.wgrad",
                f"x_block is a switch of granularity block, this is {recipe.granularity}",
                "set precision.recipe.wgrad=fp8",
            )
        )
    if precision.backend == "te" and (recipe.granularity == "row" or recipe.wgrad != "fp8"):
        what = "granularity row" if recipe.granularity == "row" else f"wgrad {recipe.wgrad}"
        problems.append(
            Problem(
                "precision.backend", f"transformer-engine has no {what}", "set precision.backend=native or reference"
            )
        )
    return problems


def wants_fp8(precision: PrecisionConfig) -> bool:
    """Whether the settings ask for FP8 anywhere."""
    return precision.default == "fp8" or precision.head == "fp8" or any(r.precision == "fp8" for r in precision.rules)


def _precision(config: TrainConfig) -> list[Problem]:
    precision = config.precision
    problems = check_precision(precision)
    if precision.require_fp8 and not wants_fp8(precision):
        problems.append(
            Problem(
                "precision.require_fp8",
                "FP8 is required but the plan holds none",
                "choose precision=infir2, or drop --require-fp8",
            )
        )
    return problems


def _data(data: DataConfig) -> list[Problem]:
    given = [name for name in ("path", "sources", "phases") if getattr(data, name)]
    if not given:
        return [Problem("data.path", "no data", "set data.path=FOLDER, a data set made by `fp8ctl data prep`")]
    if len(given) > 1:
        return [Problem("data", f"{' and '.join(given)} are both set", "keep one of path, sources and phases")]
    if data.after and data.packing != "stream":
        return [
            Problem(
                "data.after", "packs of whole samples can't be gone on with", "leave it out, or set data.packing=stream"
            )
        ]
    starts = [phase.from_step for phase in data.phases]
    if starts and (starts[0] != 0 or sorted(set(starts)) != starts):
        return [
            Problem("data.phases", f"phases begin at steps {starts}", "begin at 0 and go up, each later than the last")
        ]
    return [
        Problem(f"data.phases.{i}.sources", "a phase without data", "name at least one data set")
        for i, phase in enumerate(data.phases)
        if not phase.sources
    ]


def check_data_prep(config: DataPrepConfig, *, writes: bool = True) -> None:
    """Raises ConfigError with everything that does not fit together in a data preparation (`writes`: one that is carried out)."""
    problems: list[Problem] = []
    if writes and not config.out:
        problems.append(Problem("out", "no folder to write to", "set out=FOLDER"))
    if not config.tokenizer:
        problems.append(Problem("tokenizer", "no tokenizer", "set tokenizer=FOLDER, a Hugging Face model folder"))
    if config.executor == "slurm" and not config.cluster.partition:
        problems.append(Problem("cluster.partition", "Slurm needs one", "set cluster.partition=NAME, see `sinfo`"))
    raise_problems(problems + _rendering(config) + _sources(config))


def _rendering(config: DataPrepConfig) -> list[Problem]:
    problems: list[Problem] = []
    if config.default_system == "none" and config.system_prompt is not None:
        problems.append(
            Problem(
                "default_system",
                "none is asked for, and a system_prompt too",
                "set system_prompt=null or default_system=keep",
            )
        )
    if config.over_length != "drop" and config.max_tokens is None:
        problems.append(
            Problem(
                "over_length",
                f"{config.over_length} needs a length",
                "set max_tokens, the longest sample that is allowed",
            )
        )
    return problems


def check_scan(config: DedupConfig) -> None:
    """Raises ConfigError with everything that does not fit together in the settings of a command that looks through sources."""
    problems: list[Problem] = []
    if not config.out:
        problems.append(Problem("out", "no folder to write to", "set out=FOLDER"))
    raise_problems(problems + _sources(config))


def check_sources(config: InspectConfig) -> None:
    """Raises ConfigError when there is nothing to look at, or something without files."""
    if not config.sources:
        raise_problems([Problem("", "no files to look at", "fp8ctl data inspect FILES")])
    generated = [s.kind for s in config.sources if s.kind in ("python_stdlib", "reasoning_gym")]
    if generated:
        raise_problems([Problem("sources", f"{generated[0]} has no files to look at", "give files")])
    raise_problems([p for i, s in enumerate(config.sources) if (p := _without_files(i, s)) is not None])


def check_decontaminate(config: DecontaminateConfig) -> None:
    """Raises ConfigError with everything that does not fit together in a search for eval items."""
    problems: list[Problem] = []
    if not config.against:
        problems.append(Problem("against", "no eval sets", "set against=[FILES]"))
    if config.mode == "drop" and not config.out:
        problems.append(Problem("out", "mode=drop writes an exclusion list", "set out=FOLDER, or mode=tag"))
    if config.ngram_words and config.min_words and config.min_words > config.ngram_words:
        problems.append(Problem("min_words", "it is above ngram_words", "set min_words at or below ngram_words"))
    raise_problems(problems + _sources(config))


def _sources(config: DataPrepConfig | DedupConfig | DecontaminateConfig) -> list[Problem]:
    problems: list[Problem] = []
    if not config.sources:
        problems.append(
            Problem(
                "sources",
                "no sources",
                "choose source=cpt_local or source=sft_local and set its paths, see docs/data.md",
            )
        )
    for i, source in enumerate(config.sources):
        where = f"sources.{i}"
        if (problem := _without_files(i, source)) is not None:
            problems.append(problem)
        if source.kind == "reasoning_gym" and config.kind == "cpt":
            problems.append(
                Problem(
                    f"{where}.kind", "reasoning_gym generates conversations, this is a CPT data set", "set kind=sft"
                )
            )
        if source.kind in ("text", "python_stdlib") and config.kind == "sft":
            problems.append(
                Problem(
                    f"{where}.kind",
                    f"{source.kind} gives documents, an SFT data set needs conversations",
                    "set kind=cpt",
                )
            )
    return problems


def _without_files(number: int, source: SourceConfig) -> Problem | None:
    if source.kind in ("python_stdlib", "reasoning_gym") or source.paths:
        return None
    where = f"sources.{number}.paths"
    return Problem(where, f"a {source.kind} source needs files", f"set {where}=[FILES]")
