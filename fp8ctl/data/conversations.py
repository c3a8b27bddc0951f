"""Rows of conversations in the shapes that data sets use, brought to one list of messages.

Understood are `messages` (role, content, reasoning_content, tool_calls), ShareGPT's `conversations` (from, value), `prompt` with
`completion`, alpaca's `instruction`, `input` and `output`, `input` with `output`, and `input_ids` with `labels` or `loss_mask`; beside
them `system` and `tools`. Shapes may differ from row to row. What can't be understood is refused with a reason; nothing is guessed or
left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fp8ctl.config.constants import IGNORE_INDEX
from fp8ctl.data.rows import BadRowError, Conversation, Message, Origin
from fp8ctl.data.turns import from_json, refuse_deep, to_message

FIELDS = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "input_ids", "labels", "loss_mask",
    "system", "tools",
)  # fmt: skip
"""Fields that are looked at; others may be there."""


def to_conversation(row: dict[str, Any], origin: Origin) -> Conversation:
    """The conversation of one row.

    Raises:
        BadRowError: no conversation or two that differ, an unknown role, content that is not text, nothing to learn from.
    """
    written = [_messages(row, field) for field in ("messages", "conversations") if row.get(field) not in (None, [], "")]
    if len(written) == 2 and written[0] != written[1]:
        raise BadRowError("the row has messages and conversations, and they differ")
    messages = written[0] if written else _from_columns(row)
    if messages is None and row.get("input_ids") is not None:
        return Conversation(origin, [], tokens=_tokens(row))
    if messages is None:
        raise BadRowError(f"no conversation in the row (fields: {', '.join(map(str, row)) or 'none'})")
    _check_turns(messages)
    return Conversation(origin, messages, _tools(row.get("tools")))


def _messages(row: dict[str, Any], field: str) -> list[Message]:
    turns = from_json(row[field], field)
    if not isinstance(turns, list):
        raise BadRowError(f"{field} is {type(turns).__name__}, not a list")
    return _all(_with_system(row, turns))


def _from_columns(row: dict[str, Any]) -> list[Message] | None:
    if row.get("prompt") is not None and row.get("completion") is not None:
        turns = _side(row["prompt"], "user") + _side(row["completion"], "assistant")
    elif row.get("instruction") is not None and row.get("output") is not None:
        turns = [_turn("user", _alpaca(row)), _turn("assistant", row["output"])]
    elif row.get("input") is not None and row.get("output") is not None:
        turns = _side(row["input"], "user") + _side(row["output"], "assistant")
    else:
        return None
    return _all(_with_system(row, turns))


def _alpaca(row: dict[str, Any]) -> Any:
    given = row.get("input")
    if given is None or given == "":
        return row["instruction"]
    for field in ("instruction", "input"):
        if not isinstance(row[field], str):
            raise BadRowError(f"{field} is {type(row[field]).__name__}, not text")
    return f"{row['instruction']}\n\n{given}"


def _side(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [_turn(role, value)]


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _with_system(row: dict[str, Any], turns: list[Any]) -> list[Any]:
    return [_turn("system", row["system"]), *turns] if row.get("system") else turns


def _all(turns: list[Any]) -> list[Message]:
    return [to_message(turn, number) for number, turn in enumerate(turns, start=1)]


def _check_turns(messages: list[Message]) -> None:
    """What no template can mend. Whether turns must alternate, or who begins, is for the template to say."""
    roles = [m["role"] for m in messages]
    if "assistant" not in roles:
        raise BadRowError("the conversation has no assistant turn")
    if roles[-1] != "assistant":
        raise BadRowError(f"the conversation ends with a {roles[-1]} turn that nothing answers")


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    tools = from_json(value, "tools")
    if tools is None or tools == "":
        return ()
    if not isinstance(tools, list):
        raise BadRowError(f"tools is {type(tools).__name__}, not a list")
    tools = [from_json(tool, "a tool") for tool in tools]
    for tool in tools:
        if not isinstance(tool, dict):
            raise BadRowError(f"a tool is {type(tool).__name__}, not an object")
        refuse_deep(tool, "a tool")
    return tuple(tools)


# ------------------------------------------------------------ rows that are tokens already


def _tokens(row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Ids (int32, [T]) and mask (uint8, [T])."""
    ids = _integers(row["input_ids"], "input_ids")
    if not len(ids):
        raise BadRowError("input_ids is empty")
    masks = [
        read(row, ids)
        for field, read in (("labels", _from_labels), ("loss_mask", _from_loss_mask))
        if row.get(field) is not None
    ]
    if not masks:
        raise BadRowError("input_ids without labels or loss_mask: nothing says what is trained")
    if len(masks) == 2 and not np.array_equal(masks[0], masks[1]):
        raise BadRowError("labels and loss_mask train different tokens")
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise BadRowError(f"input_ids holds {int(ids.min() if ids.min() < 0 else ids.max())}, which is no token id")
    return ids.astype(np.int32), masks[0]


def _from_labels(row: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    labels = _integers(row["labels"], "labels", len(ids))
    trained = labels != IGNORE_INDEX
    if not np.array_equal(labels[trained], ids[trained]):
        place = int(np.flatnonzero(trained & (labels != ids))[0])
        raise BadRowError(
            f"labels differs from input_ids at {place}: {labels[place]} and {ids[place]}; a label is its own token or {IGNORE_INDEX}"
        )
    return trained.astype(np.uint8)


def _from_loss_mask(row: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    mask = _integers(row["loss_mask"], "loss_mask", len(ids), kinds="iub")
    if len(mask) and not np.isin(mask, (0, 1)).all():
        raise BadRowError("loss_mask holds values other than 0 and 1")
    return mask.astype(np.uint8)


def _integers(value: Any, field: str, length: int | None = None, kinds: str = "iu") -> np.ndarray:
    if not isinstance(value, list):
        raise BadRowError(f"{field} is {type(value).__name__}, not a list")
    if length is not None and len(value) != length:
        raise BadRowError(f"{field} has {len(value):,} values, input_ids {length:,}")
    try:
        # a list of bools and numbers would become numbers: True is no token id
        array = np.array(value if value else [], dtype=None if value else np.int64)
        mixed = array.dtype.kind in "iu" and any(isinstance(v, bool) for v in value)
    except (ValueError, OverflowError):
        raise BadRowError(f"{field} holds something other than whole numbers") from None
    if array.ndim != 1 or mixed or array.dtype.kind not in kinds or array.dtype == np.uint64:
        raise BadRowError(f"{field} holds something other than whole numbers")
    return array.astype(np.int64)
