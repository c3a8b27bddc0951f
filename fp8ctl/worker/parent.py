"""Where a run's weights come from: the run of the stage before, and whether what that was trained on fits what comes now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError

from fp8ctl.config.schema import DataConfig, TrainConfig
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.mixing import source_paths
from fp8ctl.data.tokenizer import load_tokenizer
from fp8ctl.engine.manifest import WEIGHTS, CheckpointManifest
from fp8ctl.errors import CheckpointError, ConfigError, DataError
from fp8ctl.eval.target import find_target
from fp8ctl.track.record import RunRecord

# Settings of a preparation that change how a conversation reads
_RENDERING = ("chat_template", "chat_template_hash", "system_prompt", "default_system")


@dataclass(frozen=True)
class Parent:
    """The weights that a run starts from."""

    path: str
    """The run's folder, or else the model's."""
    stage: str | None = None
    step: int | None = None
    """Optimizer steps behind the weights, where they are a run's."""
    hash: str | None = None
    """Of the checksums of the checkpoint's weights."""


def find_parent(config: TrainConfig) -> Parent | None:
    """What `model.path` is; None for random weights.

    Raises:
        ModelError: there are no weights.
    """
    if config.model.path is None:
        return None
    target = find_target(config.model.path)
    if target.run is None:
        return Parent(str(target.weights))
    return Parent(
        str(target.run), RunRecord(target.run).config().get("stage"), target.step, _hash(target.weights.parent)
    )


def check_hand_off(config: TrainConfig) -> list[str]:
    """Compares the data with the tokenizer of the weights, and with what the stage before was trained on.

    Returns:
        Warnings: what differs and may be meant.

    Raises:
        ConfigError: a run that would start from itself.
        DataError: data of another tokenizer.
    """
    if config.model.path is None:
        return []
    manifests = {path: Manifest.read(path) for path in source_paths(config.data)}
    warnings = list(_tokenizer_warnings(Path(config.model.path), manifests))
    run = find_target(config.model.path).run
    if run is not None:
        if config.run_dir and Path(config.run_dir).resolve() == run.resolve():
            raise ConfigError(
                f"the run in {run} can't start from itself", "use --resume to go on, or another --run-dir"
            )
        warnings += _parent_warnings(config, run, manifests)
    return warnings


def _hash(checkpoint: Path) -> str | None:
    try:
        files = CheckpointManifest.read(checkpoint).files
    except CheckpointError:
        return None
    weights = sorted((name, entry.xxh3_128) for name, entry in files.items() if name.startswith(f"{WEIGHTS}/"))
    return f"xxh3:{xxhash.xxh3_128_hexdigest(repr(weights).encode())}"


def _tokenizer_warnings(weights: Path, manifests: dict[str, Manifest]) -> Iterator[str]:
    if not (weights / "tokenizer.json").is_file():
        yield f"{weights} has no tokenizer.json: nothing says whether the data fits the model"
        return
    own = load_tokenizer(weights)
    for path, manifest in manifests.items():
        if manifest.tokenizer_fingerprint == own.fingerprint:
            continue
        theirs = _vocabulary(manifest.prepared.get("tokenizer"), manifest.tokenizer_fingerprint)
        if manifest.vocab_size != own.vocab_size or (
            theirs and theirs != own.backend.get_vocab(with_added_tokens=True)
        ):
            raise DataError(
                f"{path} was prepared with another tokenizer ({manifest.vocab_size:,} tokens) than that of {weights} "
                f"({own.vocab_size:,} tokens)",
                "prepare the data again with the tokenizer of the model",
            )
        if theirs is None:
            yield f"the tokenizer.json of {weights} is not the one that {path} was prepared with, which can't be found any more"


def _vocabulary(folder: Any, fingerprint: str) -> dict[str, int] | None:
    """Tokens of the tokenizer that data was prepared with, where it is still there."""
    try:
        tokenizer = load_tokenizer(folder) if folder else None
    except DataError:
        return None
    found = tokenizer is not None and tokenizer.fingerprint == fingerprint
    return tokenizer.backend.get_vocab(with_added_tokens=True) if tokenizer is not None and found else None


def _parent_warnings(config: TrainConfig, run: Path, manifests: dict[str, Manifest]) -> Iterator[str]:
    record = RunRecord(run)
    settings, status = record.config(), record.json(record.paths.status)
    if (state := status.get("state")) not in (None, "finished"):
        yield f"the run in {run}, from whose weights this one starts, is not finished ({state} at step {status.get('step')})"
    if settings.get("stage") == "sft" and config.stage == "cpt":
        yield f"continual pre-training starts from the fine-tuned weights of {run}"
    if settings.get("stage") != config.stage or config.stage != "sft":
        return
    try:
        before = [Manifest.read(p) for p in source_paths(DataConfig.model_validate(settings.get("data")))]
    except (DataError, ValidationError):
        yield f"the data of {run} can't be found any more: nothing says whether its chat template was this one"
        return
    for path, manifest in manifests.items():
        now = {key: manifest.prepared.get(key) for key in _RENDERING}
        then = {key: old.prepared.get(key) for old in before for key in _RENDERING}
        differing = [f"{key} {then[key]} then, {now[key]} now" for key in _RENDERING if now[key] != then[key]]
        if differing:
            yield f"{path} renders conversations in another way than the data of {run}: {'; '.join(differing)}"
