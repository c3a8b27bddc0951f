"""Raw text to ids: control tokens that stand in it, and documents of any length.

Whoever wrote a page on the web may have written `<|im_end|>` into it. A model must not learn from there that a turn ends, so such
text is encoded as the characters it is made of, unless the settings say otherwise.
"""

from __future__ import annotations

import copy
import functools
import re
from typing import Any, Literal

import numpy as np
import orjson
from tokenizers import Tokenizer

from fp8ctl.data.long_text import LONG_CHARS, LongText
from fp8ctl.errors import DataError

ControlTokens = Literal["text", "ids_unless_special", "ids"]

# an added token in angle brackets steers a model (<think>, <|fim_prefix|>), even where its tokenizer does not flag it as special
_MARKUP = re.compile(r"<[^\s<>]+>|\[[A-Z][A-Z0-9_/]+\]")
# some vocabularies hold the tags of HTML, which are text like any other
_HTML = re.compile(
    r"</?(?:a|b|i|u|s|p|br|hr|em|strong|sub|sup|code|pre|span|div|blockquote|ul|ol|li|img|h[1-6]|"
    r"table|caption|thead|tbody|tfoot|tr|th|td)/?>"
)
_CACHED_WORDS = 500_000
"""Words whose tokens are remembered; the usual 10,000 are some percent slower."""
# a Unicode noncharacter: no text starts a token's name with it, and the token below is never looked for anyhow
_HIDDEN = "\ufdd0"


class RawText:
    """Encodes documents with one tokenizer; `control` holds the control tokens that it looks out for."""

    def __init__(self, description: bytes, control_tokens: ControlTokens) -> None:
        """Takes the content of a tokenizer.json.

        Raises:
            DataError: the tokenizer gives control ids for text whatever is done.
        """
        whole = orjson.loads(description)
        added = whole.get("added_tokens") or []
        self.control = [t["content"] for t in added if t["special"] or _steers(t["content"])]
        hidden = {t["content"] for t in added if _is_hidden(t, control_tokens)}
        plain = _without(whole, hidden)
        self._backend = Tokenizer.from_str(orjson.dumps(plain).decode())
        self._backend.encode_special_tokens = control_tokens != "ids"
        if hasattr(self._backend.model, "_resize_cache"):  # BPE and Unigram
            self._backend.model._resize_cache(_CACHED_WORDS)
        self._long = LongText(self._backend, plain)
        for token in added:
            self._check(token, hidden)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids (int32) of each text, the same as for the text in one piece, however long it is.

        Raises:
            ValueError: a long text that can't be encoded in pieces.
            Exception: the tokenizer refuses a text (one with a lone surrogate).
        """
        short = [text for text in texts if len(text) <= LONG_CHARS]
        encodings = iter(self._backend.encode_batch_fast(short, add_special_tokens=False))
        return [
            np.array(next(encodings).ids, dtype=np.int32) if len(text) <= LONG_CHARS else self._long.encode(text)
            for text in texts
        ]

    def holds_control_text(self, text: str) -> bool:
        """Whether a control token is written in the text."""
        return any(pattern.search(text) for pattern in self._patterns)

    @functools.cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        # one for each first character: a pattern that begins with a fixed character is searched many times faster
        by_first: dict[str, list[str]] = {}
        for token in self.control:
            by_first.setdefault(token[0], []).append(re.escape(token[1:]))
        return [
            re.compile(re.escape(first) + "(?:" + "|".join(sorted(rest, key=len, reverse=True)) + ")")
            for first, rest in by_first.items()
        ]

    def _check(self, token: dict[str, Any], hidden: set[str]) -> None:
        content, number = token["content"], token["id"]
        if content not in hidden:
            wrong = self._backend.token_to_id(content) != number
        else:
            wrong = number in self._backend.encode(content, add_special_tokens=False).ids
        if wrong and not _is_unknown(self._backend, content):
            raise DataError(
                f"this tokenizer can't encode the control token {content} as text", "set document_control_tokens=ids"
            )


def _steers(content: str) -> bool:
    return bool(_MARKUP.fullmatch(content)) and not _HTML.fullmatch(content)


def _is_hidden(token: dict[str, Any], control_tokens: ControlTokens) -> bool:
    if control_tokens == "ids":
        return False
    return bool(token["special"]) or (control_tokens == "text" and _steers(token["content"]))


def _is_unknown(backend: Tokenizer, content: str) -> bool:
    """Whether this is the token for what a vocabulary lacks, which any text may give."""
    return content == getattr(backend.model, "unk_token", None) or content in ("<unk>", "[UNK]")


def _without(whole: dict[str, Any], hidden: set[str]) -> dict[str, Any]:
    """A tokenizer of the same ids that gives those of the hidden tokens for no text.

    They keep their place under another name, since removing one would move the ids of those that follow. Names inside the model's
    vocabulary change too: a model would find some of them by itself (a Unigram model its `</s>`).
    """
    plain = {**whole, "truncation": None, "padding": None, "post_processor": None}
    model = copy.copy(whole["model"])
    if model.get("dropout"):  # a random choice at training time of other tools; data must not depend on chance
        model["dropout"] = None
    plain["model"] = model
    renamed = {name for name in hidden if name != model.get("unk_token")}
    plain["added_tokens"] = [
        {**t, "content": _HIDDEN + t["content"], "special": True} if t["content"] in renamed else t
        for t in whole.get("added_tokens") or []
    ]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {_HIDDEN + name if name in renamed else name: number for name, number in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[_HIDDEN + name if name in renamed else name, score] for name, score in vocab]
    if model.get("merges"):
        model["merges"] = [m for m in model["merges"] if not _touches(m, renamed)]
    return plain


def _touches(merge: Any, renamed: set[str]) -> bool:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left + right in renamed or left in renamed or right in renamed
