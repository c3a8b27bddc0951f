"""A Hugging Face tokenizer folder, loaded without transformers: ids of documents and of rendered chats.

Documents are encoded by a copy of the tokenizer that may give no ids of control tokens (`raw_text.py`), chats by the tokenizer as
it is. Neither adds tokens of its own accord: begin and end of text come where the settings ask for them.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Encoding, Tokenizer, processors

from fp8ctl.data.raw_text import ControlTokens, RawText
from fp8ctl.errors import DataError


@dataclass(frozen=True)
class TextTokenizer:
    """The tokenizer of one model folder; make it with `load_tokenizer`."""

    folder: Path
    backend: Tokenizer
    vocab_size: int
    """Largest id that the tokenizer can give, added tokens included, plus one."""
    eos_id: int | None
    """End-of-text token as the folder's configuration names it."""
    special_tokens: dict[str, int]
    """Control tokens: the added tokens that are flagged special."""
    template_variables: dict[str, str]
    """bos_token, eos_token and their like, as chat templates expect them."""
    chat_template: str | None
    """Source of the folder's own chat template."""
    fingerprint: str
    """Hash of tokenizer.json."""
    bos_id: int | None = None
    """Begin-of-text token as the folder's configuration names it."""
    control_tokens: ControlTokens = "text"
    """What becomes of control tokens that are written in documents: see `DataPrepConfig.document_control_tokens`."""

    def encode_documents(self, texts: list[str]) -> list[np.ndarray]:
        """Ids (int32) of each text; long ones are encoded in pieces, with the same result.

        Raises:
            DataError: at the first call, where this tokenizer can't keep control tokens as text.
            ValueError: a long text that can't be encoded in pieces.
            Exception: the tokenizer refuses a text.
        """
        return self._raw_text.encode(texts)

    def holds_control_text(self, text: str) -> bool:
        """Whether a control token is written in a document, whatever becomes of it."""
        return self._raw_text.holds_control_text(text)

    @functools.cached_property
    def _raw_text(self) -> RawText:
        return RawText((self.folder / "tokenizer.json").read_bytes(), self.control_tokens)

    def encode_chat(self, text: str, *, special_as_text: bool = False) -> tuple[np.ndarray, Encoding]:
        """Ids (int32, [T]) of a rendered chat, control tokens included, and what knows their places in the text.

        Args:
            special_as_text: encode tokens that are flagged special as the characters they are made of.
        """
        self.backend.encode_special_tokens = special_as_text
        encoding = self.backend.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32), encoding

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """Text of ids, control tokens shown."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches any control token in a text."""
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def load_tokenizer(folder: Path | str, control_tokens: ControlTokens = "text") -> TextTokenizer:
    """Loads a folder that holds tokenizer.json and, beside it, the usual configuration files.

    Args:
        control_tokens: what becomes of control tokens that are written in documents.

    Raises:
        DataError: no such folder or file, or a file that can't be read.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise DataError(
            f"no tokenizer.json in {folder}", "give the folder of a Hugging Face model (`fp8ctl model import`)"
        )
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise DataError(f"{path} can't be read: {error}", "copy the file again from the model's folder") from None
    # A tokenizer.json may carry truncation or padding from somebody's last use of it: both would silently change data.
    backend.no_truncation()
    backend.no_padding()
    # Only here to keep white space inside the character ranges; it adds no tokens.
    backend.post_processor = processors.ByteLevel(trim_offsets=False)

    settings = _read_json(folder / "tokenizer_config.json")
    variables = {
        name: _token_text(settings.get(name))
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if _token_text(settings.get(name))
    }
    return TextTokenizer(
        folder=folder,
        backend=backend,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        eos_id=_token_id(folder, backend, "eos_token", variables),
        bos_id=_token_id(folder, backend, "bos_token", variables),
        control_tokens=control_tokens,
        special_tokens={t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special},
        template_variables=variables,
        chat_template=_chat_template(folder, settings),
        fingerprint=xxhash.xxh3_128_hexdigest(path.read_bytes()),
    )


def _token_id(folder: Path, backend: Tokenizer, which: str, variables: dict[str, str]) -> int | None:
    token = variables.get(which)
    if token is not None and backend.token_to_id(token) is not None:
        return backend.token_to_id(token)
    for name in ("config.json", "generation_config.json"):
        value = _read_json(folder / name).get(f"{which}_id")
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int):
            return value
    return None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", "copy the file again from the model's folder") from None
    return value if isinstance(value, dict) else {}
