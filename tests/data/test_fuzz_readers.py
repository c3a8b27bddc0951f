"""Random bytes and mutated files of every format and compression: DataError is all that may be raised, and no row is lost in silence.

FP8CTL_FUZZ_CASES sets the number of cases (spread over the tests).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data.files import Slice, find_files
from fp8ctl.data.rows import BadRow, Document, Row
from fp8ctl.data.sources import iter_rows, iter_slice, split_file
from fp8ctl.errors import DataError

CASES = int(os.environ.get("FP8CTL_FUZZ_CASES", "800"))
MAX_ROW_BYTES = 300

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda raw: raw,
    "gz": lambda raw: gzip.compress(raw, 1),
    "zst": zstandard.ZstdCompressor(level=1, write_checksum=True).compress,
    "xz": lambda raw: lzma.compress(raw, preset=0),
    "bz2": lambda raw: bz2.compress(raw, 1),
}


def fuzz(share: float) -> Any:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=max(1, int(CASES * share)), deadline=None, suppress_health_check=checks, database=None)


def read(path: Path, kind: str, data: str = "cpt", damaged: str = "keep") -> list[Row] | None:
    """Rows; None where the whole file was refused with an error for users."""
    source = SourceConfig(kind=kind, paths=(str(path),), max_row_bytes=MAX_ROW_BYTES, damaged_files=damaged)  # type: ignore[arg-type]
    try:
        rows = list(iter_rows(source, data))
    except DataError as error:
        assert error.message and "\n" not in error.message
        return None
    for row in rows:
        assert row.origin.file == str(path) and row.origin.line >= 1
        assert isinstance(row, BadRow) or kind != "text" or isinstance(row, Document)
        if isinstance(row, BadRow):
            assert row.reason
            row.reason.encode()
            row.excerpt.encode()
    assert len({row.origin.at for row in rows}) == len(rows)  # each can be named
    # parts together are the file
    (file,) = find_files(source)
    for size in (1 + file.bytes // 3, 7 if file.bytes < 200 else 50):
        parts = split_file(file, size)
        again = [row for part in parts for row in iter_slice(part, source, data)]
        assert [(r.origin.at, type(r)) for r in again] == [(r.origin.at, type(r)) for r in rows]
    return rows


text = st.text(max_size=40) | st.sampled_from(["", " ", "a\u2028b", "\x0b\x0c\x85", "\ufeff", "\\", '"', "\0", "]}"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "a", "b"]) | text, inner, max_size=3)
    ),
    max_leaves=6,
)
turns = st.fixed_dictionaries(
    {},
    optional={k: values | st.sampled_from(["user", "assistant", "gpt"]) for k in ("role", "from", "content", "value")},
)
objects = st.one_of(
    st.fixed_dictionaries({"text": text}),
    st.fixed_dictionaries({"messages": st.lists(turns, max_size=3) | values}),
    st.fixed_dictionaries({"prompt": values | st.lists(turns, max_size=2), "completion": values}),
    values,
)
junk = st.binary(max_size=30) | st.sampled_from(
    [b"\n", b"\r\n", b"\0" * 9, b"\xef\xbb\xbf", b"\xff", b"{", b"[", b'"', b"\\", b","]
)


@st.composite
def mutated(draw: Any, whole: bytes) -> bytes:
    """A file with a few bytes changed, put in, taken out or cut off."""
    raw = bytearray(whole)
    for _ in range(draw(st.integers(0, 3))):
        at, end = draw(st.integers(0, len(raw))), draw(st.integers(0, 20))
        how = draw(st.sampled_from(["flip", "insert", "delete", "cut", "repeat"]))
        if how == "flip" and at < len(raw):
            raw[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "insert":
            raw[at:at] = draw(junk)
        elif how == "delete":
            del raw[at : at + end]
        elif how == "cut":
            del raw[at:]
        elif how == "repeat":
            raw[at:at] = raw[at : at + 4 * end]
    return bytes(raw)


def dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", errors="surrogatepass")


@fuzz(0.25)
@given(st.data())
def test_jsonl(tmp_path: Path, data: st.DataObject) -> None:
    lines = [dump(v) for v in data.draw(st.lists(objects, max_size=6))]
    raw = data.draw(mutated(b"\n".join(lines)))
    compression = data.draw(st.sampled_from(list(PACK)))
    path = tmp_path / f"a.jsonl{'.' * bool(compression)}{compression}"
    path.write_bytes(PACK[compression](raw))
    rows = read(path, "jsonl", data.draw(st.sampled_from(["cpt", "sft"])))
    if rows is not None:  # a line is a row, good or bad, unless it is blank
        assert len(rows) == sum(bool(line.strip().removeprefix(b"\xef\xbb\xbf")) for line in raw.split(b"\n"))


@fuzz(0.25)
@given(st.data())
def test_damaged_compression(tmp_path: Path, data: st.DataObject) -> None:
    lines = [dump({"text": f"{i} {data.draw(text)}"}) for i in range(data.draw(st.integers(0, 8)))]
    compression = data.draw(st.sampled_from(["gz", "zst", "xz", "bz2"]))
    pack = PACK[compression]
    half = len(lines) // 2
    packed = pack(b"".join(line + b"\n" for line in lines[:half])) + pack(
        b"".join(line + b"\n" for line in lines[half:])
    )
    raw = data.draw(mutated(packed))
    path = tmp_path / f"a.jsonl.{compression}"
    path.write_bytes(raw)
    rows = read(path, "jsonl")
    if raw == packed:
        assert rows is not None and len(rows) == len(lines)
    elif rows is not None and path.read_bytes()[:3] == packed[:3] and not any(isinstance(r, BadRow) for r in rows):
        # checksums hold: without a word whole members came, each any number of times
        good = [r.text for r in rows if isinstance(r, Document)]
        expected = [json.loads(line)["text"] for line in lines]
        first, second = expected[:half], expected[half:]
        while good:
            member = first if first and good[: len(first)] == first else second
            assert member and good[: len(member)] == member
            del good[: len(member)]
    if rows is None or any(isinstance(r, BadRow) and "damaged" in r.reason for r in rows):
        assert read(path, "jsonl", damaged="fail") is None


@fuzz(0.2)
@given(st.data())
def test_json(tmp_path: Path, data: st.DataObject) -> None:
    items = data.draw(st.lists(objects, max_size=6))
    whole = dump(items) if data.draw(st.booleans()) else b"\n".join(dump({"text": i}) for i in items)
    raw = data.draw(mutated(whole))
    compression = data.draw(st.sampled_from(["", "gz"]))
    path = tmp_path / "a.json"
    path.write_bytes(PACK[compression](raw))
    rows = read(path, "json", data.draw(st.sampled_from(["cpt", "sft"])))
    if raw == whole and rows is not None:
        assert len(rows) == len(items)
    if rows is not None and not rows:
        assert not raw.strip(b" \t\r\n[]\xef\xbb\xbf")


@fuzz(0.15)
@given(st.data())
def test_parquet(tmp_path: Path, data: st.DataObject) -> None:
    column = data.draw(st.lists(st.none() | st.text(st.characters(codec="utf-8"), max_size=30), max_size=20))
    table = pa.table({"id": range(len(column)), "text": pa.array(column, pa.string())})
    if data.draw(st.booleans()):
        table = pa.table({"messages": pa.array([[{"role": "user", "content": c}] for c in column])})
    out = io.BytesIO()
    pq.write_table(
        table,
        out,
        row_group_size=data.draw(st.integers(1, 20)),
        compression=data.draw(st.sampled_from(["none", "zstd", "snappy"])),
        write_page_checksum=data.draw(st.booleans()),
    )
    whole = out.getvalue()
    raw = data.draw(mutated(whole))
    path = tmp_path / "a.parquet"
    path.write_bytes(raw)
    kind = "sft" if "messages" in table.column_names else "cpt"
    rows = read(path, "parquet", kind)
    if raw == whole:
        assert rows is not None and len(rows) == len(column)


@fuzz(0.15)
@given(st.data())
def test_random_bytes(tmp_path: Path, data: st.DataObject) -> None:
    magic = data.draw(
        st.sampled_from([b"", *(pack(b"")[:4] for pack in PACK.values()), b"PAR1", b"\xff\xfe", b"[", b"{"])
    )
    kind = data.draw(st.sampled_from(["jsonl", "json", "parquet", "text"]))
    path = tmp_path / f"a{data.draw(st.sampled_from(['', '.gz', '.zst', '.xz', '.bz2']))}"
    path.write_bytes(magic + data.draw(st.binary(max_size=600)))
    rows = read(path, kind, "cpt")
    if kind == "text":
        assert rows is None or len(rows) == 1


def test_the_check_itself_sees_a_lost_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}\n')
    monkeypatch.setattr(f"{__name__}.split_file", lambda file, size: [Slice(file, 5, None)])
    with pytest.raises(AssertionError):
        read(path, "jsonl")
