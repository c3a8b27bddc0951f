from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fp8ctl.config.data_schema import DataPrepConfig, DecontaminateConfig, SourceConfig
from fp8ctl.data.decontaminate import decontaminate, search_task
from fp8ctl.data.exclude import read_report
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.prepare import prepare
from fp8ctl.data.tasks import plan_tasks
from fp8ctl.errors import ConfigError, DataError, MissingPackageError

QUESTION = "A train leaves the station at nine and travels forty miles an hour; when does it reach the town that lies 100 miles off?"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def evals(tmp_path: Path) -> Path:
    return write(tmp_path / "eval.jsonl", [{"question": QUESTION}, {"question": "What is 2 + 2?"}])


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    texts = ["nothing of it", f"so they asked: {QUESTION.upper()} -- and", "", "what is 2 + 2? four"]
    return write(tmp_path / "a.jsonl", [{"text": text} for text in texts])


def settings(path: Path, evals: Path, **more: Any) -> DecontaminateConfig:
    return DecontaminateConfig(sources=(SourceConfig(paths=(str(path),)),), against=(str(evals),), **more)


def talk(question: str, answer: str = "x") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_rows_with_eval_items_are_listed_and_left_out(
    tmp_path: Path, documents: Path, evals: Path, tokenizer_folder: Path
) -> None:
    out = tmp_path / "x"
    report = decontaminate(settings(documents, evals, out=str(out)))
    (row,) = pq.read_table(out / "excluded.parquet").to_pylist()
    assert (row["file"], row["line"], row["reason"]) == (str(documents), 2, "contaminated")
    assert row["match"].startswith(f"{evals} item 1 (question): a train leaves the station")
    (match,) = map(json.loads, (out / "matches.jsonl").read_text().splitlines())
    assert match["line"] == 2 and match["eval_item"] == 1 and match["num_words"] == 24 and report["examples"] == [match]
    assert (report["rows"], report["documents"], report["contaminated"]) == (4, 3, 1)
    assert report["by_eval_file"][str(evals)] == {"items": 2, "unprotected": 1, "found": 1, "matches": 1}
    (warning,) = report["warnings"]
    assert (
        warning.startswith("1 of 2 eval items are too short to be searched for, the first is ") and "2 + 2" in warning
    )
    done = prepare(
        DataPrepConfig(
            out=str(tmp_path / "data"),
            tokenizer=str(tokenizer_folder),
            sources=(SourceConfig(paths=(str(documents),)),),
            exclude=(str(out),),
        )
    )
    assert Manifest.read(done.parent).counters["dropped"] == {"contaminated": 1, "empty": 1}


def test_tag_and_fail_only_report(tmp_path: Path, documents: Path, evals: Path) -> None:
    assert decontaminate(settings(documents, evals, mode="tag"))["contaminated"] == 1
    out = tmp_path / "x"
    decontaminate(settings(documents, evals, mode="fail", out=str(out)))
    assert sorted(p.name for p in out.iterdir()) == ["matches.jsonl", "report.json"]
    with pytest.raises(DataError, match=r"x holds a report without a list \(mode=fail\)"):
        read_report(out)


def test_conversations_are_searched_without_their_answers(tmp_path: Path, evals: Path) -> None:
    pytest.importorskip("rapidfuzz")
    rows = [
        talk("hello", QUESTION),
        talk("First: " + " ".join(QUESTION.split()[3:11])),
        talk("what is 2 + 2", "4"),
        talk(QUESTION.replace("forty", "fourty").replace("reach", "come to")),
        {"input_ids": [1, 2], "labels": [1, 2]},
        {"messages": [*talk("hello")["messages"], *talk(QUESTION)["messages"]]},
    ]
    path = write(tmp_path / "sft.jsonl", rows)
    report = decontaminate(settings(path, evals, kind="sft", mode="tag"))
    assert [(m["line"], m["how"]) for m in report["examples"]] == [(2, "words"), (4, "words"), (6, "words")]
    assert "1 rows hold tokens only and were not searched" in report["warnings"]


