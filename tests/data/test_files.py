from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data.files import InputFile, find_files
from fp8ctl.errors import DataError, MissingPackageError


def find(*paths: Path | str, kind: Any = "jsonl") -> list[InputFile]:
    return find_files(SourceConfig(kind=kind, paths=tuple(map(str, paths))))


def names(found: list[InputFile]) -> list[str]:
    return [Path(f.path).name for f in found]


@pytest.fixture
def memory() -> Any:
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield system
    system.store.clear()


def test_files_are_sorted_and_taken_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c d \u6f22.jsonl"):
        (tmp_path / name).write_text("{}")
    os.symlink(tmp_path / "a.jsonl", tmp_path / "z.jsonl")
    os.symlink(tmp_path, tmp_path / "loop")
    found = find(tmp_path / "b.jsonl", tmp_path, tmp_path / "*.jsonl", f"file://{tmp_path}/a.jsonl")
    assert names(found) == ["b.jsonl", "a.jsonl", "c d \u6f22.jsonl"]
    assert found[0] == InputFile(str(tmp_path / "b.jsonl"), 2, "jsonl")


def test_folders_are_read_deep_through_links_and_without_hidden_files(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    root = tmp_path / "root"
    for folder in (elsewhere, root / "sub" / "deep", root / ".cache"):
        folder.mkdir(parents=True)
    for path in ("root/sub/deep/d.jsonl", "root/.cache/x.jsonl", "root/._a.jsonl", "elsewhere/e.NDJSON", "root/a.txt"):
        (tmp_path / path).write_text("{}")
    os.symlink(elsewhere, root / "linked")
    os.symlink(root, elsewhere / "back")
    assert names(find(root)) == ["e.NDJSON", "d.jsonl"]


def test_compressed_names_are_understood(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.GZ", "c.ndjson.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"{}"))
    (tmp_path / "d.gz").write_bytes(b"")
    assert [(f.compression, f.note) for f in find(tmp_path)] == [("gz", "")] * 3


def test_content_counts_more_than_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "b.jsonl.zst").write_bytes(b'{"text": "plain"}')
    (tmp_path / "c.jsonl.xz").write_bytes(gzip.compress(b"{}"))
    (tmp_path / "d.jsonl.bz2").write_bytes(b"")
    found = find(tmp_path)
    assert [f.compression for f in found] == ["gz", "", "gz", "bz2"]
    assert [f.note.removeprefix(f"{f.path} is ") for f in found] == [
        "named as if not compressed, but is gz",
        "named zst, but is not compressed",
        "named xz, but is gz",
        "",
    ]


def test_a_name_that_looks_like_a_pattern(tmp_path: Path) -> None:
    for name in ("a[1].jsonl", "a1.jsonl"):
        (tmp_path / name).write_text("{}")
    assert names(find(tmp_path / "a[1].jsonl")) == ["a[1].jsonl"]
    assert names(find(tmp_path / "a?.jsonl")) == ["a1.jsonl"]


def test_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no jsonl files in ") as error:
        find(tmp_path)
    assert error.value.hint == "the folder must hold files that end in .jsonl or .ndjson (.gz, .zst, .xz, .bz2)"
    with pytest.raises(DataError, match=r"no jsonl files in .*absent\.jsonl") as error:
        find(tmp_path / "absent.jsonl")
    assert error.value.hint == "check the path; patterns may use *, ? and **"
    (tmp_path / "a.json.gz").write_text("{}")
    with pytest.raises(DataError, match="no jsonl files in ") as error:
        find(tmp_path)
    assert error.value.hint == "it holds 1 json files: set kind=json, or give another folder"


def test_what_is_no_readable_file(tmp_path: Path) -> None:
    os.symlink(tmp_path / "gone", tmp_path / "a.jsonl")
    with pytest.raises(
        DataError, match=r"a\.jsonl can't be read: No such file or directory \(a link that leads nowhere\)"
    ):
        find(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is no regular file"):
        find(tmp_path / "pipe")


def test_folder_without_permission(closed_folder: Path) -> None:
    (closed_folder / "closed").mkdir(0)
    with pytest.raises(DataError, match="closed can't be read: Permission denied"):
        find(closed_folder)


def test_parquet_and_others_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"PAR1....PAR1")
    with pytest.raises(DataError, match=r"a\.jsonl is a Parquet file") as error:
        find(tmp_path)
    assert error.value.hint == "set kind=parquet for its source"
    (tmp_path / "b.parquet").write_bytes(gzip.compress(b"PAR1....PAR1"))
    with pytest.raises(DataError, match=r"b\.parquet is compressed as a whole \(gz\)") as error:
        find(tmp_path / "b.parquet", kind="parquet")
    assert error.value.hint == "unpack it: Parquet files compress inside"


# ------------------------------------------------------------ remote


def test_remote_folders_patterns_and_files(memory: Any) -> None:
    for path in ("/d/b.jsonl", "/d/a.jsonl.gz", "/d/sub/c.jsonl", "/d/.hidden/x.jsonl", "/d/e.txt", "/d/f[1].jsonl"):
        memory.pipe(path, b"{}")
    assert [f.path for f in find("memory://d")] == [
        "memory:///d/a.jsonl.gz",
        "memory:///d/b.jsonl",
        "memory:///d/f[1].jsonl",
        "memory:///d/sub/c.jsonl",
    ]
    assert find("memory://d/a.jsonl.gz", "memory://d/a.*") == [InputFile("memory:///d/a.jsonl.gz", 2, "jsonl", "gz")]
    assert names(find("memory://d/**/c.jsonl", "memory://d/f[1].jsonl")) == ["c.jsonl", "f[1].jsonl"]


def test_remote_errors(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"no jsonl files in memory://d/\*\.jsonl") as error:
        find("memory://d/*.jsonl")
    assert error.value.hint == "check the address; patterns may use *, ? and **"
    with pytest.raises(DataError, match="no jsonl files in memory://absent"):
        find("memory://absent")
    memory.pipe("/e/a.txt", b"x")
    with pytest.raises(DataError, match="no jsonl files in memory://e") as error:
        find("memory://e")
    assert error.value.hint == "it holds 1 text files: set kind=text, or give another folder"
    with pytest.raises(DataError, match="nowhere://a can't be read: ValueError: Protocol not known: nowhere"):
        find("nowhere://a")
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(MissingPackageError, match="s3://bucket/a can't be read without another package: ") as missing:
        find("s3://bucket/a")
    assert missing.value.hint == "pip install 's3fs'"
