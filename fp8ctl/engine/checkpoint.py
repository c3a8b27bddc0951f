"""Checkpoints: everything that a run needs to go on bit for bit, in one folder that is either complete or not there.

    step-00000100/
      manifest.json        written last: sizes and checksums, and which engine can load it
      client_state.json    what all ranks share (step, data cursor, monitor, ...)
      ranks/rank-00000.pt  what each rank has of its own (random state, ...)
      deepspeed/*.pt       DeepSpeed's weights, FP32 masters and moments
      weights/             a Hugging Face folder in BF16, so that evaluation and export need no DeepSpeed

Saving: all ranks write into `.step-00000100.tmp`, then read back, hash and flush their share of the files; rank 0 writes the
manifest and renames the folder. After each part the ranks agree whether it worked everywhere, so a full disk under one of them
becomes the same CheckpointError on all, the temporary folder is removed, and nobody waits in a barrier. DeepSpeed's own save
writes in place, without checksums, and hangs the others when one rank fails; its file access therefore goes through
`_Files`, which keeps an error until the ranks are in step again.

Loading: sizes and checksums first, then who saved it, and only then are files unpickled, with torch's restricted unpickler
(`weights_only=True`) and the short list of DeepSpeed's own types that it needs. DeepSpeed's loader alone would unpickle anything.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fp8ctl.engine.dist import Dist
from fp8ctl.engine.engine import Engine, quiet
from fp8ctl.engine.manifest import (
    CLIENT_STATE,
    MANIFEST,
    WEIGHTS,
    CheckpointManifest,
    check_contents,
    check_sizes,
    digest,
    latest,
    prune,
)
from fp8ctl.errors import CheckpointError, Fp8ctlError

__all__ = ["latest", "load_checkpoint", "prune", "save_checkpoint"]

_DEEPSPEED = "deepspeed"
_NUMPY_DTYPES = [
    type(numpy.dtype(name)) for name in ("uint8", "uint32", "uint64", "int32", "int64", "float32", "float64")
]
_NOT_WEIGHTS = ("init_std", "max_positions")  # of a model shape: neither changes what the weights compute


def save_checkpoint(
    engine: Engine,
    folder: Path,
    *,
    client_state: dict[str, Any],
    rank_state: dict[str, Any],
    write_weights: Callable[[dict[str, Tensor], Path], None],
) -> None:
    """Writes the checkpoint `folder` (`RunPaths.checkpoint(step)`); called by all ranks. An older one of that name is replaced.

    Args:
        client_state: JSON data, the same on all ranks.
        rank_state: this rank's own; tensors, NumPy arrays and plain Python values.
        write_weights: called on rank 0 with all parameters in BF16 on the CPU and the folder to write them to.

    Raises:
        CheckpointError: on every rank when any rank failed; older checkpoints are untouched and training can go on.
    """
    dist = engine.dist
    temporary = folder.with_name(f".{folder.name}.tmp")
    ranks, weights_folder = temporary / "ranks", temporary / WEIGHTS
    try:
        with _together(dist, folder, on_main_only=True) as active:
            if active:
                _make_room(engine, temporary)
                ranks.mkdir()
                weights_folder.mkdir()
        with _together(dist, folder), _files(engine) as files:
            engine.deepspeed.save_checkpoint(str(temporary), tag=_DEEPSPEED, save_latest=False)
            files.raise_error()
            _save(rank_state, ranks / _rank_file(dist.rank))
        weights = engine.gather_weights(torch.bfloat16)
        with _together(dist, folder, on_main_only=True) as active:
            if active:
                (temporary / CLIENT_STATE).write_text(json.dumps(client_state, indent=1) + "\n", encoding="utf-8")
                write_weights(weights, weights_folder)
        del weights
        names = dist.broadcast_object(_list_files(temporary) if dist.is_main else None)
        with _together(dist, folder):
            mine = {name: digest(temporary / name, sync=True) for name in _share(names, dist)}
        entries = {name: entry for part in dist.gather_objects(mine) for name, entry in part.items()}
        with _together(dist, folder, on_main_only=True) as active:
            if active:
                _manifest(engine, entries).write(temporary)
                _publish(temporary, folder)
    except CheckpointError:
        if dist.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier()
        raise


def load_checkpoint(
    engine: Engine, folder: Path, *, shape: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Puts a freshly built engine into the state of `folder` and returns (client_state, rank_state); called by all ranks.

    Args:
        shape: sizes of the model, compared with `client_state["shape"]`.

    Raises:
        CheckpointError: incomplete, damaged, or saved by another number of ranks, ZeRO stage, dtype or model.
    """
    dist = engine.dist
    with _together(dist, folder, doing="load"):
        manifest = CheckpointManifest.read(folder)
        check_sizes(folder, manifest)
        _check_engine(engine, folder, manifest)
        check_contents(folder, manifest, _share(sorted(manifest.files), dist))
    with _together(dist, folder, doing="load"):
        client_state = json.loads((folder / CLIENT_STATE).read_text(encoding="utf-8"))
        _check_shape(folder, client_state.get("shape"), shape)
        rank_state = _load(folder / "ranks" / _rank_file(dist.rank))
    with _files(engine):
        engine.deepspeed.load_checkpoint(str(folder), tag=_DEEPSPEED)
    return client_state, rank_state


