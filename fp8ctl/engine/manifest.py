"""What makes a checkpoint folder complete: a manifest, written last, with size and checksum of every other file.

A folder under its final name with a matching manifest is complete; anything else is not a checkpoint. Needs neither torch nor
DeepSpeed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from fp8ctl.errors import CheckpointError
from fp8ctl.paths import RunPaths

MANIFEST = "manifest.json"
WEIGHTS = "weights"
CLIENT_STATE = "client_state.json"
SCHEMA = 1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    bytes: int
    xxh3_128: str
    """Checksum against damage by disks and copies; it is no protection against forgery."""


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint holds and which engine can load it."""

    world_size: int
    zero_stage: int
    dtype: str
    parameters: dict[str, list[int]]
    """Shape of every parameter by name."""
    versions: dict[str, str]
    files: dict[str, FileEntry]
    """Every file but the manifest, by path relative to the folder."""

    def write(self, folder: Path) -> None:
        """Writes manifest.json and makes it durable."""
        with open(folder / MANIFEST, "w", encoding="utf-8") as f:
            json.dump({"schema": SCHEMA, **dataclasses.asdict(self)}, f, indent=1)
            f.write("\n")
            f.flush()
            os.fsync(f.fileno())

    @classmethod
    def read(cls, folder: Path) -> CheckpointManifest:
        """Reads the manifest of a folder.

        Raises:
            CheckpointError: there is none, it is damaged, or it was written by a newer version.
        """
        try:
            raw: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            schema = raw.pop("schema")
            if schema != SCHEMA:
                raise CheckpointError(
                    f"{folder} has checkpoint schema {schema}, this version reads {SCHEMA}",
                    "use the version that wrote it",
                )
            files = {name: FileEntry(**entry) for name, entry in raw.pop("files").items()}
            return cls(**raw, files=files)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}", _OLDER) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}", _OLDER) from error


_OLDER = "resume from an older checkpoint: move this folder away"


def check_sizes(folder: Path, manifest: CheckpointManifest) -> None:
    """Raises CheckpointError when a file is missing or has another size."""
    for name, entry in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder} is damaged: {name}: {error.strerror}", _OLDER) from error
        if found != entry.bytes:
            raise CheckpointError(f"{folder} is damaged: {name} has {found:,} bytes instead of {entry.bytes:,}", _OLDER)


def check_contents(folder: Path, manifest: CheckpointManifest, names: list[str]) -> None:
    """Reads the files `names` and raises CheckpointError when one differs from its checksum."""
    for name in names:
        if digest(folder / name).xxh3_128 != manifest.files[name].xxh3_128:
            raise CheckpointError(f"{folder} is damaged: the checksum of {name} differs", _OLDER)


def digest(path: Path, *, sync: bool = False) -> FileEntry:
    """Size and checksum of a file; with `sync` its contents have reached the disk on return."""
    state, size = xxhash.xxh3_128(), 0
    with open(path, "rb") as f:
        if sync:
            os.fsync(f.fileno())
        while chunk := f.read(_CHUNK_BYTES):
            state.update(chunk)
            size += len(chunk)
    return FileEntry(size, state.hexdigest())


def is_complete(folder: Path) -> bool:
    """Whether a folder has a manifest and every file in the right size (contents are not read)."""
    try:
        check_sizes(folder, CheckpointManifest.read(folder))
    except CheckpointError:
        return False
    return True


def latest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint in the folder `checkpoints`; damaged and unfinished ones are passed over."""
    return next((folder for folder in reversed(_by_step(checkpoints)) if is_complete(folder)), None)


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
        checkpoint = latest(RunPaths(source).checkpoints)
        if checkpoint is not None:
            return checkpoint / WEIGHTS
        raise CheckpointError(
            f"no complete checkpoint in {source}", "let the run reach its first loop.save_every_steps, or its end"
        )
    what = "holds no model" if source.exists() else "does not exist"
    raise CheckpointError(f"{source} {what}", "give a run folder, a checkpoint folder or a Hugging Face folder")


def prune(checkpoints: Path, *, keep: int) -> list[Path]:
    """Deletes all but the newest `keep` complete checkpoints, and what killed saves left behind; returns what is gone.

    Call it on one rank after a save. Damaged checkpoints stay, for a person to look at.
    """
    assert keep > 0, "deleting every checkpoint is never meant"
    complete = [folder for folder in _by_step(checkpoints) if is_complete(folder)]
    gone = complete[:-keep] + sorted(checkpoints.glob(".step-*.tmp")) + sorted(checkpoints.glob(".step-*.old"))
    for folder in gone:
        # Without its manifest it is no checkpoint any more, also when the rest is interrupted
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def _by_step(checkpoints: Path) -> list[Path]:
    return sorted(folder for folder in checkpoints.glob("step-*") if folder.is_dir())
