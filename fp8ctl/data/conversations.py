"""Rows of conversations in the shapes that data sets use, brought to one list of messages.

Understood are `messages` (role, content, reasoning_content), ShareGPT's `conversations` (from, value, beside it `system`), and
`prompt` with `completion`. What can't be understood is refused with a reason; nothing is guessed or left out.
"""

from __future__ import annotations

from typing import Any

from fp8ctl.data.rows import BadRowError, Message

FIELDS = ("messages", "conversations", "system", "prompt", "completion", "tools")
"""Fields that are looked at; others may be there."""

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


def to_messages(row: dict[str, Any]) -> list[Message]:
    """The conversation of one row.

    Raises:
        BadRowError: no conversation, an unknown role, content that is not text, no or an empty assistant turn.
    """
    if row.get("tools"):
        raise BadRowError("conversations with tools are not supported")
    if row.get("messages") is not None:
        turns = _list_of_turns(row["messages"], "messages")
    elif row.get("conversations") is not None:
        turns = _system(row) + _list_of_turns(row["conversations"], "conversations")
    elif row.get("prompt") is not None and row.get("completion") is not None:
        turns = _system(row) + _side(row["prompt"], "user") + _side(row["completion"], "assistant")
    else:
        raise BadRowError(f"no conversation in the row (fields: {', '.join(map(str, row)) or 'none'})")
    messages = [_message(turn, number) for number, turn in enumerate(turns, start=1)]
    if not any(m["role"] == "assistant" for m in messages):
        raise BadRowError("the conversation has no assistant turn")
    return messages


def _system(row: dict[str, Any]) -> list[Any]:
    return [{"role": "system", "content": row["system"]}] if row.get("system") else []


def _side(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _list_of_turns(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRowError(f"{field} is {type(value).__name__}, not a list")
    return value


def _message(turn: Any, number: int) -> Message:
    if not isinstance(turn, dict):
        raise BadRowError(f"turn {number} is {type(turn).__name__}, not an object")
    if turn.get("tool_calls"):
        raise BadRowError(f"turn {number} calls tools, which is not supported")
    # Some sets hold both spellings in one row, one of them null.
    given = turn.get("role") if turn.get("role") is not None else turn.get("from")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise BadRowError(f"turn {number} has the unknown role {given!r}")
    content = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if not isinstance(content, str):
        raise BadRowError(f"the content of turn {number} is {type(content).__name__}, not text")
    message = {"role": role, "content": content}
    reasoning = turn.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        raise BadRowError(f"the reasoning_content of turn {number} is {type(reasoning).__name__}, not text")
    if reasoning and role == "assistant":
        message["reasoning_content"] = reasoning
    if role == "assistant" and not content.strip():
        raise BadRowError(f"the assistant says nothing in turn {number}")
    return message
