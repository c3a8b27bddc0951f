from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fp8ctl.config.data_schema import DataPrepConfig, SourceConfig
from fp8ctl.data.exclude import Exclusions, check_lists, new_list, read_report
from fp8ctl.data.manifest import Manifest
from fp8ctl.data.prepare import prepare
from fp8ctl.data.rows import Origin
from fp8ctl.errors import DataError


def make_list(folder: Path, rows: list[tuple[str, int, str]], files: dict[str, int]) -> Path:
    with new_list(folder) as out:
        for file, at, reason in rows:
            out.add(file, at, at + 1, reason, "somewhere")
        out.finish({"rows": 10}, files)
    return folder


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {i} " + "word " * i}) + "\n" for i in range(10)))
    return path


def starts(path: Path) -> list[int]:
    at, found = 0, []
    for line in path.read_bytes().splitlines(keepends=True):
        found.append(at)
        at += len(line)
    return found


def settings(out: Path, tokenizer: Path, files: Path, **more: object) -> DataPrepConfig:
    return DataPrepConfig(out=str(out), tokenizer=str(tokenizer), sources=(SourceConfig(paths=(str(files),)),), **more)


def test_a_row_is_found_by_file_and_place(tmp_path: Path) -> None:
    make_list(
        tmp_path / "x", [("b", 7, "duplicate"), ("b", 3, "contaminated"), ("a", 3, "duplicate")], {"a": 1, "b": 1}
    )
    make_list(tmp_path / "y", [("c", 0, "near_duplicate")], {"c": 1})
    every = Exclusions.load([tmp_path / "x", tmp_path / "y"])
    assert len(every) == 4
    assert [every.reason(Origin("b", 0, at)) for at in (2, 3, 4, 7, 8)] == [
        None, "contaminated", None, "duplicate", None
    ]  # fmt: skip
    assert every.reason(Origin("c", 0, 0)) == "near_duplicate"
    assert every.reason(Origin("d", 0, 0)) is None
    some = Exclusions.load([tmp_path / "x"], files=["a"])
    assert len(some) == 1 and some.reason(Origin("a", 0, 3)) == "duplicate"
    assert len(Exclusions.load([])) == 0


def test_preparation_leaves_rows_out_and_counts_them(
    tmp_path: Path, documents: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = starts(documents)
    size = {str(documents): documents.stat().st_size}
    out = make_list(tmp_path / "x", [(str(documents), at[i], "duplicate") for i in (2, 5)], size)
    make_list(tmp_path / "y", [(str(documents), at[5], "contaminated"), (str(documents), at[9], "contaminated")], size)
    monkeypatch.chdir(tmp_path)  # the list was made from somewhere else, with another name for the file
    done = prepare(
        settings(tmp_path / "data", tokenizer_folder, Path("a.jsonl"), exclude=(str(out), str(tmp_path / "y")))
    )
    manifest = Manifest.read(done.parent)
    assert manifest.counters["dropped"] == {"contaminated": 1, "duplicate": 2}
    assert manifest.counters["rows"] == 10 and manifest.counters["kept"] == 7
    assert manifest.prepared["exclude"][str(out)] == read_report(out)["fingerprint"]


def test_lists_that_do_not_fit(tmp_path: Path, documents: Path, tokenizer_folder: Path) -> None:
    config = settings(tmp_path / "data", tokenizer_folder, documents, exclude=(str(tmp_path / "x"),))
    with pytest.raises(DataError, match="no exclusion list in "):
        prepare(config)
    make_list(tmp_path / "other", [], {"elsewhere.jsonl": 3})
    with pytest.raises(DataError, match="other is about other files, such as elsewhere.jsonl"):
        prepare(config.model_copy(update={"exclude": (str(tmp_path / "other"),)}))
    make_list(tmp_path / "x", [(str(documents), 0, "duplicate")], {str(documents): documents.stat().st_size})
    content, modified = documents.read_bytes(), documents.stat().st_mtime_ns
    documents.write_bytes(content + b'{"text": "more"}\n')
    with pytest.raises(DataError, match=r"a.jsonl has \d+ bytes, and had \d+ when .* was made"):
        prepare(config)
    documents.write_bytes(b"".join(reversed(content.splitlines(keepends=True))))
    with pytest.raises(DataError, match=r"a.jsonl was changed after .*x was made") as error:
        prepare(config)
    assert error.value.hint == "make the exclusion list again: it names rows by their place in the file"
    documents.write_bytes(content)
    os.utime(documents, ns=(modified, modified))
    os.truncate(tmp_path / "x" / "excluded.parquet", 20)
    with pytest.raises(DataError, match="excluded.parquet was changed after it was written"):
        prepare(config)
    assert not list((tmp_path / "data").glob("*.bin"))


def test_reports_that_are_none(tmp_path: Path) -> None:
    folder = make_list(tmp_path / "x", [], {"a": 1})
    (folder / "report.json").write_text("{")
    with pytest.raises(DataError, match="report.json is not JSON"):
        check_lists([str(folder)], {"a": 1})
    (folder / "report.json").write_text("[]")
    with pytest.raises(DataError, match="is no report of an exclusion list"):
        read_report(folder)
    (folder / "report.json").write_text('{"format": 9, "files": {}, "fingerprint": ""}')
    with pytest.raises(DataError, match="has format 9, this fp8ctl reads 1"):
        read_report(folder)


def test_a_folder_is_written_once_and_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_list(tmp_path / "x"):
        raise ZeroDivisionError
    assert list((tmp_path / "x").iterdir()) == []
    with (
        new_list(tmp_path / "x"),
        pytest.raises(DataError, match="another command is writing into"),
        new_list(tmp_path / "x"),
    ):
        pass
    make_list(tmp_path / "x", [], {})
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["excluded.parquet", "report.json"]
    with pytest.raises(DataError, match="holds an exclusion list already"), new_list(tmp_path / "x"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file can't be written"), new_list(tmp_path / "file"):
        pass


def test_another_list_is_another_preparation(tmp_path: Path, documents: Path, tokenizer_folder: Path) -> None:
    from fp8ctl.data.encode import encoder_for
    from fp8ctl.data.plan import make_plan

    plain = settings(tmp_path / "data", tokenizer_folder, documents)
    size = {str(documents): documents.stat().st_size}
    fingerprints = {make_plan(plain, encoder_for(plain)).fingerprint}
    for at in (0, 1):
        folder = make_list(tmp_path / f"x{at}", [(str(documents), at, "duplicate")], size)
        config = plain.model_copy(update={"exclude": (str(folder),)})
        fingerprints.add(make_plan(config, encoder_for(config)).fingerprint)
    assert len(fingerprints) == 3
