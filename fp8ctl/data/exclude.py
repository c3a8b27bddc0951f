"""Exclusion lists: which rows a preparation leaves out, as `data dedup` and `data decontaminate` write them.

A list is a folder with excluded.parquet (file, at, line, reason, match) and report.json, which is written last. Text is never
copied: a row is named by its file and its place in it, so a list is refused once a file was changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fp8ctl.data.rows import Origin
from fp8ctl.data.shards import hash_file
from fp8ctl.errors import DataError
from fp8ctl.track.record import write_json

LIST = "excluded.parquet"
REPORT = "report.json"
SCRATCH = ".scratch"
_FORMAT = 1
_AGAIN = "make the exclusion list again: it names rows by their place in the file"
_ROWS_AT_ONCE = 100_000
_SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("at", pa.int64()),
        ("line", pa.int64()),
        ("reason", pa.string()),
        ("match", pa.string()),
    ]
)


class Exclusions:
    """Rows to leave out, of some files or of all that the lists name."""

    def __init__(self, by_file: dict[str, tuple[np.ndarray, np.ndarray]], reasons: list[str]) -> None:
        self._by_file = by_file
        self._reasons = reasons
        self._identities: dict[str, str] = {}

    @staticmethod
    def load(folders: Sequence[Path | str], files: Iterable[str] | None = None) -> Exclusions:
        """Reads lists.

        Args:
            files: only what is said about these, as their `Origin` names them; default: everything. Takes 9 bytes a row.

        Raises:
            DataError: no list in a folder, or one that can't be read.
        """
        wanted = None if files is None else [identity(f) for f in files]
        reasons: list[str] = []
        found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for folder in folders:
            for file, at, codes in _rows(Path(folder), wanted, reasons):
                found.setdefault(file, []).append((at, codes))
        return Exclusions({file: _sorted(parts) for file, parts in found.items()}, reasons)

    def reason(self, origin: Origin) -> str | None:
        """Why a row is to be left out; None where no list names it. The first list that names it counts."""
        if not self._by_file:
            return None
        name = self._identities.get(origin.file)
        if name is None:
            name = self._identities[origin.file] = identity(origin.file)
        at, codes = self._by_file.get(name, (_NOTHING, _NOTHING))
        place = int(at.searchsorted(origin.at))
        return self._reasons[codes[place]] if place < len(at) and at[place] == origin.at else None

    def __len__(self) -> int:
        return sum(len(at) for at, _ in self._by_file.values())


class ExclusionWriter:
    """Writes a list; made by `new_list`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.scratch = folder / SCRATCH
        self.rows = 0
        self._parquet = pq.ParquetWriter(self.scratch / LIST, _SCHEMA, compression="zstd")
        self._waiting: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}

    def add(self, file: str, at: int, line: int, reason: str, match: str) -> None:
        """Adds one row; rows of one file should follow each other."""
        for name, value in zip(_SCHEMA.names, (identity(file), at, line, reason, utf8(match)), strict=True):
            self._waiting[name].append(value)
        self.rows += 1
        if len(self._waiting["at"]) >= _ROWS_AT_ONCE:
            self._flush()

    def finish(self, report: Mapping[str, Any], files: Mapping[str, int]) -> dict[str, Any]:
        """Puts the list into its place and gives the whole report back.

        Args:
            files: size of each input file in bytes; 0 where it is not known, and for generators.
        """
        self._flush()
        self._parquet.close()
        os.replace(self.scratch / LIST, self._folder / LIST)
        whole = {
            "format": _FORMAT,
            **_all_utf8(report),
            "excluded": self.rows,
            "files": {identity(f): size for f, size in files.items()},
            "modified": _modified(files),
            "fingerprint": _fingerprint(self._folder),
        }
        write_json(self._folder / REPORT, whole)
        return whole

    def finish_without_list(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the report only and gives it back."""
        self._parquet.close()
        whole = {"format": _FORMAT, **_all_utf8(report)}
        write_json(self._folder / REPORT, whole)
        return whole

    def _flush(self) -> None:
        if self._waiting["at"]:
            self._parquet.write_table(pa.table(self._waiting, schema=_SCHEMA))
            self._waiting = {name: [] for name in _SCHEMA.names}


@contextlib.contextmanager
def new_list(folder: Path) -> Iterator[ExclusionWriter]:
    """A writer for a list in `folder`, with a folder for scratch files that is removed in the end.

    Raises:
        DataError: the folder holds a list or data set already, is in use, or can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".list.lock", timeout=0):
            try:
                if (folder / REPORT).exists() or (folder / "manifest.json").exists():
                    what = "an exclusion list" if (folder / REPORT).exists() else "a data set"
                    raise DataError(
                        f"{folder} holds {what} already", "choose another out=FOLDER, or remove this one"
                    ) from None
                shutil.rmtree(folder / SCRATCH, ignore_errors=True)
                (folder / SCRATCH).mkdir()
                yield ExclusionWriter(folder)
            finally:
                shutil.rmtree(folder / SCRATCH, ignore_errors=True)
                (folder / ".list.lock").unlink(missing_ok=True)
    except filelock.Timeout:
        raise DataError(f"another command is writing into {folder}", "wait for it, or choose another folder") from None
    except OSError as error:
        raise DataError(
            f"{folder} can't be written: {error.strerror or error}", "choose another out=FOLDER, or make room"
        ) from None


