from __future__ import annotations

from typing import Any

import pytest

from fp8ctl.data.conversations import to_messages
from fp8ctl.data.rows import BadRowError

EXPECTED = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": EXPECTED, "id": 7},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s"},
        {"prompt": "q", "completion": "a", "system": "s"},
        {"prompt": EXPECTED[:2], "completion": EXPECTED[2:]},
        # both spellings in one row, one of them null, as merged Parquet files have it
        {
            "messages": [
                {**m, "from": None, "value": None, "reasoning_content": None, "tool_calls": None} for m in EXPECTED
            ]
        },
        {
            "messages": None,
            "conversations": [{"from": m["role"], "value": m["content"], "role": None} for m in EXPECTED],
        },
    ],
)
def test_shapes(row: dict[str, Any]) -> None:
    assert to_messages(row) == EXPECTED


def test_reasoning_stays_beside_the_answer() -> None:
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]
    }
    assert to_messages(row)[1] == {"role": "assistant", "content": "a", "reasoning_content": "r"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, r"no conversation in the row \(fields: none\)"),
        ({"text": "x", "id": 1}, r"no conversation in the row \(fields: text, id\)"),
        ({"messages": "x"}, "messages is str, not a list"),
        ({"conversations": {}}, "conversations is dict, not a list"),
        ({"messages": []}, "has no assistant turn"),
        ({"messages": [{"role": "system", "content": "s"}]}, "has no assistant turn"),
        ({"messages": ["x"]}, "turn 1 is str, not an object"),
        ({"messages": [{"content": "x"}]}, "turn 1 has the unknown role None"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "turn 1 has the unknown role 'tool'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user"}]}, "the content of turn 1 is NoneType, not text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "the content of turn 1 is list, not text"),
        ({"messages": [{"role": "assistant", "content": " \n"}]}, "the assistant says nothing in turn 1"),
        (
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": 1}]},
            "reasoning_content of turn 1 is int",
        ),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}, "turn 1 calls tools"),
        ({"messages": EXPECTED, "tools": [{}]}, "conversations with tools are not supported"),
        ({"prompt": "q"}, "no conversation in the row"),
        ({"prompt": 1, "completion": "a"}, "the content of turn 1 is int, not text"),
    ],
)
def test_refused_with_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        to_messages(row)
