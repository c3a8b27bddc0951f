"""Which files a source means: local paths, folders, patterns and URLs, in a fixed order and no file twice."""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from fp8ctl.config.data_schema import SourceConfig
from fp8ctl.data.streams import HEAD_BYTES, Compression, is_remote, open_raw, remote_errors, sniff
from fp8ctl.errors import DataError

Format = Literal["jsonl", "json", "parquet", "text"]

SUFFIXES: dict[Format, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "json": (".json",),
    "parquet": (".parquet",),
    "text": (".txt", ".md", ".rst"),
}
_COMPRESSIONS: tuple[Compression, ...] = ("gz", "zst", "xz", "bz2")


@dataclass(frozen=True)
class InputFile:
    """One file of a source: a local path or a URL."""

    path: str
    bytes: int
    """Size on disk, compressed where it is; 0 where a remote file tells none."""
    format: Format
    compression: Compression = ""
    note: str = ""
    """What a user should know about it: a name that says something else than the content."""


@dataclass(frozen=True)
class Slice:
    """Part of a file that one task reads, [start, end): bytes of an uncompressed JSONL file (it owns the lines that start
    in it), row groups of a Parquet file; of others the whole."""

    file: InputFile
    start: int = 0
    end: int | None = None


def find_files(source: SourceConfig) -> list[InputFile]:
    """Files of a source: each path or pattern in the order given, folders and patterns sorted by name, no file twice.

    Folders are read with all folders in them, links to folders too; what starts with a dot is left out, as is what has another
    ending than the source's kind (compressed or not). A file that is named itself may have any name.

    Raises:
        DataError: a path that matches nothing, can't be read or is no file; Parquet and other kinds mixed up.
        MissingPackageError: a URL needs a package that is not installed.
    """
    assert source.kind in SUFFIXES, "generators have no files"
    kind = cast(Format, source.kind)
    found: dict[str, InputFile] = {}
    for given in source.paths:
        given = given.removeprefix("file://")
        for file in _remote(given, kind) if is_remote(given) else _local(given, kind):
            key = file.path if is_remote(file.path) else os.path.realpath(file.path)
            found.setdefault(key, file)
    return list(found.values())


def _local(given: str, kind: Format) -> Iterator[InputFile]:
    if os.path.isdir(given):
        names = list(_walk(given))
        paths = sorted(name for name in names if _fits(name, kind))
        if not paths:
            raise _nothing(given, kind, names)
    else:
        # a file of that very name goes before a pattern
        literal = [given] if os.path.lexists(given) else []
        paths = literal or sorted(p for p in glob.glob(given, recursive=True) if not os.path.isdir(p))
        if not paths:
            raise DataError(f"no {kind} files in {given}", "check the path; patterns may use *, ? and **")
    for path in paths:
        yield _input_file(path, kind)


def _walk(folder: str) -> Iterator[str]:
    """All files below a folder; a folder that is met again, through a link, is not entered."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename} can't be read: {error.strerror}", "check the rights of the folder")

    seen = set()
    for at, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        here = os.path.realpath(at)
        if here in seen:
            folders.clear()
            continue
        seen.add(here)
        folders[:] = sorted(n for n in folders if not n.startswith("."))
        yield from (os.path.join(at, n) for n in names if not n.startswith("."))


def _input_file(path: str, kind: Format) -> InputFile:
    try:
        info = os.stat(path)
    except OSError as error:
        link = " (a link that leads nowhere)" if os.path.islink(path) else ""
        raise DataError(
            f"{path} can't be read: {error.strerror}{link}", "check that it exists and may be read"
        ) from None
    if not stat.S_ISREG(info.st_mode):
        raise DataError(f"{path} is no regular file", "give a file, a folder or a pattern")
    with open_raw(path) as f:
        head = f.read(HEAD_BYTES)
    named = _named_compression(path)
    compression = sniff(head, named)
    _refuse_other_kind(path, head, kind, compression)
    note = ""
    if compression != named:
        note = f"{path} is named {named or 'as if not compressed'}, but is {compression or 'not compressed'}"
    return InputFile(path, info.st_size, kind, compression, note)


def _refuse_other_kind(path: str, head: bytes, kind: Format, compression: Compression) -> None:
    is_parquet = head.startswith(b"PAR1")
    if kind == "parquet" and compression:
        raise DataError(f"{path} is compressed as a whole ({compression})", "unpack it: Parquet files compress inside")
    if is_parquet and kind != "parquet":
        raise DataError(f"{path} is a Parquet file", "set kind=parquet for its source")


def _remote(given: str, kind: Format) -> Iterator[InputFile]:
    with remote_errors(given):
        from fsspec.core import url_to_fs

        system, path = url_to_fs(given)
        listing = _remote_listing(system, path)
        if listing is None:
            raise DataError(f"no {kind} files in {given}", "check the address; patterns may use *, ? and **")
        names = list(listing)
        paths = sorted(name for name in names if name == path or _fits(name, kind) or _has_magic(path))
        if not paths:
            raise _nothing(given, kind, names)
        for name in paths:
            # of a chain of file systems only the given address leads to the file
            url = given if "::" in given else str(system.unstrip_protocol(name))
            compression = _named_compression(urlsplit(url).path)
            _refuse_other_kind(url, b"", kind, compression)
            yield InputFile(url, int(listing[name].get("size") or 0), kind, compression)


def _remote_listing(system: Any, path: str) -> dict[str, dict[str, Any]] | None:
    """Files at a path, below it or matching it, by name; None where there is nothing."""
    try:
        info = system.info(path)
    except FileNotFoundError:
        if not _has_magic(path):
            return None
        found = system.glob(path, detail=True)
        return {n: i for n, i in found.items() if i.get("type") != "directory"} or None
    if info.get("type") != "directory":
        return {path: info}
    below = system.find(path, detail=True)
    root = PurePosixPath(path)
    return {
        n: i for n, i in below.items() if not any(p.startswith(".") for p in PurePosixPath(n).parts[len(root.parts) :])
    }


def _has_magic(path: str) -> bool:
    return any(c in path for c in "*?[")


def _nothing(given: str, kind: Format, names: list[str]) -> DataError:
    suffixes = " or ".join(SUFFIXES[kind])
    others = Counter(k for name in names for k in SUFFIXES if _fits(name, k))
    for other, count in others.most_common(1):
        return DataError(
            f"no {kind} files in {given}", f"it holds {count:,} {other} files: set kind={other}, or give another folder"
        )
    return DataError(
        f"no {kind} files in {given}", f"the folder must hold files that end in {suffixes} (.gz, .zst, .xz, .bz2)"
    )


def _fits(name: str, kind: Format) -> bool:
    name = name.lower()
    compression = _named_compression(name)
    return name.removesuffix(f".{compression}" if compression else "").endswith(SUFFIXES[kind])


def _named_compression(name: str) -> Compression:
    name = name.lower()
    return next((c for c in _COMPRESSIONS if name.endswith(f".{c}")), "")
