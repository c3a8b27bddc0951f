from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp8ctl.data.conversations import to_conversation
from fp8ctl.data.rows import BadRowError, Conversation, Origin

EXPECTED = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
]
HUMAN = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def read(row: dict[str, Any]) -> Conversation:
    return to_conversation(row, Origin("f", 1))


def answered(*turns: Any, **last: Any) -> dict[str, Any]:
    """A row of these turns and an assistant's turn at the end."""
    return {"messages": [*turns, {"role": "assistant", "content": "a", **last}]}


# ------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    "row",
    [
        {"messages": EXPECTED, "id": 7},
        {"messages": EXPECTED[1:], "system": "s"},
        {"messages": '[{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'},
        {"conversations": HUMAN, "system": "s"},
        {"conversations": [{"from": "system", "value": "s"}, *HUMAN], "system": ""},
        {"prompt": "q", "completion": "a", "system": "s"},
        {"prompt": EXPECTED[:2], "completion": EXPECTED[2:]},
        {"prompt": EXPECTED[:2], "completion": "a"},
        {"instruction": "q", "input": "", "output": "a", "system": "s"},
        {"instruction": "q", "input": None, "output": "a", "system": "s"},
        {"instruction": None, "input": "q", "output": "a", "system": "s", "category": "math"},
        # both spellings in one row, one of them null, as merged Parquet files have it
        {"messages": [{**m, "from": None, "value": None, "reasoning_content": None, "tool_calls": None} for m in EXPECTED]},
        {"messages": None, "conversations": [{"from": m["role"], "value": m["content"], "role": None} for m in EXPECTED]},
        {"messages": [], "conversations": EXPECTED},
        {"messages": EXPECTED, "conversations": [{"from": m["role"], "value": m["content"]} for m in EXPECTED]},
        {"messages": [{**m, "from": m["role"], "value": m["content"]} for m in EXPECTED]},
    ],
)  # fmt: skip
def test_shapes(row: dict[str, Any]) -> None:
    found = read(row)
    assert (found.messages, found.tools, found.tokens) == (EXPECTED, (), None)


def test_alpaca_input_stands_below_the_instruction() -> None:
    assert read({"instruction": "Sum up.", "input": "1 2", "output": "3"}).messages[0]["content"] == "Sum up.\n\n1 2"


@pytest.mark.parametrize("role", ["user", "human"])
def test_names_of_the_user(role: str) -> None:
    assert read(answered({"role": role, "content": "q"})).messages[0]["role"] == "user"


@pytest.mark.parametrize("role", ["tool", "function", "observation", "ipython"])
def test_names_of_tools(role: str) -> None:
    assert read(answered({"role": role, "content": "", "name": "f", "x": 1})).messages[0] == {
        "role": "tool",
        "content": "",
        "name": "f",
    }


def test_whether_turns_alternate_is_left_to_the_template() -> None:
    turns = [{"role": r, "content": "x"} for r in ("assistant", "assistant", "user", "system", "developer", "user")]
    assert [m["role"] for m in read(answered(*turns)).messages] == [*(t["role"] for t in turns), "assistant"]


# ------------------------------------------------------------ content


@pytest.mark.parametrize(
    ("content", "text"),
    [("", ""), ([{"type": "text", "text": "a"}, {"text": "b"}, "c"], "abc")],
)
def test_content_that_is_taken(content: Any, text: str) -> None:
    assert read(answered({"role": "system", "content": content})).messages[0]["content"] == text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_stays_beside_the_answer(name: str) -> None:
    assert read(answered(**{name: "r"})).messages == [{"role": "assistant", "content": "a", "reasoning_content": "r"}]


def test_turns_of_weight_0_are_not_trained() -> None:
    row = {"messages": [{"role": "assistant", "content": "a", "weight": w} for w in (0, 1)]}
    assert [m.get("is_trained") for m in read(row).messages] == [False, None]


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        [{"name": "f", "arguments": {"x": 1}}],
        ['{"name": "f", "arguments": {"x": 1}}'],
        '[{"name": "f", "arguments": "{\\"x\\": 1}"}]',
    ],
)
def test_tool_calls_as_text_or_object(calls: Any) -> None:
    for content in ("", None, "a"):
        found = read(answered(content=content, tool_calls=calls)).messages[0]
        assert found == {"role": "assistant", "content": content or "", "tool_calls": [CALL]}


