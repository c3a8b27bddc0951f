from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data.reasoning_gym import is_held_out
from fp8ctl.data.rows import BadRow, Conversation, Document, Row
from fp8ctl.data.sources import InputFile, find_files, iter_rows
from fp8ctl.errors import DataError

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def read(path: Path | list[Path], kind: str = "jsonl", data: str = "cpt", **changes: Any) -> list[Row]:
    paths = path if isinstance(path, list) else [path]
    return list(iter_rows(SourceConfig(kind=kind, paths=tuple(map(str, paths)), **changes), data))


def texts(rows: list[Row]) -> list[str | None]:
    return [r.text if isinstance(r, Document) else None for r in rows]


# ------------------------------------------------------------ JSON lines


def test_jsonl_good_and_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        b'\xef\xbb\xbf{"text": "one"}',
        b"",
        b"  ",
        '{"text": "line\u2028separator\u0085next"}'.encode(),
        b'{"text": "two"',
        b'{"text": "a"}{"text": "b"}',
        b'["text"]',
        b"null",
        b'{"body": "x", "id": 1}',
        b'{"text": null}',
        b'{"text": ["a"]}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": NaN}',
        b'{"text": "last, no line end"}',
    ]
    path.write_bytes(b"\n".join(lines))
    rows = read(path)
    assert texts(rows) == ["one", "line\u2028separator\u0085next", *[None] * 10, "last, no line end"]
    bad = {r.origin.line: r for r in rows if isinstance(r, BadRow)}
    assert list(bad) == list(range(5, 15))
    assert bad[5].reason.startswith("not JSON") and bad[5].excerpt == '{"text": "two"\n'
    assert bad[7].reason == "list, not an object" and bad[8].reason == "NoneType, not an object"
    assert bad[9].reason == "no field 'text' (fields: body, id)"
    assert bad[10].reason == "field 'text' is NoneType, not text" and bad[11].reason == "field 'text' is list, not text"
    assert rows[-1].origin.file == str(path) and rows[-1].origin.line == 15


def test_jsonl_other_field_and_carriage_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"body": "a\\r\\nb"}\r\n{"body": ""}\r\n')
    assert texts(read(path, text_field="body")) == ["a\r\nb", ""]


def test_jsonl_conversations(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n" + json.dumps({"messages": TURNS[:1]}) + "\n[1]\n")
    good, no_answer, no_object = read(path, data="sft")
    assert isinstance(good, Conversation) and good.messages == TURNS
    assert isinstance(no_answer, BadRow) and no_answer.reason == "the conversation has no assistant turn"
    assert isinstance(no_object, BadRow) and no_object.reason == "list, not an object"


# ------------------------------------------------------------ Parquet


def test_parquet_over_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    column = pa.array([f"text {i}" for i in range(2500)] + [None]).dictionary_encode()
    pq.write_table(pa.table({"id": range(2501), "text": column}), path, row_group_size=700)
    rows = read(path, "parquet")
    assert texts(rows) == [f"text {i}" for i in range(2500)] + [None]
    assert rows[-1].origin.line == 2501 and isinstance(rows[-1], BadRow)


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pa.array([b"good", b"\xff\xfe", b"also good"]).cast(pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    pq.write_table(pa.table({"text": column}), path)
    rows = read(path, "parquet")
    assert texts(rows) == ["good", None, "also good"]
    assert isinstance(rows[1], BadRow) and rows[1].reason.startswith("not UTF-8")


def test_parquet_conversations(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": [TURNS, TURNS], "source": ["x", "y"]}), path)
    assert [r.messages for r in read(path, "parquet", "sft") if isinstance(r, Conversation)] == [TURNS, TURNS]


def test_parquet_that_is_cut_short_stops(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a" * 1000]}), path)
    whole = path.read_bytes()
    for content in (whole[:-20], b"", b"PAR1" + b"\x00" * 100 + b"PAR1"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet is no whole Parquet file"):
            read(path, "parquet")


def test_parquet_without_the_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), path)
    with pytest.raises(DataError, match=r"has no column text") as error:
        read(path, "parquet")
    assert error.value.hint == "its columns: body, id"


# ------------------------------------------------------------ text, generators


def test_text_is_one_document_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\n")
    (tmp_path / "b.md").write_bytes("\u6f22".encode("utf-16"))
    (tmp_path / "c.bin").write_bytes(b"not asked for")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.rst").write_bytes(b"deep")
    rows = read(tmp_path, "text")
    assert texts(rows) == ["one\r\n\ntwo\n", None, "deep"]
    assert isinstance(rows[1], BadRow) and rows[1].reason.startswith("not UTF-8")


def test_reasoning_gym_conversations() -> None:
    rows = list(iter_rows(SourceConfig(kind="reasoning_gym", families=("lcm", "chain_sum"), num_per_family=3), "sft"))
    assert [r.origin.file for r in rows] == ["reasoning_gym/lcm"] * 3 + ["reasoning_gym/chain_sum"] * 3
    for row in rows:
        assert isinstance(row, Conversation)
        assert [m["role"] for m in row.messages] == ["system", "user", "assistant"]
        assert not is_held_out(row.messages[1]["content"])
    assert rows == list(
        iter_rows(SourceConfig(kind="reasoning_gym", families=("lcm", "chain_sum"), num_per_family=3), "sft")
    )


def test_python_stdlib() -> None:
    rows = iter_rows(SourceConfig(kind="python_stdlib"), "cpt")
    assert next(rows).origin.file.startswith("stdlib/")


# ------------------------------------------------------------ files


def test_files_are_sorted_and_taken_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c d \u6f22.jsonl"):
        (tmp_path / name).write_text("{}")
    os.symlink(tmp_path / "a.jsonl", tmp_path / "z.jsonl")
    os.symlink(tmp_path, tmp_path / "loop")
    paths = (str(tmp_path / "b.jsonl"), str(tmp_path), str(tmp_path / "*.jsonl"))
    found = find_files(SourceConfig(kind="jsonl", paths=paths))
    assert [Path(f.path).name for f in found] == ["b.jsonl", "a.jsonl", "c d \u6f22.jsonl"]


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text('{"text": "x"}')
    assert texts(read(tmp_path / "a[1].jsonl")) == ["x"]


def test_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no jsonl files in ") as error:
        read(tmp_path)
    assert error.value.hint == "the folder must hold files that end in .jsonl or .ndjson"
    with pytest.raises(DataError, match=r"no jsonl files in .*absent\.jsonl") as error:
        read(tmp_path / "absent.jsonl")
    assert error.value.hint == "check the path; patterns may use *, ? and **"


def test_compressed_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz is compressed") as error:
        read(tmp_path / "a.jsonl.gz")
    assert error.value.hint == "unpack it first"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.jsonl").chmod(0)
    with pytest.raises(DataError, match=r"a\.jsonl can't be read: Permission denied"):
        read(tmp_path / "a.jsonl")


def test_file_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fp8ctl.data.sources.find_files", lambda source: [InputFile(str(tmp_path / "gone.jsonl"), 9, "jsonl")]
    )
    with pytest.raises(DataError, match=r"gone\.jsonl can't be read: No such file"):
        read(tmp_path / "gone.jsonl")
