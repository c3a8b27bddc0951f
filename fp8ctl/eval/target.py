"""Which weights an evaluation reads: a run's newest complete checkpoint, one checkpoint, or any Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from fp8ctl.errors import ConfigError, ModelError
from fp8ctl.paths import RunPaths

_WEIGHTS = "weights"
_MANIFEST = "manifest.json"
# Everything in a model folder that changes an answer; README and the like don't count.
_FINGERPRINTED = ("*.safetensors", "*.json", "chat_template.jinja")


@dataclass(frozen=True)
class Target:
    """The model to evaluate."""

    weights: Path
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    run: Path | None = None
    """Run folder that the weights belong to, if any."""
    checkpoint: Path | None = None
    """Checkpoint folder that the weights belong to, if any."""

    @property
    def step(self) -> int | None:
        """Optimizer steps behind the weights, by the checkpoint's name."""
        return int(self.checkpoint.name.rsplit("-", 1)[-1]) if self.checkpoint else None


def find_target(model: str | None) -> Target:
    """Finds the weights that `model` means.

    Raises:
        ConfigError: no model given.
        ModelError: no such folder, nothing in it that can be evaluated, or no complete checkpoint.
    """
    if model is None:
        raise ConfigError("no model to evaluate", "give model=RUN, model=RUN/checkpoints/step-N or model=HF_FOLDER")
    folder = Path(model)
    if not folder.is_dir():
        raise ModelError(f"no model folder: {model}", "give a run folder, a checkpoint folder or a Hugging Face folder")
    if (folder / "config.json").is_file():
        return _of_weights(folder)
    if (folder / _WEIGHTS).is_dir() or folder.parent.name == RunPaths(folder).checkpoints.name:
        return _of_checkpoint(folder)
    paths = RunPaths(folder)
    if not (paths.config.is_file() or paths.checkpoints.is_dir()):
        raise ModelError(
            f"nothing to evaluate in {model}",
            "a run folder holds config.yaml and checkpoints/, a Hugging Face folder config.json and *.safetensors",
        )
    complete = [c for c in sorted(paths.checkpoints.glob("step-*")) if _is_complete(c)]
    if not complete:
        raise ModelError(
            f"no complete checkpoint in {paths.checkpoints}",
            "wait for the run to save one (loop.save_every_steps), or go on training with --resume",
        )
    return Target(complete[-1] / _WEIGHTS, run=folder, checkpoint=complete[-1])


def fingerprint(weights: Path) -> str:
    """Hash of all that makes the model answer as it does: weights, shape, tokenizer, template, generation settings."""
    digest = xxhash.xxh3_128()
    for file in sorted({f for pattern in _FINGERPRINTED for f in weights.glob(pattern)}):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with open(file, "rb") as f:
            while chunk := f.read(1 << 22):
                digest.update(chunk)
    return f"xxh3:{digest.hexdigest()}"


def _of_weights(folder: Path) -> Target:
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"no *.safetensors in {folder}", "convert the weights first: fp8ctl model import SRC DST")
    checkpoint = folder.resolve().parent
    if folder.resolve().name == _WEIGHTS and _is_complete(checkpoint):
        return Target(folder, run=_run_of(checkpoint), checkpoint=checkpoint)
    return Target(folder)


def _of_checkpoint(folder: Path) -> Target:
    if not _is_complete(folder):
        raise ModelError(
            f"checkpoint {folder} is incomplete",
            f"a complete one holds {_MANIFEST} and {_WEIGHTS}/; give the run folder for its newest complete checkpoint",
        )
    return Target(folder / _WEIGHTS, run=_run_of(folder.resolve()), checkpoint=folder)


def _is_complete(checkpoint: Path) -> bool:
    # the manifest is what the rename of a finished save brings along
    return (checkpoint / _MANIFEST).is_file() and (checkpoint / _WEIGHTS / "config.json").is_file()


def _run_of(checkpoint: Path) -> Path | None:
    root = checkpoint.parent.parent
    return root if RunPaths(root).config.is_file() else None
