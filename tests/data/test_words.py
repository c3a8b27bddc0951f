from __future__ import annotations

import unicodedata

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fp8ctl.data import words as module
from fp8ctl.data.words import ngram_hashes, words


def test_case_punctuation_and_layout_do_not_count() -> None:
    assert words("The  Quick-brown\nfox_jumps (42)!") == [b"the", b"quick", b"brown", b"fox", b"jumps", b"42"]
    assert words("... \n --") == [] == words("")
    assert words("Cafe\u0301 \u201cNa\u00efve\u201d") == ["caf\u00e9".encode(), "na\u00efve".encode()]
    assert len(words("\u6570\u5b66 x\u6570")) == 4


@given(st.text() | st.text("aB1_-\u00e9\u0130\u201c\u00a0\u2028\u6570\uac00e\u0301 \n\x1c"))
def test_both_ways_give_the_same_words(text: str) -> None:
    by_pattern = module._WORD.findall(unicodedata.normalize("NFC", text).lower())
    assert words(text) == [w.encode() for w in by_pattern]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=30), st.integers(1, 9))
def test_hash_of_each_run(values: list[int], length: int) -> None:
    found = ngram_hashes(np.array(values, dtype=np.uint64), length)
    runs = [values[i : i + length] for i in range(len(values) - length + 1)]
    assert [int(h) for h in found] == [int(ngram_hashes(np.array(r, dtype=np.uint64), length)[0]) for r in runs]
