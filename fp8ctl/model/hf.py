"""Hugging Face folders in and out: config.json, safetensors (one file or shards), tokenizer files.

Nothing is unpickled: `.bin` and `.pt` weights are refused. Names and sizes of all tensors are compared with what the
config asks for before the first weight is read or written, and everything that differs is said at once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fp8ctl.config.schema import ModelShape
from fp8ctl.errors import ModelError
from fp8ctl.model.shapes import hf_config, parameter_shapes, shape_from_hf_config
from fp8ctl.model.transformer import Transformer
from fp8ctl.track.record import write_json

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FLOAT_TYPES = {"F64", "F32", "BF16", "F16"}
_TIED_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_config(folder: Path | str) -> dict[str, Any]:
    """Content of config.json.

    Raises:
        ModelError: no folder, no config.json in it, or no JSON in that.
    """
    path = Path(folder) / "config.json"
    if not path.parent.is_dir():
        raise ModelError(f"no model folder: {folder}", "give a Hugging Face folder; `fp8ctl model import` makes one")
    if not path.is_file():
        raise ModelError(f"no config.json in {folder}", "a Hugging Face folder holds config.json and *.safetensors")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}", "copy it again from where the model came from") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object", "copy it again from where the model came from")
    return config


def read_shape(folder: Path | str) -> ModelShape:
    """Shape of the model in a Hugging Face folder; reads config.json only.

    Raises:
        ModelError: no such file, or a model that this one can't stand in for.
    """
    return shape_from_hf_config(read_config(folder))


def load_hf(folder: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Transformer:
    """Builds the model of a Hugging Face folder with its weights in `dtype` (None: as stored) on `device`.

    Raises:
        ModelError: no safetensors, damaged files, or tensors that are missing, left over, quantized or of the wrong
        size.
    """
    shape = read_shape(folder)
    with torch.device("meta"):
        model = Transformer(shape)
    with _open_weights(Path(folder)) as files:
        owner = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a dict)
        quantized = [n for n, file in owner.items() if file.get_slice(n).get_dtype() not in _FLOAT_TYPES]
        if quantized:
            raise ModelError(
                f"{folder} holds quantized tensors: {_some(quantized)}", "start from the weights before quantization"
            )
        if shape.tie_embeddings and _TIED_HEAD in owner:
            _check_tied_copy(owner, folder)
            del owner[_TIED_HEAD]
        sizes = {n: f.get_slice(n).get_shape() for n, f in owner.items() if not n.endswith("rotary_emb.inv_freq")}
        check_tensors(shape, sizes, source=str(folder))
        # Copies: the file stays mapped otherwise, and a later change of it would change the weights or kill the process
        state = {n: owner[n].get_tensor(n).to(device=device, dtype=dtype, copy=True) for n in parameter_shapes(shape)}
    model.load_state_dict(state, assign=True)
    return model


def check_tensors(shape: ModelShape, sizes: Mapping[str, Sequence[int]], *, source: str) -> None:
    """Compares the names and sizes of tensors with those that `shape` asks for.

    Raises:
        ModelError: any is missing, unexpected or of another size.
    """
    wanted = parameter_shapes(shape)
    problems = []
    if missing := [n for n in wanted if n not in sizes]:
        problems.append(f"missing: {_some(missing)}")
    if extra := [n for n in sizes if n not in wanted]:
        problems.append(f"unexpected: {_some(extra)}")
    wrong = [
        f"{n} {list(sizes[n])} instead of {list(wanted[n])}"
        for n in wanted
        if n in sizes and tuple(sizes[n]) != wanted[n]
    ]
    if wrong:
        problems.append(f"wrong size: {_some(wrong)}")
    if problems:
        raise ModelError(
            f"the tensors of {source} don't fit its {shape.family} config: {'; '.join(problems)}",
            "weights and config.json must come from the same model",
        )


def _some(items: Sequence[str], num: int = 3) -> str:
    more = f" and {len(items) - num:,} more" if len(items) > num else ""
    return ", ".join(items[:num]) + more


def _check_tied_copy(owner: dict[str, Any], folder: Path | str) -> None:
    if _EMBEDDING in owner and torch.equal(
        owner[_TIED_HEAD].get_tensor(_TIED_HEAD), owner[_EMBEDDING].get_tensor(_EMBEDDING)
    ):
        return
    raise ModelError(
        f"config.json of {folder} ties the head to the embedding, but {_TIED_HEAD} differs from {_EMBEDDING}",
        "set tie_word_embeddings to false in config.json, or remove the head from the weights",
    )


@contextmanager
def _open_weights(folder: Path) -> Iterator[list[Any]]:
    """The safetensors files of a folder, open for reading."""
    with ExitStack() as stack:
        files = []
        for path in weight_files(folder):
            try:
                files.append(stack.enter_context(safe_open(path, framework="pt")))
            except (SafetensorError, OSError) as e:
                raise ModelError(
                    f"{path} is damaged or only half written: {e}", "copy it again from where the model came from"
                ) from None
        yield files


def weight_files(folder: Path | str) -> list[Path]:
    """The safetensors files that hold a model: the single one, or all shards that the index names.

    Raises:
        ModelError: there is none, a shard is missing, or there are only pickles.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            shards = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(
                f"{folder / INDEX} is no index of shards", "copy it again from where the model came from"
            ) from None
        # Only plain names: an index must not lead to files outside the folder
        absent = [s for s in shards if Path(s).name != s or not (folder / s).is_file()]
        if absent or not shards:
            raise ModelError(
                f"{folder} lacks shards that its index names: {_some(absent) or 'all'}", "copy the missing files too"
            )
        return [folder / s for s in shards]
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} holds pickled weights ({_some(pickles)}), which can run code when they are read",
            "get the model as safetensors, or convert it with transformers' save_pretrained where you trust it",
        )
    raise ModelError(f"no weights in {folder}", f"a Hugging Face folder holds {WEIGHTS}, or shards with {INDEX}")


