"""Files written on the command line as plain words, for commands whose other words are settings."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import groupby


def is_path(word: str) -> bool:
    """Whether a word is a file, folder, pattern or URL, and not NAME=VALUE."""
    return "=" not in word or os.path.exists(word) or "://" in word.split("=", 1)[0]


def with_sources(words: Sequence[str]) -> list[str]:
    """Hydra overrides; the words that are paths become `sources`, neighbours of one format together.

    Raises:
        DataError: a path whose format can't be told.
    """
    from fp8ctl.data.inspect_source import guess_format

    paths = [(guess_format(word), word) for word in words if is_path(word)]
    overrides = [word for word in words if not is_path(word)]
    if not paths:
        return overrides
    sources = (
        f"{{kind: {kind}, paths: [{', '.join(quoted(path) for _, path in group)}]}}"
        for kind, group in groupby(paths, key=lambda pair: pair[0])
    )
    return [f"sources=[{', '.join(sources)}]", *overrides]


def quoted(text: str) -> str:
    """A string in Hydra's grammar."""
    # a backslash means something only in front of a quote
    inner = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return "'" + inner.replace("${", "\\${") + "'"
