"""Run folders: where settings come from, what is written once, what may change when a run is continued."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from fp8ctl.config.checks import check_train
from fp8ctl.config.compose import change, compose, dump, load
from fp8ctl.config.schema import DataConfig, MixSource, TrainConfig
from fp8ctl.engine.manifest import CLIENT_STATE, find_weights, latest
from fp8ctl.errors import CheckpointError, ConfigError, ModelError
from fp8ctl.launch.length import drop_what_is_overridden
from fp8ctl.paths import RunPaths
from fp8ctl.track.redact import secret_places

RUNS_ROOT = Path("runs")
_CHANGEABLE_ON_RESUME = (
    "loop.",
    "monitor.",
    "track.",
    "launch.threads_per_rank",
    "launch.grace_s",
    "launch.collective_timeout_s",
    "precision.require_fp8",
    # what was read must stay what it was, which the loader sees to; what comes next may change
    "data.path",
    "data.sources",
    "data.phases",
    "data.prefetch_steps",
)


def settings_for(
    command: str, overrides: Sequence[str], *, run_dir: Path | None, resume: bool, require_fp8: bool
) -> TrainConfig:
    """Settings of a new run, of a run folder that holds only its config.yaml, or of a run to continue.

    Raises:
        ConfigError: settings that don't exist or don't fit, a resume without a run, or one that changes the run's identity.
    """
    stored = RunPaths(run_dir).config if run_dir else None
    overrides = [*overrides, "precision.require_fp8=true"] if require_fp8 else list(overrides)
    if resume:
        if stored is None:
            raise ConfigError("--resume needs the run to continue", "add --run-dir FOLDER")
        if not stored.exists():
            raise ConfigError(f"nothing to resume: no run in {run_dir}", "give the folder that `fp8ctl train` printed")
        _refuse_new_identity(overrides)
        config = change(load(TrainConfig, stored), overrides)
    elif stored is not None and stored.exists():
        _refuse_started(RunPaths(stored.parent))
        config = change(load(TrainConfig, stored), overrides)
    else:
        config = compose(command, overrides)
    config = drop_what_is_overridden(config, overrides)
    if config.stage != command.removeprefix("train_"):
        raise ConfigError(f"{run_dir} holds a run of stage {config.stage}", f"use `fp8ctl train {config.stage}`")
    if run_dir:
        config = config.model_copy(update={"run_dir": str(run_dir)})
    if config.model.path is not None:
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"path": str(_weights(Path(config.model.path)))})}
        )
    if config.data.after is not None:
        after = _client_state(Path(config.data.after))
        config = config.model_copy(update={"data": config.data.model_copy(update={"after": str(after)})})
    if resume:
        config = config.model_copy(update={"data": _with_absolute_paths(config.data)})
    check_train(config)
    return config


def check_inputs(config: TrainConfig) -> list[str]:
    """Compares data and model before a folder is made or a rank starts. Needs torch, loads no weights.

    Returns:
        Warnings about the mixture of data, and about what the stage before was trained on.

    Raises:
        ConfigError: a mixture that can't be, a batch that does not divide, or a run that would start from its own weights.
        DataError: no data set, one of the other stage or of another tokenizer, or tokens and rows that the model has no place for.
        ModelError: the folder's shape is not that of the settings, or attention that is asked for can't run.
        PrecisionError: rules or an FP8 backend that can't be.
    """
    import torch

    from fp8ctl.worker.build import check_data, choose_kernels, loader_to_look_at, model_shape, plan_of
    from fp8ctl.worker.parent import check_hand_off

    shape = model_shape(config)
    check_data(config, shape)
    plan = plan_of(config, shape)
    if config.engine.device == "cpu" or not torch.cuda.is_available():
        # On a GPU it takes a trial, which is left to the ranks: this process would hold memory there as long as they run
        choose_kernels(config, shape, plan, torch.device("cpu"))
    loader = loader_to_look_at(config)
    return [*check_hand_off(config), *loader.warnings(config.loop.num_steps)]


def run_name(config: TrainConfig) -> str:
    """Stage, model and recipe, unless the user named the run."""
    recipe = config.precision.recipe.name if config.precision.default == "fp8" else "bf16"
    return config.name or f"{config.stage}-{config.model.name}-{recipe}"


def create_run_folder(config: TrainConfig) -> tuple[TrainConfig, RunPaths]:
    """Makes the run folder and writes `config.yaml` (absolute paths, so that it means the same from anywhere).

    Raises:
        ConfigError: the folder holds a run that has started already.
    """
    name = run_name(config)
    folder = Path(config.run_dir) if config.run_dir else RUNS_ROOT / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    paths = RunPaths(folder.resolve())
    _refuse_started(paths)
    _refuse_secrets(config)
    resolved = config.model_copy(
        update={
            "name": name,
            "run_dir": str(paths.root),
            "data": _with_absolute_paths(config.data),
        }
    )
    if config.data.after is not None:
        # a copy: the other run may go on, and removes old checkpoints
        paths.read_before.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(config.data.after, paths.read_before)
        data = resolved.data.model_copy(update={"after": str(paths.read_before)})
        resolved = resolved.model_copy(update={"data": data})
    _write_config(resolved, paths)
    return resolved, paths


def _with_absolute_paths(data: DataConfig) -> DataConfig:
    def resolved(sources: tuple[MixSource, ...]) -> tuple[MixSource, ...]:
        return tuple(s.model_copy(update={"path": str(Path(s.path).resolve())}) for s in sources)

    return data.model_copy(
        update={
            "path": str(Path(data.path).resolve()) if data.path else None,
            "sources": resolved(data.sources),
            "phases": tuple(p.model_copy(update={"sources": resolved(p.sources)}) for p in data.phases),
        }
    )


def resume_run(config: TrainConfig) -> tuple[RunPaths, Path]:
    """The run's folder and its newest complete checkpoint; settings changed on the command line are written.

    Raises:
        CheckpointError: the run has no complete checkpoint.
    """
    assert config.run_dir is not None, "settings_for asks for it"
    paths = RunPaths(Path(config.run_dir).resolve())
    checkpoint = latest(paths.checkpoints)
    if checkpoint is None:
        raise CheckpointError(
            f"nothing to resume: no complete checkpoint in {paths.checkpoints}", "start the run anew in another folder"
        )
    _write_config(config.model_copy(update={"run_dir": str(paths.root)}), paths)
    return paths, checkpoint


def check_data_order(config: TrainConfig) -> None:
    """Compares what the newest checkpoint of a run has read with what these settings would have read.

    Raises:
        DataError: they differ.
    """
    from fp8ctl.worker.build import loader_to_look_at

    assert config.run_dir is not None, "settings_for asks for it"
    checkpoint = latest(RunPaths(config.run_dir).checkpoints)
    if checkpoint is not None:
        state = json.loads((checkpoint / CLIENT_STATE).read_text(encoding="utf-8"))
        loader_to_look_at(config).load_state_dict(state["loader"])


def _refuse_started(paths: RunPaths) -> None:
    if paths.status.exists() or paths.metrics.exists():
        hint = f"continue it with --resume --run-dir {shlex.quote(str(paths.root))}, or choose another folder"
        raise ConfigError(f"there is a run in {paths.root} already", hint)


def _refuse_secrets(config: TrainConfig) -> None:
    places = secret_places(config.model_dump(mode="json"))
    if places:
        raise ConfigError(
            f"{', '.join(places)} holds a secret, and settings are written to the run folder in the clear",
            "leave it out and use the environment, for MLflow MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN",
        )


def _write_config(config: TrainConfig, paths: RunPaths) -> None:
    paths.logs.mkdir(parents=True, exist_ok=True)
    paths.config.write_text(dump(config), encoding="utf-8")


def _refuse_new_identity(overrides: Sequence[str]) -> None:
    names = [o.split("=", 1)[0].lstrip("+~") for o in overrides]
    fixed = [n for n in names if not n.startswith(_CHANGEABLE_ON_RESUME)]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)} can't change when a run is resumed",
            "only loop, monitor and track settings can; start a new run for the rest",
        )


def _client_state(path: Path) -> Path:
    """A run or checkpoint folder stands for the record of what had been read when the checkpoint was written."""
    if path.is_file():
        return path.resolve()
    try:
        checkpoint = find_weights(path).resolve().parent
    except CheckpointError as e:
        raise ConfigError(f"data.after: {e.message}", "give a run folder or one of its checkpoints") from None
    if not (checkpoint / CLIENT_STATE).is_file():
        raise ConfigError(f"data.after: {path} is no run", "give a run folder or one of its checkpoints")
    return checkpoint / CLIENT_STATE


def _weights(path: Path) -> Path:
    """A run or checkpoint folder stands for its weights, so that a stage can start from the one before."""
    try:
        return find_weights(path).resolve()
    except CheckpointError as e:
        raise ModelError(
            f"model.path: {e.message}",
            "give a Hugging Face folder or a run folder; `fp8ctl model import` makes one from a GGUF file",
        ) from None