def test_older_spellings_of_tool_calls() -> None:
    assert read(answered(content=None, function_call={"name": "f", "arguments": '{"x": 1}'})).messages[0][
        "tool_calls"
    ] == [CALL]
    share = {"conversations": [HUMAN[0], {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'}]}
    assert read(share).messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    named = read(answered(tool_calls=[{"id": "7", "name": "f", "arguments": ""}])).messages[0]["tool_calls"]
    assert named == [{"id": "7", "type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]', ['{"name": "f"}']])
def test_tools(tools: Any) -> None:
    assert read({**answered(), "tools": tools}).tools == ({"name": "f"},)


def test_no_tools() -> None:
    for tools in (None, "", [], "[]", "null"):
        assert read({**answered(), "tools": tools}).tools == ()


# ------------------------------------------------------------ tokens


@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [False, True, True], "attention_mask": [1, 1, 1]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "labels": [-100, 6, 7], "messages": None},
    ],
)
def test_tokens(row: dict[str, Any]) -> None:
    found = read(row)
    assert found.messages == [] and found.tokens is not None
    ids, mask = found.tokens
    assert (ids.tolist(), ids.dtype, mask.tolist(), mask.dtype) == ([5, 6, 7], np.int32, [0, 1, 1], np.uint8)


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, r"no conversation in the row \(fields: none\)"),
        ({"text": "x", "id": 1}, r"no conversation in the row \(fields: text, id\)"),
        ({"prompt": "q", "completion": None}, r"no conversation in the row \(fields: prompt, completion\)"),
        ({"messages": []}, "no conversation in the row"),
        ({"messages": "x"}, "messages is text, and not JSON"),
        ({"messages": "5"}, "messages is int, not a list"),
        ({"conversations": {"a": 1}}, "conversations is dict, not a list"),
        ({"messages": EXPECTED, "conversations": HUMAN}, "has messages and conversations, and they differ"),
        ({"instruction": "q", "input": 1, "output": "a"}, "input is int, not text"),
        ({"instruction": ["q"], "input": "x", "output": "a"}, "instruction is list, not text"),
        # turns
        ({"messages": [{"role": "system", "content": "s"}]}, "has no assistant turn"),
        ({"messages": [{"role": "user", "content": "s"}]}, "has no assistant turn"),
        ({"messages": [*EXPECTED, EXPECTED[1]]}, "ends with a user turn that nothing answers"),
        ({"messages": [*EXPECTED, EXPECTED[0]]}, "ends with a system turn that nothing answers"),
        ({"messages": ["x"]}, "turn 1 is str, not an object"),
        ({"messages": [{"content": "x"}]}, "turn 1 has no role"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "turn 1 has the unknown role 'critic'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "from": "gpt", "content": "x"}]}, "turn 1 has role 'user' and from 'gpt'"),
        # content
        ({"messages": [{"role": "user"}]}, "the content of turn 1 is null, not text"),
        ({"messages": [{"role": "user", "content": []}]}, "the content of turn 1 is an empty list, not text"),
        ({"messages": [{"role": "user", "content": 5}]}, "the content of turn 1 is int, not text"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "the content of turn 1 is dict, not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "turn 1 has a part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": [3]}]}, "turn 1 has a part of type 'int'"),
        ({"messages": [{"role": "user", "content": "a", "value": "b"}]}, "turn 1 has content and value, and they differ"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "the user says nothing in turn 1"),
        (answered(content=" \n"), "the assistant says nothing in turn 1"),
        (answered(content="", reasoning_content="r"), "the assistant says nothing in turn 1"),
        (answered(content=None), "the content of turn 1 is null"),
        (answered(reasoning_content=1), "the reasoning_content of turn 1 is int, not text"),
        (answered(reasoning_content="r", thinking="x"), "turn 1 has reasoning_content and thinking, and they differ"),
        (answered(weight=0.5), "turn 1 has weight 0.5, only 0 and 1 are known"),
        # tools
        (answered(tool_calls=[1]), "a tool call of turn 1 names no function"),
        (answered(tool_calls=[{"function": None}]), "a tool call of turn 1 names no function"),
        (answered(tool_calls="{"), "tool_calls of turn 1 is text, and not JSON"),
        (answered(tool_calls={"name": "f"}), "tool_calls of turn 1 is dict, not a list"),
        (answered(tool_calls=[{"name": "f", "arguments": "x"}]), "the arguments of 'f' in turn 1 is text, and not JSON"),
        (answered(tool_calls=[{"name": "f", "arguments": '{"x": NaN}'}]), "the arguments of 'f' in turn 1 is text, and not JSON"),
        (answered(tool_calls=[{"name": "f", "arguments": [1]}]), "the arguments of 'f' in turn 1 are list, not an object"),
        (answered(tool_calls=[CALL], function_call=CALL["function"]), "turn 1 has tool_calls and function_call"),
        (answered({"role": "user", "content": "q", "tool_calls": [CALL]}), "turn 1 calls tools, but it is the user's"),
        ({**answered(), "tools": 5}, "tools is int, not a list"),
        ({**answered(), "tools": "{}"}, "tools is dict, not a list"),
        ({**answered(), "tools": [5]}, "a tool is int, not an object"),
        # tokens
        ({"input_ids": [1]}, "input_ids without labels or loss_mask"),
        ({"input_ids": [], "labels": []}, "input_ids is empty"),
        ({"input_ids": "1 2", "labels": [1]}, "input_ids is str, not a list"),
        ({"input_ids": [1, 2.5], "labels": [1, 2]}, "input_ids holds something other than whole numbers"),
        ({"input_ids": [1, None], "labels": [1, 2]}, "input_ids holds something other than whole numbers"),
        ({"input_ids": [1, True], "labels": [1, 1]}, "input_ids holds something other than whole numbers"),
        ({"input_ids": [[1], [2]], "labels": [1, 2]}, "input_ids holds something other than whole numbers"),
        ({"input_ids": [[1], 2], "labels": [1, 2]}, "input_ids holds something other than whole numbers"),
        ({"input_ids": [1, 2**64], "labels": [1, 2]}, "input_ids holds something other than whole numbers"),
        ({"input_ids": [1, 2**40], "loss_mask": [1, 1]}, "input_ids holds 1099511627776, which is no token id"),
        ({"input_ids": [1, -5], "loss_mask": [1, 1]}, "input_ids holds -5, which is no token id"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 values, input_ids 2"),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "labels differs from input_ids at 0: 2 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask holds values other than 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [0, 1], "labels": [1, 2]}, "labels and loss_mask train different tokens"),
    ],
)  # fmt: skip
def test_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        read(row)


def test_deep_nesting_is_refused() -> None:
    deep: Any = 1
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(BadRowError, match="nested too deeply"):
        read(answered(tool_calls=[{"name": "f", "arguments": {"x": deep}}]))
    with pytest.raises(BadRowError, match="tools is text, and not JSON"):
        read({**answered(), "tools": "[" * 50_000})
