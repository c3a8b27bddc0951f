"""`fp8ctl data import`: a data set of the library `datasets`, from its hub or a saved folder, into local Parquet files.

The library is an importer only. What was prepared must not depend on a server, so rows are copied once, and everything after
reads the copy. No code that comes with a data set is run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fp8ctl.errors import DataError, MissingPackageError

FILE = "import.json"
"""Written last: a folder with it holds everything."""
_BATCH_ROWS = 1000
_FILE_ROWS = 500_000
_SAVED = ("dataset_dict.json", "dataset_info.json")


def import_dataset(
    source: str,
    out: Path,
    *,
    name: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> dict[str, int]:
    """Copies a data set into `out`, as SPLIT-00000.parquet and so on, and returns the rows of each split.

    Args:
        source: a folder that `datasets` saved, or the name of a data set on the hub.
        name: configuration of a data set that has several.
        split: the only split to copy; default: all.
        revision: commit or tag on the hub.
        progress: called with the number of rows copied so far.

    Raises:
        MissingPackageError: `datasets` is not installed.
        DataError: there is no such data set or split, it can't be read, or `out` holds an import already.
    """
    if (out / FILE).exists():
        raise DataError(f"{out} holds an import already", "choose another folder, or remove this one")
    rows: dict[str, int] = {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        splits, version = _load(source, name, split, revision)
        for split_name, dataset in splits.items():
            rows[split_name] = 0
            for written in _write(dataset, out, split_name):
                rows[split_name] += written
                progress(sum(rows.values()))
        about = {"source": source, "name": name, "revision": revision, "rows": rows, "datasets": version}
        (out / f"{FILE}.tmp").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        os.replace(out / f"{FILE}.tmp", out / FILE)
    except pa.ArrowException as error:
        raise DataError(
            f"the rows of {source} are not of one type: {error}", "write them as JSON lines yourself"
        ) from None
    except OSError as error:
        raise DataError(f"{out} can't be written: {error.strerror or error}", "choose another folder") from None
    return rows


def _load(source: str, name: str | None, split: str | None, revision: str | None) -> tuple[dict[str, Any], str]:
    try:
        import datasets
    except Exception as error:
        raise MissingPackageError(f"datasets can't be loaded: {error}", "pip install 'fp8ctl[datasets]'") from None
    try:
        if os.path.isdir(source):
            if not any(os.path.exists(os.path.join(source, saved)) for saved in _SAVED):
                raise DataError(
                    f"{source} was not written by save_to_disk of the library datasets",
                    "give its files to a source of `fp8ctl data prep` as they are",
                )
            loaded = datasets.load_from_disk(source)
        else:
            loaded = datasets.load_dataset(source, name, revision=revision, streaming=True)
    except DataError:
        raise
    except Exception as error:  # anything, from many libraries below
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"the data set {source} can't be loaded: {first_line}", "check its name, the network and the rights to it"
        ) from None
    splits = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
    if split is not None:
        if split not in splits:
            raise DataError(f"{source} has no split {split}", f"its splits: {', '.join(splits)}")
        splits = {split: splits[split]}
    return splits, datasets.__version__


def _write(dataset: Any, out: Path, split: str) -> Iterator[int]:
    """Writes one split and gives the rows of each batch; a file gets its name when it is whole."""
    writer: pq.ParquetWriter | None = None
    number = in_file = 0
    temporary = out / f".{split}.tmp"
    try:
        for table in _batches(dataset):
            if writer is None:
                # what the data set declares: in one batch a column may hold nothing but nulls
                schema = dataset.features.arrow_schema if dataset.features else table.schema
                writer = pq.ParquetWriter(temporary, schema, compression="zstd")
            writer.write_table(table.cast(writer.schema), row_group_size=_BATCH_ROWS)
            in_file += table.num_rows
            yield table.num_rows
            if in_file >= _FILE_ROWS:
                writer.close()
                os.replace(temporary, out / f"{split}-{number:05d}.parquet")
                writer, number, in_file = None, number + 1, 0
        if writer is not None:
            writer.close()
            os.replace(temporary, out / f"{split}-{number:05d}.parquet")
    finally:
        temporary.unlink(missing_ok=True)


def _batches(dataset: Any) -> Iterator[pa.Table]:
    try:
        yield from dataset.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    except Exception as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"the data set can't be read: {first_line}", "run the command again") from None