@contextlib.contextmanager
def _together(dist: Dist, folder: Path, *, doing: str = "save", on_main_only: bool = False) -> Iterator[bool]:
    """Makes an exception of any rank the same CheckpointError on all, at the end of the block.

    Yields whether this rank is to act. The block must not hold a collective after something that can raise.
    """
    error: Exception | None = None
    try:
        yield dist.is_main or not on_main_only
    except Exception as raised:
        error = raised
    (failed,) = dist.all_reduce_floats([float(error is not None)], op="max")
    if not failed:
        return
    reports = dist.gather_objects(None if error is None else _explain(error))
    rank, (message, hint) = next((r, report) for r, report in enumerate(reports) if report is not None)
    by_rank = f" (rank {rank})" if dist.world_size > 1 else ""
    what = message if doing == "load" else f"could not {doing} {folder.name}{by_rank}: {message}"
    raise CheckpointError(what, hint) from error


def _explain(error: Exception) -> tuple[str, str | None]:
    if isinstance(error, Fp8ctlError):
        return error.message, error.hint
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return "the disk is full", "free some space or lower loop.keep_checkpoints; older checkpoints are untouched"
    if number in (errno.EACCES, errno.EROFS, errno.EPERM):
        return text, "make the run folder writable; older checkpoints are untouched"
    return text, None


