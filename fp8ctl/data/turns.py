"""One turn of a conversation, in whichever spelling, as one kind of message; reasoning and tool calls included."""

from __future__ import annotations

import json
from typing import Any

from fp8ctl.data.rows import BadRowError, Message

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_MOST_LEVELS = 64
_MAY_BE_EMPTY = ("system", "tool")


def to_message(turn: Any, number: int) -> Message:
    """One turn as a message: role, content (text, perhaps empty) and, of an assistant, reasoning_content, tool_calls and is_trained.

    Args:
        number: the turn's place in the conversation, from 1, for the reason of a refusal.

    Raises:
        BadRowError: an unknown role, content that is not text, a turn that says nothing, two spellings that differ.
    """
    if not isinstance(turn, dict):
        raise BadRowError(f"turn {number} is {type(turn).__name__}, not an object")
    refuse_deep(turn, f"turn {number}")
    roles = [_role(turn[key], number) for key in ("role", "from") if turn.get(key) is not None]
    if not roles:
        raise BadRowError(f"turn {number} has no role")
    if len(set(roles)) == 2:
        raise BadRowError(f"turn {number} has role {turn['role']!r} and from {turn['from']!r}")
    role = roles[0]
    message: Message = {"role": role, "content": ""}
    if "function_call" in (turn.get("role"), turn.get("from")):  # ShareGPT's way: the turn's text is the call
        message["tool_calls"] = _tool_calls([_either(turn, number)], number)
        return message
    calls = _calls_of(turn, number)
    content = _either(turn, number)
    message["content"] = _text(content, number) if content is not None or not calls else ""
    if role == "assistant":
        if reasoning := _reasoning(turn, number):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        if not _is_trained(turn, number):
            message["is_trained"] = False
    elif calls:
        raise BadRowError(f"turn {number} calls tools, but it is the {role}'s")
    elif role == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    if not message["content"].strip() and not calls and role not in _MAY_BE_EMPTY:
        raise BadRowError(f"the {role} says nothing in turn {number}")
    return message


def from_json(value: Any, what: str) -> Any:
    """A value that may be stored as the text of its JSON, as columns of Parquet files often do.

    Raises:
        BadRowError: text that is not JSON.
    """
    if not isinstance(value, str) or not value:
        return value
    try:
        found = json.loads(value, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise BadRowError(f"{what} is text, and not JSON") from None
    refuse_deep(found, what)
    return found


def refuse_deep(value: Any, what: str) -> None:
    """Raises BadRowError for a value with more levels than anybody means, which would exhaust the stack later on."""
    layer = [value]
    for _ in range(_MOST_LEVELS):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not layer:
            return
    raise BadRowError(f"{what} is nested too deeply")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _role(value: Any, number: int) -> str:
    role = _ROLES.get(value) if isinstance(value, str) else None
    if role is None:
        raise BadRowError(f"turn {number} has the unknown role {value!r:.60}")
    return role


def _either(turn: dict[str, Any], number: int) -> Any:
    # Some sets hold both spellings in one row, one of them null.
    content, value = turn.get("content"), turn.get("value")
    if content is not None and value is not None and content != value:
        raise BadRowError(f"turn {number} has content and value, and they differ")
    return value if content is None else content


def _text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        kind = "null" if content is None else "an empty list" if content == [] else type(content).__name__
        raise BadRowError(f"the content of turn {number} is {kind}, not text")
    texts = []
    for part in content:
        text: Any = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            given: Any = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRowError(f"the content of turn {number} has a part of type {given!r:.60}, only text is trained on")
        texts.append(text)
    return "".join(texts)


def _reasoning(turn: dict[str, Any], number: int) -> str:
    given = {key: turn[key] for key in _REASONING if turn.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, str):
            raise BadRowError(f"the {key} of turn {number} is {type(value).__name__}, not text")
    texts = {value for value in given.values() if value}
    if len(texts) > 1:
        raise BadRowError(f"turn {number} has {' and '.join(given)}, and they differ")
    return texts.pop() if texts else ""


def _is_trained(turn: dict[str, Any], number: int) -> bool:
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise BadRowError(f"turn {number} has weight {weight!r:.60}, only 0 and 1 are known")
    return weight != 0


def _calls_of(turn: dict[str, Any], number: int) -> list[dict[str, Any]]:
    single = turn.get("function_call")
    calls = from_json(turn.get("tool_calls"), f"tool_calls of turn {number}")
    if single and calls:
        raise BadRowError(f"turn {number} has tool_calls and function_call")
    if single:
        calls = [single]
    if not calls:
        return []
    if not isinstance(calls, list):
        raise BadRowError(f"tool_calls of turn {number} is {type(calls).__name__}, not a list")
    return _tool_calls(calls, number)


def _tool_calls(calls: list[Any], number: int) -> list[dict[str, Any]]:
    """Calls as chat templates want them: {type, function: {name, arguments}}, the arguments as an object."""
    found = []
    for given in calls:
        call = from_json(given, f"a tool call of turn {number}")
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise BadRowError(f"a tool call of turn {number} names no function")
        arguments = from_json(function.get("arguments"), f"the arguments of {name!r:.60} in turn {number}")
        if arguments is None or arguments == "":
            arguments = {}
        if not isinstance(arguments, dict):
            raise BadRowError(
                f"the arguments of {name!r:.60} in turn {number} are {type(arguments).__name__}, not an object"
            )
        found.append({"type": "function", "function": {"name": name, "arguments": arguments}})
        if isinstance(call.get("id"), str):
            found[-1]["id"] = call["id"]
    return found
