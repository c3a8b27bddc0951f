"""Collects everything that is wrong with a set of settings, so that a user sees all of it at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from fp8ctl.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what, and what to do about it."""

    field: str
    message: str
    hint: str = ""


def raise_problems(problems: list[Problem], *, what: str = "settings") -> None:
    """Raises one ConfigError that lists all `problems`; nothing when there are none."""
    if not problems:
        return
    if len(problems) == 1:
        p = problems[0]
        raise ConfigError(f"{p.field}: {p.message}" if p.field else p.message, p.hint or None)
    lines = [f"{len(problems)} problems in the {what}"]
    lines += [f"  {p.field}: {p.message}" if p.field else f"  {p.message}" for p in problems]
    hints = list(dict.fromkeys(p.hint for p in problems if p.hint))
    raise ConfigError("\n".join(lines), "; ".join(hints) or None)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to `name`, or None when nothing is close."""
    known = list(known)
    by_leaf = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
    leaf = name.rsplit(".", 1)[-1]
    if leaf in by_leaf:  # the right leaf under a wrong parent: `schedule.peak_lr` for `optim.peak_lr`
        return by_leaf[leaf]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    close = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.75)
    return by_leaf[close[0]] if close else None
