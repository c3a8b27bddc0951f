from __future__ import annotations

import bz2
import gzip
import http.server
import lzma
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from fp8ctl.data.streams import CHUNK_BYTES, Compression, DamagedError, can_seek, read_chunks, sniff
from fp8ctl.errors import DataError

PACK: dict[Compression, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstandard.ZstdCompressor().compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
}
# does not compress away, so that the middle of a file is the middle of its text
TEXT = b"".join(b"%d the quick brown fox %d\n" % (i * 7919 % 10007, i) for i in range(20_000))


def read(path: Path, compression: Compression = "") -> tuple[bytes, str]:
    """What can be read, and what is said about the rest."""
    out = b""
    try:
        for chunk in read_chunks(str(path), compression):
            out += chunk
    except DamagedError as error:
        return out, error.message
    return out, ""


@pytest.mark.parametrize("compression", PACK)
def test_whole_in_one_or_several_members_with_padding(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "a"
    pack = PACK[compression]
    for content in (pack(TEXT), pack(TEXT[:1000]) + pack(b"") + pack(TEXT[1000:]), pack(TEXT) + b"\0" * 4096):
        path.write_bytes(content)
        assert read(path, compression) == (TEXT, "")
        assert read(path) == (TEXT, "")  # whatever the name says


@pytest.mark.parametrize("compression", PACK)
def test_cut_anywhere_is_noticed(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "a"
    whole = PACK[compression](TEXT)
    for end in (0, 1, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        text, said = read(path, compression)
        assert said == f"its {compression} stream ends too early"
        assert TEXT.startswith(text)
    assert len(text) > len(TEXT) - CHUNK_BYTES  # all that could be read was given
    path.write_bytes(whole + whole[: len(whole) // 2])
    text, said = read(path, compression)
    assert text.startswith(TEXT) and said in (
        f"its {compression} stream ends too early",
        f"something that is no whole {compression} stream follows its end",
    )


@pytest.mark.parametrize("compression", PACK)
def test_junk_after_the_end_and_flipped_bits(tmp_path: Path, compression: Compression) -> None:
    path = tmp_path / "a"
    whole = PACK[compression](TEXT)
    for junk in (b"junk that follows, long enough for a header", b"\n"):
        path.write_bytes(whole + junk)
        text, said = read(path, compression)
        assert text == TEXT and said in (
            f"something that is no {compression} follows its end",
            f"something that is no whole {compression} stream follows its end",
        )
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 0xFF
    path.write_bytes(broken)
    text, said = read(path, compression)
    if compression != "zst":  # whose frames have a checksum only when asked for one
        assert said.startswith(f"its {compression} stream is broken: ")


def test_zstd_checksum_and_frames_to_skip(tmp_path: Path) -> None:
    path = tmp_path / "a"
    packed = zstandard.ZstdCompressor(write_checksum=True).compress(TEXT)
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    path.write_bytes(skipped + packed + skipped)
    assert read(path) == (TEXT, "")
    path.write_bytes(packed[:-1] + bytes([packed[-1] ^ 1]))
    assert read(path)[1].startswith("its zst stream is broken: ")


def test_sniff() -> None:
    for compression, pack in PACK.items():
        assert sniff(pack(b""), "") == sniff(pack(TEXT), "") == compression
    assert sniff(b"BZh is how this text begins", "") == ""
    assert sniff(b"", "gz") == sniff(b"\x1f", "gz") == "gz"
    assert sniff(b"plain text \xe6\xbc", "gz") == "" and sniff(b"\x00\x01", "gz") == sniff(b"\xff" * 9, "gz") == "gz"


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ("text".encode("utf-16"), "is UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8"),
        ('{"text": 1}'.encode("utf-16-le"), "is UTF-16, not UTF-8", "convert it"),
        (gzip.compress('{"text": 1}'.encode("utf-16-be")), "is UTF-16, not UTF-8", "convert it"),
        (b"PAR1" + b"\0" * 20, "is a Parquet file", "set kind=parquet"),
        (b"PK\x03\x04" + b"\0" * 20, "is an archive of several files", "unpack it and give the folder"),
        (gzip.compress(b"a" * 257 + b"ustar" + b"\0" * 300), "is an archive of several files", "unpack it"),
        (gzip.compress(gzip.compress(TEXT)), "is compressed twice", "unpack it once"),
    ],
    ids=["utf-16", "utf-16-le", "utf-16-be in gzip", "parquet", "zip", "tar in gzip", "gzip in gzip"],
)
def test_what_is_no_text(tmp_path: Path, content: bytes, message: str, hint: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        read(tmp_path / "a")
    assert error.value.hint is not None and error.value.hint.startswith(hint)


def test_files_that_change_or_go_away(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert b"".join(read_chunks(str(path), "", 5)) == b"12345"
    with pytest.raises(DataError, match="a changed while it was read: it had 9 bytes, now 5") as error:
        list(read_chunks(str(path), "", 9))
    assert error.value.hint == "let whoever writes it finish, then run again"
    chunks = read_chunks(str(path), "", 5, start=2)
    assert next(chunks) == b"345"
    path.unlink()
    with pytest.raises(DataError, match="a can't be read: No such file or directory"):
        list(read_chunks(str(path), "", 5))
    path.write_bytes(b"x" * 3_000_000)
    chunks = read_chunks(str(path), "", 3_000_000)
    next(chunks)
    path.write_bytes(b"x")
    with pytest.raises(DamagedError, match=r"it ends after 1,048,576 of 3,000,000 bytes"):
        list(chunks)


def test_bombs_need_little_memory(tmp_path: Path) -> None:
    script = """
import resource, sys
from fp8ctl.data.streams import read_chunks
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(sum(map(len, read_chunks(sys.argv[1], ""))), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    packed = b"".join(packer.compress(b"\0" * (1 << 20)) for _ in range(512)) + packer.flush()
    for name, content in (("zst", packed), ("gz", gzip.compress(b"\0" * (1 << 29), 1))):
        (tmp_path / name).write_bytes(content)
        run = [sys.executable, "-c", script, str(tmp_path / name)]
        size, kilobytes = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
        assert int(size) == 1 << 29 and int(kilobytes) < 300_000


# ------------------------------------------------------------ remote


class Server(http.server.BaseHTTPRequestHandler):
    """Gives TEXT, in parts where asked and allowed; /short promises more than it sends."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        if self.path == "/absent":
            self.send_error(404)
            return
        content, status = TEXT, 200
        asked = self.headers.get("Range") if self.path == "/ranges" else None
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            content, status = TEXT[int(first) : int(last) + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if self.path == "/ranges":
            self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {asked.removeprefix('bytes=')}/{len(TEXT)}")  # type: ignore[union-attr]
        self.end_headers()
        if body:
            self.wfile.write(content[:1000] if self.path == "/short" else content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()


def test_over_http(server: str) -> None:
    pytest.importorskip("aiohttp")
    for path in ("/ranges", "/whole"):
        assert b"".join(read_chunks(server + path, "")) == TEXT
    assert can_seek(server + "/ranges", len(TEXT)) and not can_seek(server + "/whole", len(TEXT))
    with pytest.raises(DataError, match="absent can't be read: FileNotFoundError") as error:
        list(read_chunks(server + "/absent", ""))
    assert error.value.hint == "check the address, the network and the credentials"
    with pytest.raises(DataError, match="short"):
        list(read_chunks(server + "/short", "", len(TEXT)))
