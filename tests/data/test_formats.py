from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8ctl.data.formats import Refused, TooLong, items, lines, parquet_groups, parquet_rows, parse
from fp8ctl.data.streams import DamagedError
from fp8ctl.errors import DataError


def cut(raw: bytes, size: int) -> Iterator[bytes]:
    return (raw[i : i + size] for i in range(0, len(raw), size))


# ------------------------------------------------------------ lines


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_whatever_the_chunks(size: int) -> None:
    raw = "a\n\nb\u2028\u0085\x0b\x0cc\r\nlonger line\nlast".encode()
    found = list(lines(cut(raw, size), 10, at=100))
    assert found == [
        (100, b"a", True),
        (102, b"", True),
        (103, "b\u2028\u0085\x0b\x0cc\r".encode(), True),
        (114, TooLong(11, b"longer line"), True),
        (126, b"last", False),
    ]


def test_a_line_that_is_too_long_is_not_held() -> None:
    def chunks() -> Iterator[bytes]:
        yield b"a" * 150
        yield from (b"b" * 1000 for _ in range(1000))
        yield b"\nnext\n"

    (first, second) = lines(chunks(), 10_000)
    assert first == (0, TooLong(1_000_150, b"a" * 150 + b"b" * 50), True)
    assert second == (1_000_151, b"next", True)


def test_damage_tells_where() -> None:
    def chunks() -> Iterator[bytes]:
        yield b"one\ntwo\nthr"
        raise DamagedError("cut")

    found = lines(chunks(), 100)
    assert [next(found)[1], next(found)[1]] == [b"one", b"two"]
    with pytest.raises(DamagedError) as error:
        next(found)
    assert (error.value.at, error.value.number) == (8, 3)


# ------------------------------------------------------------ JSON items


@pytest.mark.parametrize("size", [1, 2, 5, 64, 10_000])
def test_items_whatever_the_chunks(size: int) -> None:
    values = [
        {"text": 'a "quoted" \\ [text], {x}', "more": [1, {"b": []}]},
        5,
        "s,]\\",
        None,
        [1, 2],
        {},
        {"t": "\\\\"},
    ]
    for raw in (json.dumps(values), json.dumps(values, indent=2), "\ufeff \n" + json.dumps(values) + "\n "):
        assert [parse(i) for i in items(cut(raw.encode(), size), 10_000)] == values
    several = '{"a": 1}\n{"b": "}"}[{"c": 3}, {"d": []}] [] '
    assert [parse(i) for i in items(cut(several.encode(), size), 99)] == [{"a": 1}, {"b": "}"}, {"c": 3}, {"d": []}]
    assert (
        list(items(cut(b"", size), 9)) == list(items(cut(b" \n", size), 9)) == list(items(cut(b"[ ]", size), 9)) == []
    )


@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_broken_item_costs_only_itself(size: int) -> None:
    raw = b'[{"a": NaN}, {"b": "\xff"}, {"c": }, {"d": 1} {"e": 2}, , {"f": "\\ud800"}, {"g": 7},]'
    found = [parse(i) for i in items(cut(raw, size), 1000)]
    assert found[-1] == {"g": 7}
    assert [f.reason.split(" (")[0] for f in found[:-1]] == [
        "not JSON: it holds NaN, Infinity, a lone surrogate or another thing that JSON has not",
        "not UTF-8: invalid start byte at byte 7",
        "not JSON: unexpected character, expected a JSON value: line 1 column 7",
        "not JSON: something follows the first value",
        "not JSON: nothing in front of a comma",
        "not JSON: it holds NaN, Infinity, a lone surrogate or another thing that JSON has not",
    ]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_items_that_are_too_long(size: int) -> None:
    long = {"text": '\\"]}' * 500 + "\\" * 301}
    raw = json.dumps([1, long, [2], long]).encode()
    found = list(items(cut(raw, size), 50))
    assert (found[0], found[2]) == (b"1", b"[2]")
    for item in (found[1], found[3]):
        assert isinstance(item, TooLong) and abs(item.size - len(json.dumps(long))) <= 1
        assert item.head.startswith(b'{"text": "')
    assert parse(found[1]).reason.endswith("bytes long, which is more than max_row_bytes")


@pytest.mark.parametrize(
    ("raw", "given", "said"),
    [
        (b'[{"a": 1}, {"b": 2', 1, "a list or object is not closed at its end: cut short, or a bracket is missing"),
        (
            b'[{"a": 1}, {"b": "x], {}',
            1,
            "a list or object is not closed at its end: cut short, or a bracket is missing",
        ),
        (b'{"a": 1}, {"b": 2}', 1, "neither a list nor an object starts with ', {\"b\": 2}'"),
        (b'[{"a": 1}, {"b": 2}}', 1, "a list is closed by a brace: a bracket is missing"),
        (b"null", 0, "neither a list nor an object starts with 'null'"),
    ],
)
def test_json_that_goes_wrong(raw: bytes, given: int, said: str) -> None:
    found = []
    with pytest.raises(DamagedError) as error:
        for item in items(cut(raw, 100), 1000):
            found.append(item)
    assert (len(found), error.value.at, error.value.number, error.value.message) == (given, given, given + 1, said)