def _make_room(engine: Engine, temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    numel = sum(math.prod(shape) for shape in engine.parameter_shapes.values())
    # Weights, FP32 masters and two moments, and the weights folder in BF16
    needed = numel * (engine.dtype.itemsize + 12 + 2)
    free = shutil.disk_usage(temporary).free
    if free < needed:
        raise CheckpointError(
            f"the disk has {free / 1e9:.3g} GB free, a checkpoint takes about {needed / 1e9:.3g} GB",
            "free some space or lower loop.keep_checkpoints; older checkpoints are untouched",
        )


def _manifest(engine: Engine, entries: dict[str, Any]) -> CheckpointManifest:
    import deepspeed

    return CheckpointManifest(
        world_size=engine.dist.world_size,
        zero_stage=engine.zero_stage,
        dtype=_name(engine.dtype),
        parameters={name: list(shape) for name, shape in engine.parameter_shapes.items()},
        versions={"torch": torch.__version__, "deepspeed": deepspeed.__version__},
        files=dict(sorted(entries.items())),
    )


def _publish(temporary: Path, folder: Path) -> None:
    for directory in [temporary, *(d for d in temporary.rglob("*") if d.is_dir())]:
        _sync_directory(directory)
    replaced = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    _sync_directory(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_engine(engine: Engine, folder: Path, manifest: CheckpointManifest) -> None:
    anew = f"or start a new run from its weights with model.path={folder / WEIGHTS}"
    for what, setting, saved, now in (
        ("on {} ranks", "launch.num_ranks", manifest.world_size, engine.dist.world_size),
        ("at ZeRO stage {}", "engine.zero_stage", manifest.zero_stage, engine.zero_stage),
        ("in {}", "engine.dtype", manifest.dtype, _name(engine.dtype)),
    ):
        if saved != now:
            raise CheckpointError(
                f"{folder} was saved {what.format(saved)}, this run is {what.format(now)}",
                f"resume with {setting}={saved}, {anew}",
            )
    here = {name: list(shape) for name, shape in engine.parameter_shapes.items()}
    if here == manifest.parameters:
        return
    name = next(n for n in [*here, *manifest.parameters] if here.get(n) != manifest.parameters.get(n))
    saved_shape, shape = manifest.parameters.get(name, "absent"), here.get(name, "absent")
    raise CheckpointError(
        f"{folder} belongs to another model: {name} is {saved_shape} there and {shape} here",
        "resume with the model it was saved from",
    )


def _check_shape(folder: Path, saved: dict[str, Any] | None, now: dict[str, Any] | None) -> None:
    if saved is None or now is None:
        return
    differing = [k for k in now if k not in _NOT_WEIGHTS and saved.get(k) != now[k]]
    if differing:
        k = differing[0]
        raise CheckpointError(
            f"{folder} belongs to another model: {k} is {saved.get(k)} there and {now[k]} here",
            "resume with the model it was saved from",
        )


def _name(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp32"


def _rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def _list_files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)


def _share(names: list[str], dist: Dist) -> list[str]:
    return names[dist.rank :: dist.world_size]


class _Files:
    """DeepSpeed's file access (the interface of its CheckpointEngine) that keeps the first error instead of raising it."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def raise_error(self) -> None:
        """Raises what went wrong since DeepSpeed began, if anything did."""
        if self._error is not None:
            raise self._error

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._keep_error(lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        self._keep_error(lambda: _save(state_dict, path))

    def load(self, path: str, map_location: Any = None) -> Any:
        return _load(path)

    def create(self, info: Any) -> None:
        """Nothing to announce."""

    def commit(self, info: Any) -> bool:
        return True

    def is_decoupled(self) -> bool:
        return False

    def _keep_error(self, act: Callable[[], None]) -> None:
        if self._error is None:
            try:
                act()
            except Exception as error:
                self._error = error


@contextlib.contextmanager
def _files(engine: Engine) -> Iterator[_Files]:
    """DeepSpeed saves and loads through the `_Files` that this yields, quietly."""
    deepspeed_engine, files = engine.deepspeed, _Files()
    usual = deepspeed_engine.checkpoint_engine
    deepspeed_engine.checkpoint_engine = files
    # It would copy scripts into each checkpoint, and raise on one rank alone when that fails
    deepspeed_engine._copy_recovery_script = lambda _folder: None
    # It would look for its file with a glob, in which a run folder named `a[1]` means something else
    deepspeed_engine._get_all_ckpt_names = lambda folder, tag: [deepspeed_engine._get_ckpt_name(folder, tag)]
    try:
        with quiet():
            yield files
    finally:
        deepspeed_engine.checkpoint_engine = usual
        del deepspeed_engine._copy_recovery_script, deepspeed_engine._get_all_ckpt_names


def _save(value: Any, path: str | Path) -> None:
    # Through a file object of ours: torch's own file writer turns a full disk into a RuntimeError without errno
    with open(path, "wb") as f:
        torch.save(value, f)


def _load(path: str | Path) -> Any:
    try:
        with torch.serialization.safe_globals(_trusted_types()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # torch's text advises to trust the file
        raise CheckpointError(
            f"{path} holds what no checkpoint of this version holds, and was not loaded",
            "resume with the version that wrote it; do not trust the file if it came from someone else",
        ) from error


def _trusted_types() -> list[Any]:
    """What DeepSpeed and NumPy put into checkpoints beside tensors and plain Python values."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    rebuild_array = numpy.empty(0).__reduce__()[0]
    arrays = [rebuild_array, numpy.ndarray, numpy.dtype, *_NUMPY_DTYPES, codecs.encode]
    return [LossScaler, ZeroStageEnum, fragment_address, *arrays]
