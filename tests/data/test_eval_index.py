from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8ctl.data.eval_index import EvalIndex, EvalItem, read_items
from fp8ctl.data.words import words
from fp8ctl.errors import DataError


def items(*texts: str) -> list[EvalItem]:
    return [EvalItem("eval.jsonl", number, "question", text) for number, text in enumerate(texts, start=1)]


def found(index: EvalIndex, *texts: str) -> list[tuple[int, int]]:
    return [(hit.text, hit.item) for hit in index.find(texts)]


def numbered(start: int, end: int) -> str:
    return " ".join(f"w{i}" for i in range(start, end))


def test_a_run_of_words_is_found_wherever_it_stands() -> None:
    index = EvalIndex(items(numbered(0, 40)), ngram_words=13, min_words=8)
    assert found(index, numbered(0, 13)) == [(0, 0)]
    assert found(index, "x " * 999 + numbered(27, 40).upper().replace(" ", ",\n") + " y") == [(0, 0)]
    assert found(index, numbered(0, 12), numbered(5, 11) + " x " + numbered(11, 20)) == []
    # two texts that follow each other are two texts
    assert found(index, numbered(0, 7), numbered(7, 14)) == []
    (hit,) = index.find(["a b " + numbered(10, 30) + " c"])
    assert hit.words == numbered(10, 30) and hit.num_words == 20


def test_short_items_are_found_as_a_whole_or_named() -> None:
    index = EvalIndex(items(numbered(0, 9), numbered(20, 25), "", numbered(0, 8)), ngram_words=13, min_words=8)
    assert index.unprotected == [1, 2]
    assert found(index, numbered(0, 9), numbered(1, 9), numbered(20, 25), numbered(0, 8)) == [(0, 0), (0, 3), (3, 3)]


def test_equal_items_count_once() -> None:
    index = EvalIndex(items(numbered(0, 20), numbered(0, 20).upper()), ngram_words=13, min_words=8)
    assert found(index, numbered(0, 30)) == [(0, 0)]


def test_like_a_comparison_word_by_word() -> None:
    choose = random.Random(1)
    vocabulary = [f"v{i}" for i in range(3)] + ["\u00e9t\u00e9", "\u6570"]
    texts = [" ".join(choose.choices(vocabulary, k=choose.randint(0, 60))) for _ in range(300)]
    evals = [" ".join(choose.choices(vocabulary, k=choose.randint(1, 12))) for _ in range(40)]
    index = EvalIndex(items(*evals), ngram_words=6, min_words=4)

    def holds(text: str, item: str) -> bool:
        a, b = words(text), words(item)
        size = min(6, len(b))
        runs = {tuple(a[i : i + size]) for i in range(len(a) - size + 1)}
        return len(b) >= 4 and any(tuple(b[i : i + size]) in runs for i in range(len(b) - size + 1))

    # a run that two items share is reported for the first of them, so texts are compared, not items
    expected = {t for t, text in enumerate(texts) if any(holds(text, e) for e in evals)}
    pairs = {(t, i) for t, text in enumerate(texts) for i, e in enumerate(evals) if holds(text, e)}
    got = set(found(index, *texts))
    assert got <= pairs and {t for t, _ in got} == expected
    assert 10 < len(expected) < 290


def test_eval_sets_in_every_form(tmp_path: Path) -> None:
    rows = [
        {"question": "q1", "answer": "a1"},
        {"problem": "p2", "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "no"}]},
    ]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo\n"))
    pq.write_table(pa.table({"prompt": ["p"], "choices": [["x", "y"]]}), tmp_path / "d.parquet")
    one = read_items([str(tmp_path / "a.jsonl")], ())
    assert [(i.number, i.field, i.text) for i in one] == [
        (1, "question", "q1"),
        (3, "problem", "p2"),
        (3, "messages", "u"),
    ]
    assert [i.text for i in read_items([str(tmp_path / "b.json")], ("answer", "problem"))] == ["a1", "p2"]
    assert [(i.number, i.text) for i in read_items([str(tmp_path / "c.txt.gz")], ())] == [(1, "one"), (3, "two")]
    assert [i.text for i in read_items([str(tmp_path / "d.parquet")], ("prompt", "choices"))] == ["p", "x\ny"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the eval set .* is empty"),
        ("\n \n", "the eval set .* is empty"),
        ("{bad\n", "line 1: not JSON"),
        ("[1]\n", "line 1: list, not an object"),
        ('{"title": "x"}\n', "line 1 has no field question or problem"),
        ('{"question": 3}\n', "field question of .* line 1 holds no text"),
        ('{"question": [3]}\n', "field question of .* line 1 holds no text"),
    ],
)
def test_eval_sets_that_can_not_be_used(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "eval.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_items([str(path)], ())


def test_files_that_are_no_eval_sets(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no jsonl files in"):
        read_items([str(tmp_path / "none.jsonl")], ())
    with pytest.raises(DataError, match=r"the name of .*x.bin does not tell its format"):
        read_items([str(tmp_path / "x.bin")], ())
    (tmp_path / "x.parquet").write_bytes(b"PAR1 cut")
    with pytest.raises(DataError, match="x.parquet is no whole Parquet file"):
        read_items([str(tmp_path / "x.parquet")], ())
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"question": "x"}\n' * 99)[:-9])
    with pytest.raises(DataError, match="x.jsonl.gz is damaged"):
        read_items([str(tmp_path / "x.jsonl.gz")], ())
