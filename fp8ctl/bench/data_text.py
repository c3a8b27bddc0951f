"""Text to prepare: sources and documentation of the installed Python and its packages, in any amount, no two documents alike."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path

_SUFFIXES = {".py", ".pyi", ".md", ".rst", ".txt"}
_LONGEST_BYTES = 4 * 2**20


def write_text(path: Path, num_bytes: int) -> int:
    """Writes JSONL of about `num_bytes` of text; returns the number of documents."""
    written = documents = 0
    with open(path, "w", encoding="utf-8") as f:
        for text in _texts():
            f.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written += len(text.encode())
            documents += 1
            if written >= num_bytes:
                break
    return documents


def write_long_document(path: Path, num_bytes: int) -> None:
    """Writes JSONL of a single document of about `num_bytes` of text."""
    parts: list[str] = []
    size = 0
    for text in _texts():
        parts.append(text)
        size += len(text.encode())
        if size >= num_bytes:
            break
    path.write_text(json.dumps({"text": "\n".join(parts)}, ensure_ascii=False) + "\n", encoding="utf-8")


def _texts() -> Iterator[str]:
    """Every file once, then again and again, each time beginning at another place, so that documents differ."""
    paths = sysconfig.get_paths()
    files = sorted({p for root in ("stdlib", "purelib") for p in Path(paths[root]).rglob("*") if p.suffix in _SUFFIXES})
    for turn in count():
        for path in files:
            try:
                text = path.read_text(encoding="utf-8") if path.stat().st_size <= _LONGEST_BYTES else ""
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip():
                cut = turn * 997 % len(text)
                yield text[cut:] + text[:cut]
