from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8ctl.config.data_schema import DataPrepConfig, DedupConfig, SourceConfig
from fp8ctl.data import dedup as module
from fp8ctl.data import near_duplicates
from fp8ctl.data.dedup import dedup, estimate
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.prepare import prepare
from fp8ctl.data.words import words
from fp8ctl.errors import ConfigError, DataError, MissingPackageError

TEXT = "the of and a to in is that model train loss step token scale block tile row weight batch layer"
WORDS = TEXT.split(" ")


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def settings(out: Path, *paths: Path, **more: Any) -> DedupConfig:
    kind = more.pop("format", "jsonl")
    return DedupConfig(out=str(out), sources=(SourceConfig(kind=kind, paths=tuple(map(str, paths))),), **more)


def listed(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "excluded.parquet").to_pylist()


def documents(count: int, seed: int = 1, size: int = 60) -> list[str]:
    choose = random.Random(seed)
    return [" ".join(choose.choices(WORDS, k=choose.randint(size // 2, size))) for _ in range(count)]


def test_the_first_of_equal_rows_stays(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", ["one", "two", "one", "", " one \n"])
    b = write(tmp_path / "b.jsonl", ["three", "two", "e\u0301", "\u00e9"])
    report = dedup(settings(tmp_path / "x", a, b))
    assert [(r["file"], r["line"], r["reason"], r["match"]) for r in listed(tmp_path / "x")] == [
        (str(a), 3, "duplicate", f"{a} line 1"),
        (str(a), 5, "duplicate", f"{a} line 1"),
        (str(b), 2, "duplicate", f"{a} line 2"),
        (str(b), 4, "duplicate", f"{b} line 3"),
    ]
    assert (report["rows"], report["documents"], report["empty"], report["duplicates"]) == (9, 8, 1, 4)
    assert report["by_file"][str(a)] == {"documents": 4, "excluded": 2}
    assert report["largest_clusters"][0] == {"documents": 3, "file": str(a), "line": 1, "example": "one"}
    assert report == json.loads((tmp_path / "x" / "report.json").read_text())
    raw = dedup(settings(tmp_path / "raw", a, b, normalise="raw"))
    assert raw["duplicates"] == 2


def test_any_number_of_processes_and_parts_gives_the_same_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents(6000, size=120)
    choose = random.Random(2)
    rows = [choose.choice(texts) if i % 3 == 0 else text for i, text in enumerate(texts)]
    a = write(tmp_path / "a.jsonl", rows)
    a.write_text(a.read_text().replace("\n", "\n\n", 7) + "{bad\n")  # blank lines count as lines
    b = tmp_path / "b.jsonl.gz"
    b.write_bytes(gzip.compress(write(tmp_path / "plain.jsonl", rows[:50]).read_bytes()))
    lists = []
    for name, workers, at_once in (("one", 1, 2**22), ("two", 2, 2**22), ("parts", 1, 100)):
        monkeypatch.setattr(module, "_ROWS_SORTED_AT_ONCE", at_once)
        report = dedup(settings(tmp_path / name, a, b, num_workers=workers, task_mb=1))
        lists.append((tmp_path / name / "excluded.parquet").read_bytes())
    assert lists[0] == lists[1] == lists[2]
    lines = a.read_text().split("\n")
    seen: dict[str, int] = {}
    expected = []
    for number, line in enumerate(lines[:-2], start=1):
        if line.strip() and seen.setdefault(line, number) != number:
            expected.append((number, f"{a} line {seen[line]}"))
    found = listed(tmp_path / "two")
    assert [(r["line"], r["match"]) for r in found if r["file"] == str(a)] == expected
    assert all(a.read_bytes()[r["at"] :].startswith(lines[r["line"] - 1].encode()) for r in found[:50])
    assert sum(r["file"] == str(b) for r in found) == 50
    assert report["bad"] == 1


def test_conversations_are_compared_as_a_whole(tmp_path: Path) -> None:
    def row(question: str, answer: str, **more: Any) -> dict[str, Any]:
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return {"messages": turns, **more}

    rows = [
        row("q", "a"),
        row("q", "b"),
        {"prompt": "q", "completion": "a"},
        {"input_ids": [1, 2], "labels": [-100, 2]},
    ]
    rows += [{"input_ids": [1, 2], "labels": [1, 2]}, rows[3]]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    dedup(settings(tmp_path / "x", path, kind="sft"))
    assert [r["line"] for r in listed(tmp_path / "x")] == [3, 6]


def test_parquet_and_generated_sources(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x", "y", "x"]}), path)
    sources = (SourceConfig(kind="parquet", paths=(str(path),)), SourceConfig(kind="python_stdlib"))
    report = dedup(DedupConfig(sources=sources, out=str(tmp_path / "x")))
    first, *others = listed(tmp_path / "x")
    assert (first["file"], first["at"], first["line"]) == (str(path), 2, 3)
    assert all(r["file"].startswith(("stdlib/", "pydoc/")) for r in others)
    assert set(report["files"]) == {str(path), "python_stdlib"}


def test_preparation_without_duplicates(tmp_path: Path, tokenizer_folder: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["one two", "three", "one two", "four"])
    dedup(settings(tmp_path / "x", path))
    done = prepare(
        DataPrepConfig(
            out=str(tmp_path / "data"),
            tokenizer=str(tokenizer_folder),
            sources=(SourceConfig(paths=(str(path),)),),
            exclude=(str(tmp_path / "x"),),
        )
    )
    assert Manifest.read(done.parent).counters["dropped"] == {"duplicate": 1}


def test_near_duplicates_are_what_their_text_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rensa")
    texts = documents(300, size=200)
    choose = random.Random(3)
    for text in texts[:200]:
        changed = text.split()
        for _ in range(choose.choice((1, 2, 4, 8))):
            changed[choose.randrange(len(changed))] = choose.choice(WORDS)
        texts.append(" ".join(changed).upper())
    texts += texts[:10]
    path = write(tmp_path / "a.jsonl", texts)
    report = dedup(settings(tmp_path / "x", path, method="minhash"))

    def sequences(text: str) -> set[tuple[bytes, ...]]:
        found = words(text)
        return {tuple(found[i : i + 5]) for i in range(len(found) - 4)}

    sets = [sequences(t) for t in texts]
    expected = {
        i + 1
        for i in range(300, 500)
        if len(sets[i] & sets[i - 300]) / len(sets[i] | sets[i - 300]) >= 0.8 and texts[i] != texts[i - 300]
    }
    near = {r["line"]: r["match"] for r in listed(tmp_path / "x") if r["reason"] == "near_duplicate"}
    assert near == {line: f"{path} line {line - 300}" for line in expected}
    assert 20 < len(expected) < 180
    assert report["near_duplicates"] == len(expected) and report["minhash"]["verified"] >= len(expected)
    assert {r["line"] for r in listed(tmp_path / "x") if r["reason"] == "duplicate"} >= set(range(501, 511))
    monkeypatch.setattr(near_duplicates, "_ROWS_SORTED_AT_ONCE", 50)
    monkeypatch.setattr(near_duplicates, "_BATCH_ROWS", 7)
    dedup(settings(tmp_path / "y", path, method="minhash", num_workers=2))
    assert (tmp_path / "x" / "excluded.parquet").read_bytes() == (tmp_path / "y" / "excluded.parquet").read_bytes()


def test_copies_of_a_near_duplicate_go_with_it(tmp_path: Path) -> None:
    pytest.importorskip("rensa")
    (text,) = documents(1, size=200)
    changed = text + " and more"
    path = write(tmp_path / "a.jsonl", [text, changed, "...", "!!", changed, "other words"])
    report = dedup(settings(tmp_path / "x", path, method="minhash"))
    assert [(r["line"], r["reason"], r["match"]) for r in listed(tmp_path / "x")] == [
        (2, "near_duplicate", f"{path} line 1"),
        (5, "duplicate", f"{path} line 1"),
    ]
    assert report["largest_clusters"][0]["documents"] == 3
    strict = dedup(settings(tmp_path / "y", path, method="minhash", threshold=1.0))
    assert strict["near_duplicates"] == 0


def test_what_it_takes_is_told_before(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", documents(3000))
    expected = estimate(settings(tmp_path / "x", path))
    assert expected.documents == pytest.approx(3000, rel=0.1)
    assert expected.scratch_bytes == 40 * expected.documents
    assert not (tmp_path / "x").exists()
    wide = estimate(settings(tmp_path / "x", path, method="minhash"))
    assert wide.scratch_bytes > 4 * expected.scratch_bytes and wide.memory_bytes > expected.memory_bytes


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(ConfigError, match="out: no folder to write to"):
        dedup(DedupConfig(sources=(SourceConfig(paths=(str(path),)),)))
    with pytest.raises(ConfigError, match="sources: no sources"):
        dedup(DedupConfig(out=str(tmp_path / "x")))
    with pytest.raises(DataError, match="a.jsonl belongs to two sources"):
        dedup(DedupConfig(out=str(tmp_path / "x"), sources=(SourceConfig(paths=(str(path),)),) * 2))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('\n{"text": ""}\n{"body": "x"}\n')
    with pytest.raises(
        DataError, match=r"nothing to read: 2 rows, 1 of them empty, 1 bad; the first bad one is .* line 3: "
    ):
        dedup(settings(tmp_path / "x", bad))
    assert list((tmp_path / "x").iterdir()) == []
    dedup(settings(tmp_path / "x", path))
    with pytest.raises(DataError, match="holds an exclusion list already"):
        dedup(settings(tmp_path / "x", path))
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(MissingPackageError, match="method=minhash needs the package rensa") as error:
        dedup(settings(tmp_path / "y", path, method="minhash"))
    assert error.value.hint == "pip install 'fp8ctl[dedup]', or set method=exact"


def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    try:
        path = write(tmp_path / "a\udcff.jsonl", ["one", "one"])
    except OSError:
        pytest.skip("this file system takes no such names")
    report = dedup(settings(tmp_path / "x", path))
    assert report["largest_clusters"][0]["file"].endswith("a\\udcff.jsonl")
    assert listed(tmp_path / "x")[0]["file"].endswith("a\\udcff.jsonl")
