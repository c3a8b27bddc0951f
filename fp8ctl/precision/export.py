"""Hugging Face folders to hand on: the weights as they are, or linears stored in FP8 by 128x128 blocks.

The FP8 layout is DeepSeek-V3's, which transformers (FineGrainedFP8) and vLLM read: `NAME.weight` in E4M3 beside
`NAME.weight_scale_inv` in FP32, one value per block, weight = code * scale_inv; what stays as it was is listed in
config.json under quantization_config.modules_to_not_convert. With pow2 scales the stored values are bit for bit those
that an FP8 run with this recipe multiplies.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fp8ctl.config.schema import ModelShape
from fp8ctl.errors import ModelError, PrecisionError
from fp8ctl.fp8.formats import E4M3, TILE, ScaleKind
from fp8ctl.fp8.reference import quantize_block
from fp8ctl.model.hf import INDEX, TOKENIZER_FILES, read_config, read_shape, weight_files
from fp8ctl.model.shapes import linear_shapes
from fp8ctl.precision.plan import HEAD, nearest
from fp8ctl.track.record import write_json

# vLLM fuses these into one GEMM and refuses to load when only some of its parts are FP8
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class ExportSummary:
    """What an FP8 export stored how."""

    fp8_linears: tuple[str, ...]
    """Stored in FP8."""
    kept_linears: tuple[str, ...]
    """Stored as they were; the head is always one of them."""
    source_bytes: int
    """Size of the weight files read."""
    bytes: int
    """Size of the weight files written."""


def export_hf(model_folder: Path | str, dst: Path | str) -> None:
    """Copies a Hugging Face folder: config, weights, tokenizer, nothing else. `dst` appears whole or not at all.

    Raises:
        ModelError: no model in `model_folder`, `dst` holds something already, or it can't be written.
    """
    source = Path(model_folder)
    read_shape(source)
    files = weight_files(source)
    with _new_folder(Path(dst)) as folder:
        for path in files:
            shutil.copyfile(path, folder / path.name)
        _copy_small_files(source, folder, ("config.json", *([INDEX] if len(files) > 1 else []), *TOKENIZER_FILES))


def export_fp8_block(
    model_folder: Path | str,
    dst: Path | str,
    *,
    scale_kind: ScaleKind = "pow2",
    keep: Collection[str] = (),
    short_blocks: bool = False,
) -> ExportSummary:
    """Writes a Hugging Face folder whose block linears are E4M3 with a scale per 128x128 block.

    Embedding, norms, biases and head stay as they are. `dst` appears whole or not at all; shards stay shards.

    Args:
        keep: names of linears to leave as they are, e.g. those that the plan runs in BF16. Linears that vLLM fuses
            with them (q, k, v; gate, up) stay too.
        short_blocks: also store weights with a side that is no multiple of 128 (last block short, ceil(size / 128)
            scales). Off by default: transformers infers the block size by dividing the weight's shape by that of the
            scales when it dequantises, and fails on such a weight or, worse, gets other blocks; vLLM refuses some.

    Raises:
        ModelError: no model in `model_folder`, `dst` holds something already, or it can't be written.
        PrecisionError: `keep` names no linear of the model, or no linear is left to store in FP8.
    """
    source = Path(model_folder)
    shape = read_shape(source)
    config, files = read_config(source), weight_files(source)
    fp8_linears, kept_linears = _choose(shape, keep, short_blocks)
    with _new_folder(Path(dst)) as folder:
        weight_map: dict[str, str] = {}
        for path in files:
            tensors = _quantized_shard(path, {f"{fqn}.weight" for fqn in fp8_linears}, scale_kind)
            _write_safetensors(tensors, folder / path.name)
            weight_map |= dict.fromkeys(tensors, path.name)
        total_bytes = sum((folder / path.name).stat().st_size for path in files)
        if len(files) > 1:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(folder / INDEX, index)
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [TILE, TILE],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": list(kept_linears),
        }
        write_json(folder / "config.json", config)
        _copy_small_files(source, folder, TOKENIZER_FILES)
    return ExportSummary(fp8_linears, kept_linears, sum(path.stat().st_size for path in files), total_bytes)


def _choose(shape: ModelShape, keep: Collection[str], short_blocks: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the linears to store in FP8, and of the others."""
    linears = linear_shapes(shape)
    if unknown := [fqn for fqn in keep if fqn not in linears]:
        raise PrecisionError(
            f"no linear {unknown[0]!r} to keep as it is{nearest(unknown[0], linears)}", "use names from plan.json"
        )
    kept_groups = {_group(fqn) for fqn in (HEAD, *keep)}
    if not short_blocks:
        kept_groups |= {_group(fqn) for fqn, size in linears.items() if any(side % TILE for side in size)}
    fp8_linears = tuple(fqn for fqn in linears if _group(fqn) not in kept_groups)
    if not fp8_linears:
        raise PrecisionError(
            f"no linear can be stored in whole {TILE}x{TILE} blocks (hidden size {shape.hidden_size})",
            "export as hf: readers of FP8 folders mistake short blocks",
        )
    return fp8_linears, tuple(fqn for fqn in linears if _group(fqn) in kept_groups)


def _group(fqn: str) -> str:
    parent, _, name = fqn.rpartition(".")
    return f"{parent}.{_FUSED.get(name, name)}"


def _quantized_shard(path: Path, to_quantize: Collection[str], scale_kind: ScaleKind) -> dict[str, torch.Tensor]:
    tensors = {}
    try:
        with safe_open(path, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensor = f.get_tensor(name)
                if name in to_quantize:
                    q = quantize_block(tensor, E4M3, scale_kind)
                    tensors[name], tensors[f"{name}_scale_inv"] = q.codes, q.scale_inv
                else:
                    tensors[name] = tensor
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{path} can't be read: {e}", "copy it again from where the model came from") from None
    return tensors


def _write_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors leaves files that only their owner can read


def _copy_small_files(source: Path, folder: Path, names: Collection[str]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


@contextmanager
def _new_folder(dst: Path) -> Iterator[Path]:
    """A hidden folder beside `dst` that takes its name when everything is written, and goes when something fails."""
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise ModelError(f"{dst} already holds something", "give a folder that does not exist yet")
    hidden = dst.with_name(f".{dst.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        os.replace(hidden, dst)
    except (SafetensorError, OSError) as e:
        raise ModelError(
            f"can't write {dst}: {e}", "free some space or choose another folder, then try again"
        ) from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
