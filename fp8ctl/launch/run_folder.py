"""Makes run folders: a name, settings written once, nothing overwritten."""

from __future__ import annotations

import time
from pathlib import Path

from fp8ctl.config.compose import dump
from fp8ctl.config.schema import TrainConfig
from fp8ctl.errors import ConfigError
from fp8ctl.paths import RunPaths

RUNS_ROOT = Path("runs")


def run_name(config: TrainConfig) -> str:
    """Stage, model and recipe, unless the user named the run."""
    recipe = config.precision.recipe.name if config.precision.default == "fp8" else "bf16"
    return config.name or f"{config.stage}-{config.model.name}-{recipe}"


def create_run_folder(config: TrainConfig) -> tuple[TrainConfig, RunPaths]:
    """Makes the run folder and writes `config.yaml` (absolute paths, so that it means the same from anywhere).

    Raises:
        ConfigError: the folder holds a run already.
    """
    name = run_name(config)
    folder = Path(config.run_dir) if config.run_dir else RUNS_ROOT / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    paths = RunPaths(folder.resolve())
    if paths.config.exists() or paths.metrics.exists():
        raise ConfigError(f"there is a run in {folder} already", f"continue it with --resume --run-dir {folder}, or choose another folder")
    resolved = config.model_copy(
        update={
            "name": name,
            "run_dir": str(paths.root),
            "model": config.model.model_copy(update={"path": _absolute(config.model.path)}),
            "data": config.data.model_copy(update={"path": _absolute(config.data.path)}),
        }
    )
    write_config(resolved, paths)
    return resolved, paths


def write_config(config: TrainConfig, paths: RunPaths) -> None:
    """Writes the resolved settings that every rank reads."""
    paths.logs.mkdir(parents=True, exist_ok=True)
    paths.config.write_text(dump(config), encoding="utf-8")


def _absolute(path: str | None) -> str | None:
    return str(Path(path).resolve()) if path else None
