"""Reasoning inside answers: OpenThoughts' markers rewritten, and <think> tags that a model must not learn refused."""

from __future__ import annotations

import re

from fp8ctl.data.rows import BadRowError, Message

OPEN, CLOSE = "<think>", "</think>"
_HINT = "check_thoughts=false takes tags as any other text"
_MARKED = re.compile(
    r"\s*<\|begin_of_thought\|>(?P<thought>.*)<\|end_of_thought\|>\s*<\|begin_of_solution\|>(?P<answer>.*)<\|end_of_solution\|>\s*",
    re.DOTALL,
)
_MARKER = re.compile(r"<\|(begin|end)_of_(thought|solution)\|>")


def use_think_tags(messages: list[Message]) -> list[Message]:
    """The same conversation with all reasoning as `<think>` in the answer's text.

    OpenThoughts' markers become tags in answers, and in the instructions that speak of them; `reasoning_content` moves into the text.

    Raises:
        BadRowError: markers that are not one thought followed by one solution, or reasoning twice.
    """
    return [_answer(m) if m["role"] == "assistant" else _instruction(m) for m in messages]


def check_tags(messages: list[Message]) -> None:
    """Raises BadRowError for an answer whose tags are not one thought in front of the rest.

    A thought that is closed and not opened passes: some data leave the opening to the template. `check_rendered` sees to it.
    """
    for number, message in enumerate(messages, start=1):
        text = message["content"]
        if message["role"] != "assistant" or (OPEN not in text and CLOSE not in text):
            continue
        opened, closed = text.count(OPEN), text.count(CLOSE)
        if message.get("reasoning_content"):
            raise BadRowError(f"turn {number} has reasoning_content, and {OPEN} tags in its content")
        if opened > 1 or closed > 1:
            raise BadRowError(f"turn {number} opens {opened} and closes {closed} thoughts, one is allowed", _HINT)
        if opened and not closed:
            raise BadRowError(f"turn {number} opens {OPEN} and does not close it", _HINT)
        if opened and text.index(CLOSE) < text.index(OPEN):
            raise BadRowError(f"turn {number} closes {CLOSE} before it opens one", _HINT)
        if opened and text[: text.index(OPEN)].strip():
            raise BadRowError(f"turn {number} opens {OPEN} after text of the answer", _HINT)


def check_rendered(text: str, start: int, end: int) -> None:
    """The same of a turn as the template rendered it: text[start:end], with what the template wrote in front of it.

    Raises:
        BadRowError: the template opens a thought too, or nobody does.
    """
    inside = text[start:end]
    opened, closed = inside.count(OPEN), inside.count(CLOSE)
    opened += is_opened_before(text, start)
    if opened > closed:
        what = (
            "opens a thought that the answer opens too" if closed else "opens a thought that the answer does not close"
        )
        raise BadRowError(f"the chat template {what}", _HINT)
    if closed > opened:
        raise BadRowError(f"the answer closes {CLOSE}, and neither it nor the chat template opens one", _HINT)


def is_opened_before(text: str, start: int) -> bool:
    """Whether the template opens a thought just before a place: its generation prompt ends with the tag."""
    return text[max(0, start - 64) : start].rstrip().endswith(OPEN)


def _answer(message: Message) -> Message:
    text = message["content"]
    reasoning = message.get("reasoning_content")
    if _MARKER.search(text):
        found = _MARKED.fullmatch(text)
        if not found or _MARKER.search(found["thought"]) or _MARKER.search(found["answer"]):
            raise BadRowError("the thought markers of an answer are not one thought followed by one solution")
        if reasoning:
            raise BadRowError("an answer has reasoning_content and thought markers")
        reasoning, text = found["thought"], found["answer"].strip()
        if not text:
            raise BadRowError("an answer's solution is empty")
    if reasoning is None or (reasoning and OPEN in text):  # the second is for `check_tags` to refuse
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": f"{OPEN}\n{reasoning.strip()}\n{CLOSE}\n\n{text.lstrip()}"}


def _instruction(message: Message) -> Message:
    def tag(found: re.Match[str]) -> str:
        return "" if found[2] == "solution" else OPEN if found[1] == "begin" else CLOSE

    return {**message, "content": _MARKER.sub(tag, message["content"])}
