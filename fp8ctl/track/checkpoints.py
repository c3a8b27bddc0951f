"""Finds checkpoints and weights on disk; needs no torch, so that reports and the launcher can use it."""

from __future__ import annotations

from pathlib import Path

from fp8ctl.errors import CheckpointError
from fp8ctl.paths import RunPaths

MANIFEST = "manifest.json"
WEIGHTS = "weights"


def complete_checkpoints(paths: RunPaths) -> list[Path]:
    """Checkpoints of a run, oldest first; one that was not finished has another name and no manifest."""
    return sorted(p for p in paths.checkpoints.glob("step-*") if (p / MANIFEST).is_file())


def checkpoint_step(checkpoint: Path) -> int:
    """Number of optimizer steps behind a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def find_weights(source: Path) -> Path:
    """Hugging Face folder for `source`: itself, a checkpoint's weights, or those of a run's newest checkpoint.

    Raises:
        CheckpointError: nothing there, or a run without a complete checkpoint.
    """
    if (source / "config.json").is_file():
        return source
    if (source / WEIGHTS / "config.json").is_file():
        return source / WEIGHTS
    if (source / "config.yaml").is_file():
        checkpoints = complete_checkpoints(RunPaths(source))
        if checkpoints:
            return checkpoints[-1] / WEIGHTS
        raise CheckpointError(
            f"no complete checkpoint in {source}", "let the run reach its first loop.save_every_steps, or its end"
        )
    what = "holds no model" if source.exists() else "does not exist"
    raise CheckpointError(f"{source} {what}", "give a run folder, a checkpoint folder or a Hugging Face folder")