def save_hf(
    state_dict: Mapping[str, torch.Tensor],
    shape: ModelShape,
    folder: Path | str,
    *,
    tokenizer_from: Path | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a Hugging Face folder: weights in `dtype`, config.json last; tokenizer files copied from `tokenizer_from`.

    Larger models are cut into shards of at most `max_shard_bytes`. Each file appears whole or not at all; weights that
    lie in the folder from before are removed. The same state gives the same bytes.

    Raises:
        ModelError: tensors that don't fit `shape`, or files that can't be written (disk full).
    """
    check_tensors(shape, {n: tuple(t.shape) for n, t in state_dict.items()}, source="the state")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(shape, dtype, max_shard_bytes)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [WEIGHTS]
    for name, members in zip(names, shards, strict=True):
        tensors = {n: state_dict[n].detach().to(device="cpu", dtype=dtype).contiguous() for n in members}
        _write_safetensors(tensors, folder / name)
    for stale in {folder / INDEX, *folder.glob("model*.safetensors")} - {folder / n for n in names}:
        stale.unlink(missing_ok=True)
    if len(shards) > 1:
        total = sum(state_dict[n].numel() for n in state_dict) * dtype.itemsize
        weight_map = {n: name for name, members in zip(names, shards, strict=True) for n in members}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    config = hf_config(shape, str(dtype).removeprefix("torch."))
    if tokenizer_from is not None:
        config |= copy_tokenizer(Path(tokenizer_from), folder)
    write_json(folder / "config.json", config)


def copy_tokenizer(source: Path, folder: Path) -> dict[str, Any]:
    """Copies tokenizer, chat template and generation settings as far as `source` has them; gives back the special token
    ids of its config. A folder without a tokenizer is no error: a checkpoint must not fail for it.
    """
    for name in TOKENIZER_FILES:
        path = source / name
        if path.is_file() and path.resolve() != (folder / name).resolve():
            shutil.copyfile(path, folder / name)
    if not (source / "config.json").is_file():
        return {}
    return {key: value for key, value in read_config(source).items() if key in _SPECIAL_TOKENS}


def _shards(shape: ModelShape, dtype: torch.dtype, max_bytes: int) -> list[list[str]]:
    """Parameter names in the model's order, cut where the next tensor would pass the limit (Hugging Face's rule)."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in parameter_shapes(shape).items():
        num_bytes = torch.Size(size).numel() * dtype.itemsize
        if shards[-1] and used + num_bytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += num_bytes
    return shards


def _write_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary, metadata={"format": "pt"})
        os.chmod(temporary, mode)  # safetensors leaves files that only their owner can read
        os.replace(temporary, path)
    except (SafetensorError, OSError) as e:
        raise ModelError(
            f"can't write {path}: {e}", "free some space or choose another folder, then try again"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
