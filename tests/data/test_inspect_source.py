from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8ctl.config.data_schema import InspectConfig, SourceConfig
from fp8ctl.data.inspect_source import Inspection, guess_format, inspect_source
from fp8ctl.errors import ConfigError, DataError


def look(*paths: Path, format: str = "jsonl", **more: Any) -> Inspection:
    return inspect_source(
        InspectConfig(sources=(SourceConfig(kind=format, paths=tuple(map(str, paths))),), **more)  # type: ignore[arg-type]
    )


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_text_is_found_under_any_name(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = [{"id": f"{i}", "body_of_it": "the quick brown fox " * (i + 1), "score": i, "url": None} for i in range(40)]
    found = look(write(tmp_path / "a.jsonl", rows), tokenizer=str(tokenizer_folder))
    assert (found.kind, found.schema, found.missing_share) == ("cpt", "body_of_it", 0)
    assert (found.rows, found.rows_are_exact, found.sampled_rows) == (40, True, 40)
    assert found.fields["score"] == {"share": 1.0, "types": ["int"], "mean_chars": None}
    assert found.fields["url"]["share"] == 0 and found.fields["id"]["mean_chars"] == pytest.approx(1.75)
    assert found.tokens_are == "counted" and sum(found.histogram.values()) == 40
    assert found.tokens == pytest.approx(40 * found.mean_tokens, abs=1)
    assert found.tokens_per_second and found.prep_seconds == pytest.approx(found.tokens / found.tokens_per_second)
    assert found.disk_bytes == 4 * found.tokens + 40 * 20
    assert len(found.examples) == 3 and found.examples[0]["place"].endswith("a.jsonl line 1")
    json.dumps(found.as_dict())


@pytest.mark.parametrize(
    ("row", "schema"),
    [
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "text": "x"},
            "messages",
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "conversations"),
        ({"instruction": "q", "input": "", "output": "a"}, "instruction + output"),
        ({"prompt": "q", "completion": "a"}, "prompt + completion"),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, "input_ids"),
    ],
)
def test_conversations_are_known_by_their_fields(tmp_path: Path, row: dict[str, Any], schema: str) -> None:
    path = write(tmp_path / "a.jsonl", [row, row, {"other": 1}])
    found = look(path)
    assert (found.kind, found.schema.split(", ")[-1]) == ("sft", schema)
    assert found.missing_share == pytest.approx(1 / 3)
    assert list(found.bad.values())[0] == {"rows": 1, "first": f"{path} line 3"}
    # a field that is asked for goes before a guess
    assert look(path, text_field="text").kind == "cpt"


def test_rows_without_text_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n\n{"text": ""}\n{"text": 3}\n{"body": "x"}\n[1]\n{bad\n{"text": null}\n')
    found = look(path, text_field="text")
    assert {reason: bad["first"].split()[-1] for reason, bad in found.bad.items() if "JSON" not in reason} == {
        "field 'text' is empty": "3",
        "field 'text' is int, not text": "4",
        "no field 'text'": "5",
        "list, not an object": "6",
        "field 'text' is NoneType, not text": "8",
    }
    assert any("not JSON" in reason for reason in found.bad)
    assert found.missing_share == pytest.approx(6 / 7)


def test_every_format(tmp_path: Path) -> None:
    texts = ["word " * i for i in range(1, 51)]
    rows = [{"text": t} for t in texts]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert look(tmp_path / "a.json", format="json").rows == 50
    pq.write_table(pa.table({"content": texts, "meta": [{"a": 1}] * 50}), tmp_path / "a.parquet")
    found = look(tmp_path / "a.parquet", format="parquet", sample_rows=5)
    assert (found.schema, found.rows, found.rows_are_exact, found.sampled_rows) == ("content", 50, True, 5)
    (tmp_path / "a.txt").write_text("one document\nof two lines")
    found = look(tmp_path / "a.txt", format="text")
    assert (found.rows, found.schema, found.kind) == (1, "", "cpt") and found.examples[0]["text"].endswith("two lines")
    found = look(write(tmp_path / "a.jsonl", rows))
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes() * 40))
    some = look(packed, sample_rows=400)
    assert some.by_format == {"jsonl.gz": {"files": 1, "bytes": packed.stat().st_size}}
    assert not some.rows_are_exact and 500 < some.rows < 8000


def test_what_the_whole_is_is_told_by_a_sample(tmp_path: Path) -> None:
    # long documents in one file, many short ones in others, and other fields behind the first third
    write(tmp_path / "a0.jsonl", [{"text": "long " * 2000}] * 500)
    for i in range(1, 30):
        write(tmp_path / f"a{i}.jsonl", [{"text": "short"}] * 100)
    found = look(tmp_path, sample_rows=640)
    assert found.files == 30 and found.rows == pytest.approx(3400, rel=0.1)
    assert found.tokens == pytest.approx(500 * 2500 + 2900 * 1.25, rel=0.1)
    for i in range(80):
        write(tmp_path / f"b{i}.jsonl", [{"text": "middle " * 20}] * 10)
    many = look(*sorted(tmp_path.glob("b*.jsonl")))
    assert (many.files, many.rows, many.rows_are_exact) == (80, 800, False)
    late = [{"text": "x" * 1000}] * 3000 + [{"texts": "x" * 1000}] * 3000
    assert look(write(tmp_path / "late.jsonl", late), sample_rows=300, text_field="text").missing_share > 0.3


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", [{"text": "x"}])
    damaged = tmp_path / "b.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"text": "x"}\n' * 999)[:-20])
    found = look(good, damaged)
    assert found.warnings[0].startswith(f"{damaged} is damaged: ")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="no rows in 1 files, they are empty"):
        look(tmp_path / "empty.jsonl")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="no rows in 1 files: .*cut.parquet is no whole Parquet file"):
        look(tmp_path / "cut.parquet", format="parquet")
    with pytest.raises(ConfigError, match="no files to look at"):
        inspect_source(InspectConfig())
    with pytest.raises(ConfigError, match="python_stdlib has no files to look at"):
        inspect_source(InspectConfig(sources=(SourceConfig(kind="python_stdlib"),)))
    with pytest.raises(DataError, match="no tokenizer.json in"):
        look(good, tokenizer=str(tmp_path))


def test_format_by_name(tmp_path: Path) -> None:
    assert [guess_format(n) for n in ("a.JSONL", "x/*.parquet", "b.md.zst", "s3://b/c.json.gz")] == [
        "jsonl", "parquet", "text", "json"
    ]  # fmt: skip
    for name in ("a.jsonl", "b.txt", "c.jsonl.xz", "README"):
        (tmp_path / name).touch()
    assert guess_format(str(tmp_path)) == "jsonl"
    shutil.rmtree(tmp_path)
    with pytest.raises(DataError, match="does not tell its format"):
        guess_format(str(tmp_path))
