from __future__ import annotations

import time
from typing import Any

import pytest

from fp8ctl.data.rows import BadRowError, Message
from fp8ctl.data.survival import check_nothing_is_lost


def check(shown: str, content: str, before: str = "U:q A:", **more: Any) -> None:
    messages: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, **more}]
    text = before + shown
    check_nothing_is_lost(messages, text, [(len(before), len(text))], "T")


CALL = [{"type": "function", "function": {"name": "f", "arguments": {"x": 'a"\n', "y": [1.5, {"z": True}]}}}]


@pytest.mark.parametrize(
    ("shown", "content", "more"),
    [
        ("a b.", "a b", {}),
        ("a\nb.", " a b\n", {}),
        ("<think>\nr\n</think>\n\na.", "a", {"reasoning_content": "r\n"}),
        ('{"f": {"x": "a\\"\\n", "y": [1.5, {"z": true}]}}', "", {"tool_calls": CALL}),
    ],
)
def test_white_space_and_forms_may_change(shown: str, content: str, more: dict[str, Any]) -> None:
    check(shown, content, **more)


def test_an_opening_that_the_template_wrote_counts() -> None:
    check("r</think>a", "<think>\nr</think>a", before="U:q A:<think>\n")


@pytest.mark.parametrize(
    ("shown", "content", "more", "what"),
    [
        ("b.", "<think>\nr\n</think>\n\nb", {}, r"turn 1 (content): -'<think>\nr\n</think>' (18 of 21 characters)"),
        ("ac.", "a b c", {}, "turn 1 (content): -'b' (1 of 5 characters)"),
        ("ab.", "abcde", {}, "turn 1 (content): -'cde' (3 of 5 characters)"),
        ("", "ab", {}, "turn 1 (content): -'ab' (2 of 2 characters)"),
        ("axb", "ab", {}, "turn 1 (content): -'ab' (2 of 2 characters)"),
        ("a.", "a", {"reasoning_content": "r s"}, "turn 1 (reasoning_content): -'r s' (3 of 3 characters)"),
        ("f x y z 1.5 true", "", {"tool_calls": CALL}, r"""turn 1 (tool_calls): -'a"' (2 of 3 characters)"""),
    ],
)
def test_what_was_cut_is_named(shown: str, content: str, more: dict[str, Any], what: str) -> None:
    with pytest.raises(BadRowError) as error:
        check(shown, content, **more)
    assert error.value.message == f"the chat template T drops text of assistant {what}"


def test_long_cuts_are_shortened_and_fast() -> None:
    reasoning = "<think>" + "word " * 400_000 + "</think>"
    start = time.monotonic()
    with pytest.raises(
        BadRowError, match=r"-'<think>word .*\[\.\.\.\].*</think>' \(2,000,015 of 2,000,018 characters\)"
    ):
        check("end.", reasoning + "end")
    assert time.monotonic() - start < 10


def test_turns_of_others_must_stand_too() -> None:
    messages: list[Message] = [
        {"role": "system", "content": "be\nkind"},
        {"role": "tool", "content": 'a "b"'},
        {"role": "assistant", "content": "c"},
    ]
    check_nothing_is_lost(messages, r'be kind "a \"b\"" c', [(18, 19)], "T")
    with pytest.raises(
        BadRowError, match=r"the chat template T drops text of turn 2 \(tool\): -'a \"b\"' \(5 of 5 characters\)"
    ):
        check_nothing_is_lost(messages, "be kind c", [(8, 9)], "T")


def test_turns_must_be_as_many() -> None:
    with pytest.raises(BadRowError, match="1 assistant turns, but the chat template T marks 0"):
        check_nothing_is_lost([{"role": "assistant", "content": "a"}], "a", [], "T")
