"""Which weights an evaluation reads: a run's newest complete checkpoint, one checkpoint, or any Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from fp8ctl.engine.manifest import MANIFEST, WEIGHTS, checkpoint_step, find_weights
from fp8ctl.errors import CheckpointError, ConfigError, ModelError
from fp8ctl.paths import RunPaths

# Everything in a model folder that changes an answer; notes on where it came from don't count.
_FINGERPRINTED = (
    "*.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Target:
    """The model to evaluate."""

    weights: Path
    """Hugging Face folder: config.json, safetensors, tokenizer."""
    run: Path | None = None
    """Run folder that the weights belong to, if any."""
    step: int | None = None
    """Optimizer steps behind the weights, where they are a checkpoint's."""


def find_target(model: str | None) -> Target:
    """Finds the weights that `model` means.

    Raises:
        ConfigError: no model given.
        ModelError: no such folder, nothing in it that can be evaluated, or no complete checkpoint.
    """
    if model is None:
        raise ConfigError("no model to evaluate", "give model=RUN, model=RUN/checkpoints/step-N or model=HF_FOLDER")
    try:
        weights = find_weights(Path(model)).resolve()
    except CheckpointError as error:  # a user's mistake here, not a failed run
        raise ModelError(error.message, error.hint) from None
    checkpoint = weights.parent
    if weights.name != WEIGHTS or not checkpoint.name.startswith("step-"):
        return Target(weights)
    if not (checkpoint / MANIFEST).is_file():
        raise ModelError(
            f"checkpoint {checkpoint} is incomplete", "give the run folder: its newest complete checkpoint is taken"
        )
    run = checkpoint.parent.parent
    return Target(weights, run if RunPaths(run).config.is_file() else None, checkpoint_step(checkpoint))


def fingerprint(weights: Path) -> str:
    """Hash of all that makes the model answer as it does: weights, shape, tokenizer, template, generation settings."""
    digest = xxhash.xxh3_128()
    for file in sorted({f for pattern in _FINGERPRINTED for f in weights.glob(pattern)}):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with open(file, "rb") as f:
            while chunk := f.read(1 << 22):
                digest.update(chunk)
    return f"xxh3:{digest.hexdigest()}"
