"""Text of others on a terminal."""

from __future__ import annotations

import re

_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """The text with control characters written out (\\x1b, \\u202e), so that it can't steer the terminal or hide in it.

    Line ends and tabs stay; marks that change the direction of writing do not.
    """
    return _STEERING.sub(lambda match: _escaped(match[0]), text)


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"
