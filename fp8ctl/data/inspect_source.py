"""`fp8ctl data inspect`: what raw files hold, before anything is prepared."""

from __future__ import annotations

import os
from collections import Counter

from fp8ctl.data.files import SUFFIXES, Format
from fp8ctl.errors import DataError

_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


def guess_format(path: str) -> Format:
    """Format of a file, folder (of most of its files) or pattern, by its name.

    Raises:
        DataError: the name does not tell.
    """
    if os.path.isdir(path):
        found = Counter(
            kind for _, _, names in os.walk(path, followlinks=False) for name in names if (kind := _by_suffix(name))
        )
        if found:
            return found.most_common(1)[0][0]
        raise DataError(f"{path} holds no file of a known format", f"known are {_known()}")
    kind = _by_suffix(path)
    if kind is None:
        raise DataError(
            f"the name of {path} does not tell its format", f"known are {_known()}; or set sources.0.kind and paths"
        )
    return kind


def _by_suffix(name: str) -> Format | None:
    name = name.lower()
    for compressed in _COMPRESSED:
        name = name.removesuffix(compressed)
    return next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _known() -> str:
    return ", ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
