from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data import hub
from fp8ctl.data.hub import import_dataset
from fp8ctl.data.rows import Conversation, Document
from fp8ctl.data.sources import iter_rows
from fp8ctl.errors import DataError, MissingPackageError

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    train = datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(2500)], "messages": [TURNS] * 2500})
    both = datasets.DatasetDict({"train": train, "test": train.select(range(3))})
    both.save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_a_saved_folder_becomes_parquet_files(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_FILE_ROWS", 2000)
    out = tmp_path / "out"
    seen: list[int] = []
    assert import_dataset(str(saved), out, progress=seen.append) == {"train": 2500, "test": 3}
    assert seen[-1] == 2503
    assert sorted(p.name for p in out.iterdir()) == [
        "import.json",
        "test-00000.parquet",
        "train-00000.parquet",
        "train-00001.parquet",
    ]
    assert json.loads((out / "import.json").read_text())["rows"] == {"train": 2500, "test": 3}
    source = SourceConfig(kind="parquet", paths=(str(out / "train-*.parquet"),))
    texts = [row.text for row in iter_rows(source, "cpt") if isinstance(row, Document)]
    assert texts == [f"t{i}" for i in range(2500)]
    assert all(isinstance(row, Conversation) and row.messages == TURNS for row in iter_rows(source, "sft"))
    with pytest.raises(DataError, match="out holds an import already") as error:
        import_dataset(str(saved), out)
    assert error.value.hint == "choose another folder, or remove this one"


def test_one_split(saved: Path, tmp_path: Path) -> None:
    assert import_dataset(str(saved), tmp_path / "out", split="test") == {"test": 3}
    with pytest.raises(DataError, match="has no split dev") as error:
        import_dataset(str(saved), tmp_path / "other", split="dev")
    assert error.value.hint == "its splits: train, test"
    assert import_dataset(str(saved / "train"), tmp_path / "single") == {"train": 2500}


def test_streamed_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[Any] = []

    def load(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        rows = [{"text": None}] * 1500 + [{"text": "a"}, {"text": "b"}]
        features = datasets.Features({"text": datasets.Value("string")})
        stream = datasets.Dataset.from_list(rows, features=features).to_iterable_dataset()
        return datasets.IterableDatasetDict({"train": stream})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert import_dataset("some/where", tmp_path / "out", name="en", revision="abc") == {"train": 1502}
    assert asked == [(("some/where", "en"), {"revision": "abc", "streaming": True})]
    rows = list(iter_rows(SourceConfig(kind="parquet", paths=(str(tmp_path / "out"),)), "cpt"))
    assert len(rows) == 1502 and isinstance(rows[-1], Document) and rows[-1].text == "b"
    stream = datasets.IterableDataset.from_generator(lambda: iter([{"a": 1}] * 1000 + [{"a": "x"}]))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: {"train": stream})
    with pytest.raises(DataError):
        import_dataset("some/where", tmp_path / "mixed")
    assert not list((tmp_path / "mixed").glob("*"))


def test_what_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "plain").mkdir()
    with pytest.raises(DataError, match="plain was not written by save_to_disk") as error:
        import_dataset(str(tmp_path / "plain"), tmp_path / "out")
    assert error.value.hint == "give its files to a source of `fp8ctl data prep` as they are"
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **options: (_ for _ in ()).throw(ValueError("no\nsuch")))
    with pytest.raises(DataError, match="the data set some/where can't be loaded: no$"):
        import_dataset("some/where", tmp_path / "out")


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="datasets can't be loaded") as error:
        import_dataset("some/where", tmp_path / "out")
    assert error.value.hint == "pip install 'fp8ctl[datasets]'"


def test_command(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from fp8ctl.cli.data import app

    result: Any = CliRunner().invoke(app, ["import", str(saved), str(tmp_path / "out"), "--split", "test"])
    assert result.exit_code == 0
    assert (tmp_path / "out" / "test-00000.parquet").exists()