def read_report(folder: Path | str) -> dict[str, Any]:
    """What the command that made a list found.

    Raises:
        DataError: no list in the folder, or a damaged one.
    """
    path = Path(folder) / REPORT
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"no exclusion list in {folder}",
            "give a folder that `fp8ctl data dedup` or `fp8ctl data decontaminate` wrote to its end",
        ) from None
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}", "make the list again") from None
    if isinstance(report, dict) and report.get("mode") in ("tag", "fail"):
        raise DataError(f"{folder} holds a report without a list (mode={report['mode']})", "make it with mode=drop")
    if not isinstance(report, dict) or not isinstance(report.get("files"), dict) or "fingerprint" not in report:
        raise DataError(f"{path} is no report of an exclusion list", "give a folder that `fp8ctl data dedup` wrote")
    if report.get("format") != _FORMAT:
        raise DataError(f"{path} has format {report.get('format')}, this fp8ctl reads {_FORMAT}", "make the list again")
    return report


def check_lists(folders: Sequence[str], files: Mapping[str, int]) -> dict[str, str]:
    """Makes sure that lists fit the input, and gives a hash of each list's content.

    Args:
        files: size in bytes of each input file or generator, 0 where it is not known.

    Raises:
        DataError: no list, a list that was changed, of other files, or of files that have another size now.
    """
    sizes, modified = {identity(file): size for file, size in files.items()}, _modified(files)
    fingerprints = {}
    for folder in folders:
        report = read_report(folder)
        common = [file for file in report["files"] if file in sizes]
        if not common:
            raise DataError(
                f"the exclusion list {folder} is about other files, such as {next(iter(report['files']), 'none')}",
                "make it from the files that sources.*.paths name",
            )
        for file in common:
            if report["files"][file] != sizes[file]:
                raise DataError(
                    f"{file} has {sizes[file]:,} bytes, and had {report['files'][file]:,} when {folder} was made",
                    _AGAIN,
                )
            if report.get("modified", {}).get(file) != modified.get(file):
                raise DataError(f"{file} was changed after {folder} was made", _AGAIN)
        if _fingerprint(Path(folder)) != report["fingerprint"]:
            raise DataError(f"{Path(folder) / LIST} was changed after it was written", "make the exclusion list again")
        fingerprints[folder] = report["fingerprint"]
    return fingerprints


def identity(file: str) -> str:
    """How lists call a file, wherever a command is started; URLs and generators keep their name."""
    return utf8(os.path.realpath(file) if os.path.exists(file) else file)


def _modified(files: Iterable[str]) -> dict[str, int]:
    """Time of last change (ns) of local files."""
    return {identity(f): os.stat(f).st_mtime_ns for f in files if os.path.exists(f)}


def _rows(folder: Path, wanted: list[str] | None, reasons: list[str]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    read_report(folder)
    try:
        # row groups hold few files, so that most of them are passed over
        filters = None if wanted is None else [("file", "in", wanted)]
        if wanted == []:
            return
        table = pq.read_table(folder / LIST, columns=["file", "at", "reason"], filters=filters)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{folder / LIST} can't be read: {error}", "make the exclusion list again") from None
    files = table["file"].combine_chunks().dictionary_encode()
    causes = table["reason"].combine_chunks().dictionary_encode()
    for text in causes.dictionary.to_pylist():
        if text not in reasons:
            reasons.append(text)
    own = np.array([reasons.index(t) for t in causes.dictionary.to_pylist()], dtype=np.uint8)
    codes, places, at = own[causes.indices.to_numpy()], files.indices.to_numpy(), table["at"].to_numpy()
    for number, file in enumerate(files.dictionary.to_pylist()):
        here = places == number
        yield file, at[here], codes[here]


def _sorted(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    at, codes = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(at, kind="stable")
    return at[order], codes[order]


def _fingerprint(folder: Path) -> str:
    try:
        return hash_file(folder / LIST)
    except OSError as error:
        raise DataError(f"{folder / LIST} can't be read: {error.strerror}", "make the exclusion list again") from None


def utf8(text: str) -> str:
    """The text, with what can't be written as UTF-8 (bytes of a file name) written out."""
    return text.encode("utf-8", errors="backslashreplace").decode()


def _all_utf8(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {utf8(key): _all_utf8(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_all_utf8(inner) for inner in value]
    return utf8(value) if isinstance(value, str) else value


_NOTHING = np.array([], dtype=np.int64)
