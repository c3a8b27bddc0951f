"""Bytes of a local or remote file, decompressed, in bounded memory; whatever is cut short or broken is noticed.

The usual readers let some damage pass: the one for zstd gives fewer bytes and says nothing, the one for gzip gives good text
first and a bare EOFError later. Here every compressed stream must reach its own end, and every file the size it was listed with.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, Literal

import zstandard

from fp8ctl.errors import DataError, MissingPackageError

Compression = Literal["", "gz", "zst", "xz", "bz2"]

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 512
"""The first chunk of a file is at least this long, or the whole file."""

_MAGIC: dict[Compression, re.Pattern[bytes]] = {
    "gz": re.compile(rb"\x1f\x8b\x08"),
    "zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a frame, or one to be skipped
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "bz2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
}
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")
_SHORT_BYTES = 10
_PIECE_BYTES = 64 << 10
# zstd gives all that a piece holds at once, and a block of four bytes may stand for 128 KiB
_ZSTD_PIECE_BYTES = 8 << 10
# 2^31 is what `zstd --long=31` asks for; published dumps use it
_ZSTD_WINDOW_BYTES = 1 << 31


class DamagedError(DataError):
    """A file that ends too early or goes wrong: all before was given, what follows is lost.

    `at` is the place of the first record that is lost, in the sense of `Origin.at`; its number counts from 1.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.at = 0
        self.number = 1


class WrongFormatError(DataError):
    """A file that is no text in UTF-8 at all."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL for fsspec."""
    return "://" in path


def sniff(head: bytes, named: Compression) -> Compression:
    """The compression that the first bytes of a file show; a name decides only where the bytes can't."""
    for compression, magic in _MAGIC.items():
        if magic.match(head):
            return compression
    # shorter ones may be the beginning of a magic number
    if named and len(head) > _SHORT_BYTES and not _CONTROL.search(head) and _is_utf8(head):
        return ""
    return named


@contextlib.contextmanager
def open_raw(path: str, size: int = 0) -> Iterator[IO[bytes]]:
    """The bytes as they lie there, for reading from the start.

    Args:
        size: what the file was listed with, 0 where that is not known.

    Raises:
        DataError: it can't be opened or read (in the body, too), or its size is another one now.
        MissingPackageError: the URL needs a package that is not installed.
    """
    if is_remote(path):
        with remote_errors(path), _open_remote(path) as remote:
            yield remote
        return
    try:
        with open(path, "rb", buffering=0) as f:
            now = os.fstat(f.fileno()).st_size
            if size and now != size:
                raise DataError(
                    f"{path} changed while it was read: it had {size:,} bytes, now {now:,}",
                    "let whoever writes it finish, then run again",
                )
            yield f
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error.strerror or error}", "check that it exists and may be read"
        ) from None


@contextlib.contextmanager
def remote_errors(path: str) -> Iterator[None]:
    """Turns what fsspec and its file systems raise, which is anything, into errors for users."""
    try:
        yield
    except (DataError, MissingPackageError):
        raise
    except ImportError as error:
        protocol = path.split("://")[0].split("::")[-1]
        package = _PACKAGES.get(protocol, f"fsspec[{protocol}]")
        raise MissingPackageError(
            f"{path} can't be read without another package: {error}", f"pip install '{package}'"
        ) from None
    except Exception as error:
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise DataError(
            f"{path} can't be read: {detail}", "check the address, the network and the credentials"
        ) from None


_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hf": "huggingface_hub",
    "abfs": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}


def _open_remote(path: str) -> Any:
    import fsspec

    return fsspec.open(path, "rb")


def can_seek(path: str, size: int) -> bool:
    """Whether a file can be read from the middle; a web server may only give the whole.

    Raises:
        DataError, MissingPackageError: see `open_raw`.
    """
    with open_raw(path) as f:
        try:
            f.seek(size - 1)
            return len(f.read(1)) == 1
        except (ValueError, OSError):
            return False


def read_chunks(path: str, compression: Compression, size: int = 0, start: int = 0) -> Iterator[bytes]:
    """Decompressed bytes of a file, or what follows byte `start` of one that is not compressed.

    Args:
        compression: what the name says; the first bytes decide.
        size: what the file was listed with, 0 where that is not known.

    Raises:
        DamagedError: it ends too early or goes wrong; all before has been given.
        DataError: it can't be read.
        WrongFormatError: it is no text at all: an archive, Parquet, UTF-16.
        MissingPackageError: see `open_raw`.
    """
    with open_raw(path, size) as f:
        if start:
            f.seek(start)
            yield from _pieces(f, CHUNK_BYTES, size - start)
            return
        pieces = _with_head(_pieces(f, CHUNK_BYTES, size))
        first = next(pieces, b"")
        compression = sniff(first[:HEAD_BYTES], compression)
        if compression:
            small = (p[i : i + _PIECE_BYTES] for p in _chain(first, pieces) for i in range(0, len(p), _PIECE_BYTES))
            pieces = _with_head(_decompress(small, compression))
            first = next(pieces, b"")
        _refuse_other_formats(path, first)
        if first:
            yield first
        yield from pieces


