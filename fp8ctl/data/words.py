"""Text as normalised words, for comparisons that should not see case, punctuation and layout."""

from __future__ import annotations

import re
import unicodedata

import numpy as np

_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\U00020000-\U0003ffff"
# Scripts that put no space between words count each character as one.
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
_LETTERS = bytes(
    (c | 32) if 65 <= c <= 90 else c if 48 <= c <= 57 or 97 <= c <= 122 or c > 127 else 32 for c in range(256)
)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def words(text: str) -> list[bytes]:
    """Runs of letters and digits, in lower case (UTF-8); Chinese, Japanese and Korean characters are words of their own."""
    # ASCII is cut by table, several times as fast as by pattern; only what is left with other characters in it is looked at
    if text.isascii():
        return text.encode().translate(_LETTERS).split()
    text = unicodedata.normalize("NFC", text).lower()
    found: list[bytes] = []
    for piece in text.encode("utf-8", errors="surrogatepass").translate(_LETTERS).split():
        if piece.isascii():
            found.append(piece)
        else:
            rest = piece.decode("utf-8", errors="surrogatepass")
            found += [word.encode("utf-8", errors="surrogatepass") for word in _WORD.findall(rest)]
    return found


def ngram_hashes(values: np.ndarray, length: int) -> np.ndarray:
    """Hash (uint64) of each run of `length` values; shape [max(0, T - length + 1)] for values (uint64) of shape [T]."""
    count = max(0, len(values) - length + 1)
    hashes = values[:count].copy()
    for offset in range(1, length):
        hashes = extend_hashes(hashes, values, offset)
    return hashes


def extend_hashes(hashes: np.ndarray, values: np.ndarray, offset: int) -> np.ndarray:
    """Hashes of runs of `offset` values to those of runs that are one longer (fewer where the values end)."""
    count = min(len(hashes), len(values) - offset)
    return hashes[:count] * _MULTIPLIER + values[offset : offset + count]
