"""What a check answers, and the line of the doctor's table that comes of it."""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Literal, NamedTuple

State = Literal["ok", "absent", "broken", "note", "skipped"]
"""note: a fact that is no fault. skipped: could not be tried here, and why."""
LONGEST_DETAIL = 200


class Answer(NamedTuple):
    """What a check found; `fix` is one line, for what is absent, broken or scarce."""

    state: State
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    name: str
    state: State
    detail: str
    fix: str = ""
    needed: bool = False
    """Whether training needs it; an absent optional thing is no fault."""


def in_words(error: BaseException) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:LONGEST_DETAIL]


def version(distribution: str) -> str | None:
    """The installed version, or None; nothing is imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def package(module: str, distribution: str, fix: str, *, absent: str = "not installed") -> Answer:
    """Whether a package is installed and imports. TransformerEngine alone raises ImportError, RuntimeError and OSError,
    depending on how it is broken.
    """
    installed = version(distribution)
    if installed is None:
        return Answer("absent", absent, fix)
    try:
        importlib.import_module(module)
    except Exception as e:
        return Answer("broken", f"{installed} does not import: {in_words(e)}"[:LONGEST_DETAIL], fix)
    return Answer("ok", installed)
