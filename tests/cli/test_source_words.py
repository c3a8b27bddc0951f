from __future__ import annotations

from pathlib import Path

import pytest

from fp8ctl.cli.source_words import is_path, with_sources
from fp8ctl.config.compose import compose
from fp8ctl.errors import DataError


def test_words_with_names_are_settings_and_others_are_files(tmp_path: Path) -> None:
    (tmp_path / "date=2024").mkdir()
    (tmp_path / "date=2024" / "a.parquet").touch()
    for word in ("a.jsonl", "s3://bucket/x=1/a.jsonl", str(tmp_path / "date=2024"), "data/**/*.jsonl"):
        assert is_path(word)
    for word in ("out=x", "sources.0.paths=[a.jsonl]", "+x=1"):
        assert not is_path(word)


@pytest.mark.parametrize("name", ["a.jsonl", "it's, [odd] {name} ${x} \\ a.jsonl", "\u00e9 b\\'s.jsonl"])
def test_files_of_one_format_are_one_source(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt.gz").touch()
    words = [name, "c.ndjson.zst", "out=x", str(folder), "d.jsonl", "sources.0.text_field=body"]
    config = compose("data_dedup", with_sources(words))
    assert [(s.kind, s.paths, s.text_field) for s in config.sources] == [
        ("jsonl", (name, "c.ndjson.zst"), "body"),
        ("text", (str(folder),), "text"),
        ("jsonl", ("d.jsonl",), "text"),
    ]
    assert config.out == "x"


def test_names_that_do_not_tell(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the name of a\.bin does not tell its format") as error:
        with_sources(["a.bin"])
    assert ".jsonl" in str(error.value.hint)
    with pytest.raises(DataError, match="holds no file of a known format"):
        with_sources([str(tmp_path)])
