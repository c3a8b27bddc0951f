from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data.reasoning_gym import is_held_out
from fp8ctl.data.rows import BadRow, Conversation, Document, Origin, Row
from fp8ctl.data.sources import InputFile, Slice, find_files, iter_rows, iter_slice, split_file
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
    assert bad[5].reason.startswith("not JSON: unexpected end of data") and bad[5].excerpt == '{"text": "two"'
    assert bad[6].reason == "not JSON: something follows the first value"
    assert bad[7].reason == "a list, not an object" and bad[8].reason == "null, not an object"
    assert bad[9].reason == "no field 'text' (fields: body, id)"
    assert bad[10].reason == "field 'text' is null, not text" and bad[11].reason == "field 'text' is a list, not text"
    assert bad[12].reason == "not UTF-8: invalid start byte at byte 10"
    assert bad[13].reason.startswith("not JSON: it holds NaN, Infinity, a lone surrogate")
    assert bad[14].reason.startswith("not JSON: it holds NaN, Infinity, a lone surrogate")
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
    assert isinstance(no_object, BadRow) and no_object.reason == "a list, not an object"


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
        with pytest.raises(
            DataError, match=r"a\.parquet is damaged: no whole Parquet file: .* \(0 good rows came before\)"
        ):
            read(path, "parquet")
        (lost,) = read(path, "parquet", damaged_files="keep")
        assert isinstance(lost, BadRow) and lost.reason.startswith(
            "the file is damaged, this row and all that follow are"
        )


def test_parquet_without_the_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), path)
    with pytest.raises(DataError, match=r"has no column text") as error:
        read(path, "parquet")
    assert error.value.hint == "its columns: body, id"


# ------------------------------------------------------------ text, generators


def test_text_is_one_document_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\n")
    (tmp_path / "b.md").write_bytes(b"\xe6\xbc")
    (tmp_path / "c.bin").write_bytes(b"not asked for")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.rst").write_bytes(b"deep")
    rows = read(tmp_path, "text")
    assert texts(rows) == ["one\r\n\ntwo\n", None, "deep"]
    assert isinstance(rows[1], BadRow) and rows[1].reason == "not UTF-8: unexpected end of data at byte 0"


def test_text_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\u6f22".encode("utf-16"))
    (tmp_path / "b.txt").write_bytes(b"a\0b")
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.txt").write_bytes(b"x" * 3_000_000)
    rows = read(tmp_path, "text", max_row_bytes=1_000_000)
    reasons = [r.reason if isinstance(r, BadRow) else r.text for r in rows if not isinstance(r, Conversation)]
    assert reasons == [
        f"{tmp_path}/a.txt is UTF-16, not UTF-8",
        "it holds NUL bytes, so it is no text",
        "",
        "3,000,000 bytes long, which is more than max_row_bytes",
    ]


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


# ------------------------------------------------------------ JSON, compressed and damaged files


def test_json_lists_objects_and_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"text": "one"}, {"text": 2}, 3, {"text": "two"}]')
    (tmp_path / "b.json").write_text(json.dumps({"text": "three"}, indent=2))
    (tmp_path / "c.json").write_text('{"text": "four"}\n{"text": "five"}\n')
    rows = read(tmp_path, "json")
    assert texts(rows) == ["one", None, None, "two", "three", "four", "five"]
    assert isinstance(rows[1], BadRow) and rows[1].reason == "field 'text' is a number, not text"
    assert rows[1].origin == Origin(str(tmp_path / "a.json"), 2, 1) and rows[1].excerpt == '{"text": 2}'
    assert isinstance(rows[2], BadRow) and rows[2].reason == "a number, not an object"
    assert [r.origin.at for r in rows] == [0, 1, 2, 3, 0, 0, 1]