def test_short_prompts_that_are_nearly_an_item(tmp_path: Path) -> None:
    pytest.importorskip("rapidfuzz")
    evals = write(tmp_path / "eval.jsonl", [{"question": "How many distinct prime numbers divide 2310?"}])
    rows = [
        talk("How many distinct prime numbers devide 2310"),
        talk("How many distinct prime numbers lie below 2310?"),
        talk("How many distinct prime numbers devide 2310" + " or 17" * 99),
    ]
    path = write(tmp_path / "sft.jsonl", rows)
    report = decontaminate(settings(path, evals, kind="sft", mode="tag"))
    assert [(m["line"], m["how"]) for m in report["examples"]] == [(1, "fuzzy")]
    assert decontaminate(settings(path, evals, kind="sft", mode="tag", fuzzy_ratio=None))["contaminated"] == 0
    assert decontaminate(settings(path, evals, kind="sft", mode="tag", fuzzy_max_chars=20))["contaminated"] == 0


def test_any_number_of_processes_finds_the_same(tmp_path: Path, evals: Path) -> None:
    filler = "word other thing " * 40
    rows = [{"text": filler + (QUESTION if i % 50 == 7 else "") + filler} for i in range(1500)]
    path = write(tmp_path / "a.jsonl", rows)
    for name, workers in (("one", 1), ("two", 2)):
        decontaminate(settings(path, evals, out=str(tmp_path / name), num_workers=workers, task_mb=1))
    for name in ("matches.jsonl", "excluded.parquet"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    lines = [json.loads(m)["line"] for m in (tmp_path / "two" / "matches.jsonl").read_text().splitlines()]
    assert lines == list(range(8, 1501, 50))


def test_nearly_everything_matches(tmp_path: Path, evals: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": QUESTION + f" {i}"} for i in range(9)])
    warnings = decontaminate(settings(path, evals, mode="tag"))["warnings"]
    assert warnings[0].startswith(f"100% of the rows match, most often {evals} item 1 (question): ")


def test_bad_input(tmp_path: Path, documents: Path, evals: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="out: mode=drop writes an exclusion list"):
        decontaminate(settings(documents, evals))
    with pytest.raises(ConfigError, match="against: no eval sets"):
        decontaminate(DecontaminateConfig(sources=(SourceConfig(paths=(str(documents),)),), mode="tag"))
    with pytest.raises(ConfigError, match="min_words: it is above ngram_words"):
        decontaminate(settings(documents, evals, mode="tag", min_words=9, ngram_words=8))
    short = write(tmp_path / "short.jsonl", [{"question": "What is 2 + 2?"}])
    with pytest.raises(DataError, match="none of the 1 eval items is long enough to be searched for"):
        decontaminate(settings(documents, short, mode="tag"))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="the eval set .*empty.jsonl is empty"):
        decontaminate(settings(documents, tmp_path / "empty.jsonl", mode="tag"))
    with pytest.raises(DataError, match="nothing to read: 0 rows"):
        decontaminate(settings(tmp_path / "empty.jsonl", evals, mode="tag"))
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(MissingPackageError, match="fuzzy_ratio needs the package rapidfuzz") as error:
        decontaminate(settings(documents, evals, kind="sft", mode="tag"))
    assert error.value.hint and "pip install 'fp8ctl[dedup]'" in error.value.hint


def test_an_eval_set_that_changes(tmp_path: Path, documents: Path, evals: Path) -> None:
    config = settings(documents, evals, mode="tag")
    assert decontaminate(config)["contaminated"] == 1
    write(evals, [{"question": "other " * 20}])
    assert decontaminate(config)["contaminated"] == 0
    (task,) = plan_tasks(config.sources)
    with pytest.raises(DataError, match="an eval set changed while it was searched for"):
        search_task(task, lambda seen: None, config=config, scratch=tmp_path, stamp="another")
