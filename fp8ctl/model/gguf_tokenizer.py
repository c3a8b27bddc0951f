"""The tokenizer inside a GGUF file as Hugging Face files: tokenizer.json, tokenizer_config.json,
generation_config.json.

transformers rebuilds vocabulary, merges and special tokens. How text is cut into words before the merges is set here: a
GGUF only names its rule, and transformers takes GPT-2's for names that it doesn't know. With that, SmolLM2 would still
read every text, but with other tokens than those it was trained on ("x  12" becomes five tokens instead of four).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, pre_tokenizers

from fp8ctl.errors import ModelError
from fp8ctl.track.record import write_json

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_SPLITS = {"llama-bpe": _LLAMA3, "llama-v3": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The rule that cuts text before the merges, by llama.cpp's name for it (`tokenizer.ggml.pre`).

    Raises:
        ModelError: a name not known here.
    """
    if name == "smollm":  # each digit alone, then GPT-2's rule
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelError(
        f"tokenizer rule {name!r} is not known (tokenizer.ggml.pre)",
        f"known: smollm, gpt-2, {', '.join(_SPLITS)}; or import the model's Hugging Face folder instead",
    )


def write_tokenizer(source: Path, metadata: dict[str, Any], folder: Path, *, max_positions: int) -> dict[str, int]:
    """Writes the tokenizer of the GGUF file `source`, whose scalar `metadata` is given, into `folder`.

    Gives back the ids of the special tokens by the names that config.json has for them.

    Raises:
        ModelError: not a byte-level BPE tokenizer, or one of an unknown rule.
    """
    from transformers import AutoTokenizer  # slow to import, needed only here

    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"tokenizer model {kind!r} is not supported, only byte-level BPE ('gpt2') is",
            "import the model's Hugging Face folder instead",
        )
    rule = pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = rule
    backend.save(str(folder / "tokenizer.json"))
    ids = {
        f"{ours}_token_id": int(metadata[f"tokenizer.ggml.{theirs}_token_id"])
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if f"tokenizer.ggml.{theirs}_token_id" in metadata
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        **{name.removesuffix("_id"): backend.id_to_token(token) for name, token in ids.items()},
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    write_json(folder / "tokenizer_config.json", config)
    ids.pop("unk_token_id", None)
    write_json(folder / "generation_config.json", ids)
    return ids