# ------------------------------------------------------------ one record


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a": 1', "not JSON: unexpected end of data: line 1 column 8 (char 7)"),
        (b"\0\0\0", "only NUL bytes, as a crash of whoever wrote it leaves them"),
        (b'{"a": "b\0"}', "not JSON: it holds NUL bytes"),
        (b'{"a": "\xe6\xbc"}', "not UTF-8: invalid continuation byte at byte 7"),
        (b'{"a": 1}{"b": 2}', "not JSON: something follows the first value"),
        (b"[" * 5000 + b"]" * 5000, "not JSON: Recursion limit reached: line 1 column 1024 (char 1023)"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: number out of range"),
    ],
)
def test_reasons(raw: bytes, reason: str) -> None:
    found = parse(raw)
    assert isinstance(found, Refused) and found.reason.startswith(reason.split(":")[0])
    if "range" not in reason and "Recursion" not in reason:
        assert found.reason == reason


def test_values() -> None:
    assert parse(b'{"a": 1, "a": 2}') == {"a": 2}
    assert parse(b'\xef\xbb\xbf{"a": "\\u0000"} \r') == {"a": "\0"}
    assert parse(b'{"a"', ended=False).reason.endswith(" (the last line, without a line end: half written?)")


# ------------------------------------------------------------ Parquet


def parquet(tmp_path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", **options)
    return tmp_path / "a.parquet"


def rows(path: Path, *wanted: str, text: bool = True, **part: Any) -> list[Any]:
    with open(path, "rb") as f:
        return list(parquet_rows(f, str(path), wanted or ("text",), text=text, **part))


TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_kinds_of_text(tmp_path: Path, kind: pa.DataType) -> None:
    if kind == pa.string_view():
        column = pa.array(["a", None, "\u6f22"], kind)
    elif pa.types.is_dictionary(kind):
        column = pa.array(["a", None, "\u6f22"]).dictionary_encode()
    else:
        column = pa.array(["a", None, "\u6f22"]).cast(kind)
    found = rows(parquet(tmp_path, {"text": column, "other": [1, 2, 3]}))
    texts = [v.decode() if isinstance(v, bytes) else v for _, row in found for v in row.values()]
    assert texts == ["a", None, "\u6f22"] and [at for at, _ in found] == [0, 1, 2]


@pytest.mark.parametrize(
    ("column", "kind"),
    [([["a"]], r"list<element: string>"), ([{"a": "b"}], r"struct<a: string>"), ([1], "int64"), ([1.5], "double")],
)
def test_columns_that_are_no_text(tmp_path: Path, column: list[Any], kind: str) -> None:
    path = parquet(tmp_path, {"text": column})
    with pytest.raises(DataError, match=rf"column text of .*a\.parquet is {kind}, not text") as error:
        rows(path)
    assert error.value.hint == "set text_field to a column of text"
    assert rows(path, text=False) == [(0, {"text": column[0]})]


def test_row_groups(tmp_path: Path) -> None:
    path = parquet(tmp_path, {"text": [f"t{i}" for i in range(95)]}, row_group_size=10)
    with open(path, "rb") as f:
        assert len(parquet_groups(f, str(path))) == 10
    parts = [rows(path, start=s, end=e) for s, e in ((0, 3), (3, 3), (3, 9), (9, None))]
    assert sum(parts, []) == rows(path) == [(i, {"text": f"t{i}"}) for i in range(95)]


def test_a_page_that_is_broken(tmp_path: Path) -> None:
    texts = [np.random.default_rng(i).bytes(500).hex() for i in range(300)]
    path = parquet(tmp_path, {"text": texts}, row_group_size=100, compression="zstd", use_dictionary=False)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2 - 500 : len(whole) // 2 + 500] = b"\xff" * 1000
    path.write_bytes(whole)
    found = rows(path)
    (at, damage) = next(f for f in found if isinstance(f[1], DamagedError))
    assert damage.message.startswith("no whole Parquet file: ")
    assert 100 <= at < 200 and (damage.at, damage.number) == (at, at + 1)
    assert [i for i, _ in found] == [*range(at + 1), *range(200, 300)]  # the next row group is whole


def test_no_parquet_at_all() -> None:
    for content in (b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", b"PARE" + b"\0" * 50 + b"PARE"):
        with pytest.raises(DamagedError, match="no whole Parquet file: "):
            list(parquet_rows(io.BytesIO(content), "a", ("text",), text=True))
