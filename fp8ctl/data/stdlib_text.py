"""Real text that is on every machine: source and documentation of the running Python's standard library."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from fp8ctl.data.rows import BadRow, Document, Origin
from fp8ctl.errors import DataError

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload"}
_TOPICS = Path("pydoc_data") / "topics.py"


def iter_stdlib() -> Iterator[Document | BadRow]:
    """Each source file (docstrings stay in it), then each topic of Python's own help, both in the order of their names.

    Installed packages and tests are left out. File names in the origins are relative, so that they are the same everywhere.

    Raises:
        DataError: this Python has no readable standard library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_sources(root), key=lambda p: p.as_posix())
    if not files:
        raise DataError(
            f"the standard library in {root} has no source files", "use another source: kind=text paths=[...]"
        )
    for path in files:
        origin = Origin(f"stdlib/{path.as_posix()}", 1)
        try:
            with tokenize.open(root / path) as f:  # knows the encoding that a source file declares
                yield Document(origin, f.read())
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            yield BadRow(origin, f"can't be read: {error}")
    yield from _topics()


def python_version() -> str:
    """What the text is the standard library of."""
    return f"{sys.implementation.name} {sys.version.split()[0]}"


def _sources(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names if n not in _LEFT_OUT]
        for name in files:
            path = (Path(folder) / name).relative_to(root)
            # the topics come as text, not as one huge dictionary literal
            if name.endswith(".py") and path != _TOPICS:
                yield path


def _topics() -> Iterator[Document]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):  # some distributions ship Python without its help
        return
    for name in sorted(topics):
        yield Document(Origin(f"pydoc/{name}", 1), topics[name])
