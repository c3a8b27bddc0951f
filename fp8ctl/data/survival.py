"""Whether everything that was said stands in the rendered text: a template that drops some of it would train on another conversation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from fp8ctl.data import thoughts
from fp8ctl.data.chat_template import Span
from fp8ctl.data.rows import BadRowError, Message

_SHOWN_CHARS = 80


def check_nothing_is_lost(messages: list[Message], text: str, spans: list[Span], template: str) -> None:
    """Compares a rendered text with the messages behind it. White space may change, templates trim it; nothing else may.

    Args:
        spans: where the assistant's turns stand in the text, in order.

    Raises:
        BadRowError: text that is missing, with what exactly was cut, or another number of turns.
    """
    answers = [m for m in messages if m["role"] == "assistant"]
    if len(answers) != len(spans):
        raise BadRowError(f"{len(answers)} assistant turns, but the chat template {template} marks {len(spans)}")
    for number, (answer, (start, end)) in enumerate(zip(answers, spans, strict=True), start=1):
        # Where generation starts inside a thought, its opening stands before the turn
        opening = thoughts.OPEN if thoughts.is_opened_before(text, start) else ""
        shown = opening + text[start:end]
        for what, said in _said(answer):
            if not _stands_in(said, shown):
                raise BadRowError(
                    f"the chat template {template} drops text of assistant turn {number} ({what}): {_cut(said, shown)}"
                )
    place = 0
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            continue
        said = message["content"].strip()
        found = text.find(said, place)
        if found >= 0:
            place = found + len(said)
        elif not _stands_in(said, text):
            raise BadRowError(
                f"the chat template {template} drops text of turn {number} ({message['role']}): {_cut(said, text)}"
            )


def _said(answer: Message) -> Iterator[tuple[str, str]]:
    for key in ("reasoning_content", "content"):
        yield key, answer.get(key, "")
    for call in answer.get("tool_calls", ()):
        yield "tool_calls", call["function"]["name"]
        for text in _leaves(call["function"]["arguments"]):
            yield "tool_calls", text


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def _stands_in(said: str, shown: str) -> bool:
    if said.strip() in shown:
        return True
    squeezed = "".join(shown.split())
    as_json = json.dumps(said, ensure_ascii=False)[
        1:-1
    ]  # templates write arguments, and some the results of tools, as JSON
    return any("".join(form.split()) in squeezed for form in (said, as_json))


def _cut(said: str, shown: str) -> str:
    """What is missing, as a line of a diff, between what is left of the beginning and of the end."""
    left = "".join(shown.split())
    letters = [(place, letter) for place, letter in enumerate(said) if not letter.isspace()]
    whole = "".join(letter for _, letter in letters)
    head, tail = _longest_beginning(whole, left), _longest_end(whole, left)
    tail = min(tail, len(whole) - head)
    first, last = letters[head][0], letters[len(letters) - tail - 1][0]
    gone = said[first : last + 1] or said
    short = gone if len(gone) <= _SHOWN_CHARS else f"{gone[: _SHOWN_CHARS // 2]}[...]{gone[-_SHOWN_CHARS // 2 :]}"
    return f"-{short!r} ({len(gone):,} of {len(said):,} characters)"


def _longest_beginning(whole: str, left: str) -> int:
    """Letters at the beginning of `whole` that stand together at the beginning of what is left."""
    return len(os.path.commonprefix([whole, left]))


def _longest_end(whole: str, left: str) -> int:
    """Letters at the end of `whole` that are left, before whatever ends the turn."""
    low, high = 0, min(len(whole), len(left))
    while low < high:  # an end that is left has all shorter ones left too
        middle = (low + high + 1) // 2
        low, high = (middle, high) if whole[-middle:] in left else (low, middle - 1)
    return low