def _pieces(f: IO[bytes], piece_bytes: int, size: int) -> Iterator[bytes]:
    count = 0
    while piece := f.read(piece_bytes):
        count += len(piece)
        yield piece
    if size > count:
        raise DamagedError(f"it ends after {count:,} of {size:,} bytes")


def _chain(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _with_head(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes with a first piece that is long enough to tell what they are."""
    head = b""
    damage = None
    try:
        while len(head) < HEAD_BYTES and (piece := next(pieces, None)) is not None:
            head += piece
    except DamagedError as error:
        damage = error
    if head:
        yield head
    if damage is not None:
        raise damage
    yield from pieces


def _decompress(pieces: Iterator[bytes], compression: Compression) -> Iterator[bytes]:
    """All members (frames, streams) one after another, zero padding between them left out."""
    new, feed = _DECODERS[compression]
    decoder: Any = None
    members, given = 0, 0
    for piece in pieces:
        while piece:
            if decoder is None:
                piece = piece.lstrip(b"\0") if members else piece
                if not piece:
                    break
                decoder, given = new(), 0
            try:
                for out in feed(decoder, piece):
                    if out:
                        given += len(out)
                        yield out
            # bz2 says OSError and EOFError
            except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError, MemoryError) as error:
                if members and not given:
                    raise DamagedError(f"something that is no {compression} follows its end") from None
                raise DamagedError(f"its {compression} stream is broken: {error}") from None
            piece = b""
            if decoder.eof:
                piece, decoder, members = decoder.unused_data, None, members + 1
    if decoder is not None and members and not given:
        raise DamagedError(f"something that is no whole {compression} stream follows its end")
    if decoder is not None or not members:
        raise DamagedError(f"its {compression} stream ends too early")


def _feed_zlib(decoder: Any, data: bytes) -> Iterator[bytes]:
    while True:
        out = decoder.decompress(data, CHUNK_BYTES)
        yield out
        data = decoder.unconsumed_tail
        if decoder.eof or (not data and len(out) < CHUNK_BYTES):
            return


def _feed_limited(decoder: Any, data: bytes) -> Iterator[bytes]:
    yield decoder.decompress(data, CHUNK_BYTES)
    while not decoder.eof and not decoder.needs_input:
        yield decoder.decompress(b"", CHUNK_BYTES)


class _Zstd:
    """One frame, fed in small steps; keeps what follows the frame as the other decoders do."""

    def __init__(self) -> None:
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        self.eof = False
        self.unused_data = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        for at in range(0, len(data), _ZSTD_PIECE_BYTES):
            yield self._decoder.decompress(data[at : at + _ZSTD_PIECE_BYTES])
            if self._decoder.eof:
                self.eof = True
                self.unused_data = self._decoder.unused_data + data[at + _ZSTD_PIECE_BYTES :]
                return


_DECODERS: dict[str, tuple[Callable[[], Any], Callable[[Any, bytes], Iterator[bytes]]]] = {
    "gz": (lambda: zlib.decompressobj(wbits=31), _feed_zlib),
    "zst": (_Zstd, _Zstd.feed),
    "xz": (lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), _feed_limited),
    "bz2": (bz2.BZ2Decompressor, _feed_limited),
}


def _refuse_other_formats(path: str, head: bytes) -> None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or re.match(rb"(?:[^\0]\0){4}|(?:\0[^\0]){4}", head):
        raise WrongFormatError(
            f"{path} is UTF-16, not UTF-8", f"convert it: iconv -f UTF-16 -t UTF-8 {path} > NEW_FILE"
        )
    if head.startswith(b"PAR1"):
        raise WrongFormatError(f"{path} is a Parquet file", "set kind=parquet for its source")
    if head.startswith(b"PK\x03\x04") or head[257:262] == b"ustar":
        raise WrongFormatError(f"{path} is an archive of several files", "unpack it and give the folder")
    if any(magic.match(head) for magic in _MAGIC.values()):
        raise WrongFormatError(f"{path} is compressed twice", "unpack it once")


def _is_utf8(head: bytes) -> bool:
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4  # cut inside its last character
    return True