def test_only_blank_lines_and_empty_files(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", b""), ("b.jsonl", b"\n \n\r\n\t\n"), ("c.jsonl", b"\xef\xbb\xbf\n")):
        (tmp_path / name).write_bytes(content)
    assert read(tmp_path) == []
    (tmp_path / "a.json").write_bytes(b" ")
    assert read(tmp_path, "json") == []


def test_half_written_last_line_and_joined_files(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n{"text": "c')
    rows = read(path)
    assert texts(rows) == ["a", "b", None]
    assert isinstance(rows[2], BadRow)
    assert rows[2].reason.endswith("(the last line, without a line end: half written?)")
    assert [(r.origin.line, r.origin.at) for r in rows] == [(1, 0), (2, 14), (3, 31)]


def test_a_line_of_200_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as f:
        f.write(b'{"text": "')
        for _ in range(200):
            f.write(b"0123456789abcdef" * 65536)
        f.write(b'"}\n{"text": "next"}\n')
    long, after = read(path)
    assert isinstance(long, Document) and len(long.text) == 200 << 20
    assert isinstance(after, Document) and after.origin == Origin(str(path), 2, (200 << 20) + 13)
    refused, after = read(path, max_row_bytes=100_000_000)
    assert isinstance(refused, BadRow) and isinstance(after, Document)
    assert refused.reason == "209,715,212 bytes long, which is more than max_row_bytes"
    assert refused.excerpt == '{"text": "' + ("0123456789abcdef" * 12)[:190]


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_damaged_files(tmp_path: Path, kind: str) -> None:
    values = [{"text": f"document {i * 7919 % 10007}"} for i in range(1000)]
    lines = "\n".join(map(json.dumps, values)) if kind == "jsonl" else json.dumps(values)
    path = tmp_path / f"a.{kind}.gz"
    whole = gzip.compress(lines.encode())
    path.write_bytes(whole[: len(whole) // 2])
    said = "its gz stream ends too early"
    with pytest.raises(DataError) as error:
        read(path, kind)
    kept = read(path, kind, damaged_files="keep")
    good = len(kept) - 1
    assert 100 < good < 900
    assert error.value.message == f"{path} is damaged: {said} ({good:,} good rows came before)"
    assert (
        error.value.hint
        == "copy or write it again, or set sources.*.damaged_files=keep to use the rows before the damage"
    )
    assert texts(kept) == [*(v["text"] for v in values[:good]), None]
    lost = kept[-1]
    assert isinstance(lost, BadRow) and lost.origin.line == good + 1
    assert lost.reason == f"the file is damaged, this row and all that follow are lost: {said}"
    at = good if kind == "json" else len("\n".join(map(json.dumps, values[:good]))) + 1
    assert lost.origin.at == at


def test_utf16_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    with pytest.raises(DataError, match=r"a\.jsonl is UTF-16, not UTF-8"):
        read(tmp_path)


def test_remote_files(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    lines = b"".join(b'{"text": "document %d"}\n' % i for i in range(100))
    memory.pipe("/d/a.jsonl", lines)
    memory.pipe("/d/b.jsonl.zst", zstandard.compress(lines))
    pq.write_table(pa.table({"text": [f"document {i}" for i in range(100)]}), tmp_path / "c.parquet", row_group_size=10)
    memory.pipe("/d/c.parquet", (tmp_path / "c.parquet").read_bytes())
    expected = [f"document {i}" for i in range(100)]
    source = SourceConfig(kind="jsonl", paths=("memory://d",))
    assert texts(list(iter_rows(source, "cpt"))) == expected * 2
    plain, packed = find_files(source)
    assert texts(in_parts(plain, source, 300)) == expected and len(split_file(plain, 300)) == 8
    assert split_file(packed, 10) == [Slice(packed)]
    source = SourceConfig(kind="parquet", paths=("memory://d/c.parquet",))
    (file,) = find_files(source)
    assert texts(in_parts(file, source, 100)) == expected and len(split_file(file, 100)) == 10
    memory.pipe("/d/e.jsonl", zstandard.compress(lines))
    (misnamed,) = find_files(SourceConfig(paths=("memory://d/e.jsonl",)))
    assert split_file(misnamed, 10) == [Slice(misnamed)]
    assert texts(list(iter_slice(Slice(misnamed), source, "cpt"))) == expected


# ------------------------------------------------------------ slices


def in_parts(file: InputFile, source: SourceConfig, max_bytes: int, kind: str = "cpt") -> list[Row]:
    return [row for part in split_file(file, max_bytes) for row in iter_slice(part, source, kind)]


def identified(rows: list[Row]) -> list[tuple[int, str]]:
    return [(r.origin.at, r.text if isinstance(r, Document) else getattr(r, "reason", "")) for r in rows]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["", "end"])
def test_slices_at_every_byte(tmp_path: Path, end: str, last: str) -> None:
    path = tmp_path / "a.jsonl"
    lines = ['\ufeff{"text": "a"}', "", '{"text": "bb\u6f22"}', "broken", "", "", '{"text": ""}', " "]
    path.write_bytes((end.join([*lines, '{"text": "z"}']) + (end if last else "")).encode())
    source = SourceConfig(paths=(str(path),))
    (file,) = find_files(source)
    whole = identified(list(iter_rows(source, "cpt")))
    assert len(whole) == 5
    for size in range(1, file.bytes + 2):
        assert identified(in_parts(file, source, size)) == whole
    for border in range(file.bytes + 1):
        parts = [Slice(file, 0, border), Slice(file, border, file.bytes)]
        assert identified([r for p in parts for r in iter_slice(p, source, "cpt")]) == whole


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.sampled_from([b"", b" ", b"{}", b'{"text": "a"}', b'{"text": "' + b"x" * 50 + b'"}', b"\xff"])),
    end=st.sampled_from([b"\n", b"\r\n"]),
    final=st.booleans(),
    borders=st.lists(st.integers(0, 400)),
)
def test_slices_together_are_the_file(
    tmp_path: Path, lines: list[bytes], end: bytes, final: bool, borders: list[int]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(end.join(lines) + (end if final else b""))
    source = SourceConfig(paths=(str(path),), max_row_bytes=40)
    (file,) = find_files(source)
    cuts = [0, *sorted(min(b, file.bytes) for b in borders), file.bytes]
    parts = [Slice(file, a, b) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
    rows = [r for p in parts for r in iter_slice(p, source, "cpt")]
    assert identified(rows) == identified(list(iter_rows(source, "cpt")))


def test_parquet_slices(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"t{i}" if i % 7 else None for i in range(1000)]}), path, row_group_size=64)
    source = SourceConfig(kind="parquet", paths=(str(path),))
    (file,) = find_files(source)
    whole = list(iter_rows(source, "cpt"))
    for size in (1, 500, 2000, 10**9):
        assert in_parts(file, source, size) == whole
    assert len(split_file(file, 1)) == 16 and split_file(file, 10**9) == [Slice(file)]
    path.write_bytes(path.read_bytes()[:-9])
    (file,) = find_files(source)
    assert split_file(file, 1) == [Slice(file)]


# ------------------------------------------------------------ files


def test_file_without_permission(closed_folder: Path) -> None:
    (closed_folder / "a.jsonl").write_text("{}")
    (closed_folder / "a.jsonl").chmod(0)
    with pytest.raises(DataError, match=r"a\.jsonl can't be read: Permission denied"):
        read(closed_folder / "a.jsonl")


def test_file_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fp8ctl.data.sources.find_files", lambda source: [InputFile(str(tmp_path / "gone.jsonl"), 9, "jsonl")]
    )
    with pytest.raises(DataError, match=r"gone\.jsonl can't be read: No such file"):
        read(tmp_path / "gone.jsonl")
