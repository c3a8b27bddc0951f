"""Documents that are too long for a tokenizer in one piece: the same ids in memory and time that stay in proportion.

A tokenizer needs about a hundred bytes of memory for each byte of text, and some need time that grows faster than the text. So a
long text is cut where no token can lie across the cut. That is so between a letter and a space when no token of the vocabulary
holds a letter with a space behind it, and the tokens around the place, encoded with and without the cut, are the same.
Where there is no such place for long (languages without spaces, encoded binary data), pieces overlap, and the ids go on
from one piece to the next where both agree for thousands of characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

LONG_CHARS = 256 * 1024
"""Longer texts are encoded in pieces of about this length."""
_WHOLE_CHARS = 4 * LONG_CHARS
"""The longest piece that is encoded whole."""
_OVERLAP_CHARS = 16 * 1024
_SHIFTS = 4
_PIECES_AT_ONCE = 8
_CONTEXTS = (400, 150, 61)
"""Characters on each side of a cut that are encoded with and without it."""


@dataclass(frozen=True)
class _Place:
    """A kind of place to cut: `pattern` matches an empty string there."""

    pattern: re.Pattern[str]
    across: re.Pattern[str]
    """What a piece of the vocabulary must not hold for this kind of place to be safe."""


@dataclass(frozen=True)
class _Tokens:
    """Tokens of a piece: ids, and the places in the whole text where each begins and ends, all of shape [T]."""

    start: int
    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


# Spaces and line ends as vocabularies write them: \u0120 and \u010a in those of bytes, \u2581 in those of sentencepiece.
_PLACES = (
    _Place(re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])"), re.compile("[A-Za-z][ \u0120\u2581]")),
    _Place(
        re.compile(r"(?<=\n)(?=[^\s])"),
        re.compile("[\n\u010a][^ \r\n\t\x0b\x0c\u0120\u2581\u010a\u010d\u0109\u010b\u010c]"),
    ),
)


class LongText:
    """Encodes long texts with one tokenizer."""

    def __init__(self, backend: Tokenizer, description: dict[str, Any]) -> None:
        """Takes a tokenizer and the content of its tokenizer.json."""
        self._backend = backend
        self._places = _safe_places(description)

    def encode(self, text: str) -> np.ndarray:
        """Ids (int32) of a text of any length.

        Raises:
            ValueError: it can't be encoded in pieces.
        """
        ids: list[np.ndarray] = []
        waiting: list[str] = []
        for piece in self._pieces(text):
            if len(piece) <= _WHOLE_CHARS:
                waiting.append(piece)
            if waiting and (len(waiting) == _PIECES_AT_ONCE or waiting[-1] is not piece):
                ids += self._encode(waiting)
                waiting = []
            if len(piece) > _WHOLE_CHARS:
                ids += self._stitched(piece)
        ids += self._encode(waiting)
        return np.concatenate(ids)

    def _encode(self, pieces: list[str]) -> list[np.ndarray]:
        encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        return [np.array(e.ids, dtype=np.int32) for e in encodings]

    def _pieces(self, text: str) -> Iterator[str]:
        """Pieces whose ids one after another are the ids of the text; long where no cut is safe."""
        start, looked_at = 0, LONG_CHARS // 2
        while len(text) - start > LONG_CHARS and looked_at < len(text):
            found = self._cut(text, looked_at, looked_at + LONG_CHARS // 2)
            if found is None:
                looked_at += LONG_CHARS // 2
                continue
            yield text[start : found[0]]
            start = found[1]
            looked_at = start + LONG_CHARS // 2
        yield text[start:]

    def _cut(self, text: str, first: int, last: int) -> tuple[int, int] | None:
        """End of one piece and start of the next, which leaves out a space where the tokenizer puts one there itself."""
        for place in self._places:
            found = [
                m for m, _ in zip(place.pattern.finditer(text, first, min(last, len(text) - 1)), range(4), strict=False)
            ]
            for match in found:
                at = match.start()
                for start_of_next in (at, at + 1) if text[at] == " " else (at,):
                    if self._agrees(text, at, start_of_next):
                        return at, start_of_next
        return None

    def _agrees(self, text: str, at: int, start_of_next: int) -> bool:
        windows: list[str] = []
        for left in _CONTEXTS:
            for right in _CONTEXTS:
                before, after = text[max(0, at - left) : at], text[at : at + right]
                windows += [before + after, before, after[start_of_next - at :]]
        ids = [e.ids for e in self._backend.encode_batch_fast(windows, add_special_tokens=False)]
        return all(ids[i] == ids[i + 1] + ids[i + 2] for i in range(0, len(ids), 3))

    def _stitched(self, text: str) -> Iterator[np.ndarray]:
        """Ids of overlapping pieces, each taken up where it agrees with the one before over many tokens."""
        start = kept = 0
        current = self._with_offsets(text, 0)
        while start + LONG_CHARS < len(text):
            following, here, there = self._next(text, current, start + LONG_CHARS - _OVERLAP_CHARS)
            yield current.ids[kept:here]
            current, start, kept = following, following.start, there
        yield current.ids[kept:]

    def _next(self, text: str, current: _Tokens, overlap: int) -> tuple[_Tokens, int, int]:
        """The next piece, and where its tokens go on from the current one: numbers of tokens in both."""
        # begins at a token, so that what repeats itself (a run of one character) is cut in the same step
        later = current.begins[np.searchsorted(current.begins, overlap) :]
        start = int(later[0]) if len(later) else overlap
        for shift in range(_SHIFTS):  # a tokenizer that puts a space in front may join it to the first characters
            following = self._with_offsets(text, start - shift)
            if met := _meeting(current, following, start + _OVERLAP_CHARS // 4):
                return following, *met
        raise ValueError("a long text without any place where it can be encoded in pieces")

    def _with_offsets(self, text: str, start: int) -> _Tokens:
        encoding = self._backend.encode(text[start : start + LONG_CHARS], add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + start
        return _Tokens(start, np.array(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1])


def _meeting(one: _Tokens, two: _Tokens, first: int) -> tuple[int, int] | None:
    """From which token on two overlapping pieces are the same, in both; None where they are not for long enough."""
    span = _OVERLAP_CHARS // 4
    begin, end = np.searchsorted(one.begins, (first, first + span))
    inside_a_character = one.begins[begin:end] < np.concatenate([[0], one.ends])[begin:end]
    places = one.begins[begin:end][~inside_a_character]
    for place in places if len(places) else [first]:
        of_one = slice(*np.searchsorted(one.begins, (place, place + span)))
        of_two = slice(*np.searchsorted(two.begins, (place, place + span)))
        same_ids = np.array_equal(one.ids[of_one], two.ids[of_two])
        if same_ids and np.array_equal(one.begins[of_one], two.begins[of_two]):
            return int(of_one.start), int(of_two.start)
    return None


def _safe_places(description: dict[str, Any]) -> list[_Place]:
    """Kinds of places where neither the model nor an added token can reach across."""
    model = description["model"]
    vocab = model.get("vocab") or {}
    names = [name for name, _ in vocab] if isinstance(vocab, list) else list(vocab)
    names += [t["content"] for t in description.get("added_tokens") or []]
    if model.get("type") in ("WordPiece", "WordLevel") and not description.get("pre_tokenizer"):
        return []  # the whole text is one word
    return [place for place in _PLACES if not any(place.across.search(name) for name in names)]
