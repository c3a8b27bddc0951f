from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from fp8ctl.data.rows import Document
from fp8ctl.data.stdlib_text import iter_stdlib, python_version
from fp8ctl.errors import DataError


def test_source_and_help_of_this_python() -> None:
    documents = list(iter_stdlib())
    assert all(isinstance(d, Document) for d in documents)
    names = [d.origin.file for d in documents]
    sources = [n for n in names if n.startswith("stdlib/")]
    assert sources == sorted(sources) and len(sources) > 300
    assert not any("site-packages" in n or "/test/" in n or "/tests/" in n for n in names)
    assert "stdlib/pydoc_data/topics.py" not in names
    by_name = {d.origin.file: d.text for d in documents}
    assert by_name["stdlib/json/decoder.py"] == Path(sysconfig.get_paths()["stdlib"], "json/decoder.py").read_text()
    assert '"""Implementation of JSONDecoder' in by_name["stdlib/json/decoder.py"], "docstrings stay in the source"
    assert 'The "try" statement' in by_name["pydoc/try"]
    assert names == [d.origin.file for d in iter_stdlib()]
    assert python_version().startswith("cpython 3.")


def test_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="has no source files"):
        list(iter_stdlib())


def test_unreadable_file_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    (tmp_path / "a.py").write_bytes(b"# \xe9\n")
    (tmp_path / "b.py").write_bytes(b"# -*- coding: latin-1 -*-\n# \xe9\n")
    first, second, *_ = iter_stdlib()
    assert not isinstance(first, Document) and "can't be read" in first.reason
    assert isinstance(second, Document) and "\u00e9" in second.text
