from __future__ import annotations

from typing import Any

import pytest

from fp8ctl.data.rows import BadRowError, Message
from fp8ctl.data.thoughts import check_rendered, check_tags, use_think_tags

OPENTHOUGHTS = (
    "<|begin_of_thought|>\n\nOkay, so\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\nIt is 4.\n\n<|end_of_solution|>"
)


def answer(content: str, **more: Any) -> list[Message]:
    return [{"role": "user", "content": "q <think>"}, {"role": "assistant", "content": content, **more}]


# ------------------------------------------------------------ markers


def test_openthoughts_markers_become_tags() -> None:
    system = (
        "Write <|begin_of_thought|> {thought} <|end_of_thought|>, then <|begin_of_solution|> {it} <|end_of_solution|>"
    )
    messages = use_think_tags([{"role": "system", "content": system}, *answer(OPENTHOUGHTS)])
    assert messages[0]["content"] == "Write <think> {thought} </think>, then  {it} "
    assert messages[2] == {"role": "assistant", "content": "<think>\nOkay, so\n</think>\n\nIt is 4."}


def test_reasoning_beside_the_answer_moves_into_it() -> None:
    messages = use_think_tags(answer("\n4", reasoning_content="\nso\n", is_trained=False))
    assert messages[1] == {"role": "assistant", "content": "<think>\nso\n</think>\n\n4", "is_trained": False}


def test_answers_without_reasoning_stay_as_they_are() -> None:
    assert use_think_tags(answer("4")) == answer("4")


@pytest.mark.parametrize(
    ("content", "more", "reason"),
    [
        ("<|begin_of_thought|>a", {}, "not one thought followed by one solution"),
        ("<|begin_of_thought|>a<|end_of_thought|>b", {}, "not one thought followed by one solution"),
        ("x" + OPENTHOUGHTS, {}, "not one thought followed by one solution"),
        (OPENTHOUGHTS + OPENTHOUGHTS, {}, "not one thought followed by one solution"),
        (OPENTHOUGHTS, {"reasoning_content": "r"}, "reasoning_content and thought markers"),
        ("<|begin_of_thought|>a<|end_of_thought|><|begin_of_solution|> <|end_of_solution|>", {}, "solution is empty"),
    ],
)
def test_markers_that_do_not_pair(content: str, more: dict[str, str], reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        use_think_tags(answer(content, **more))


# ------------------------------------------------------------ tags


@pytest.mark.parametrize("content", ["a", "<think>r</think>a", "\n<think>\n\n</think>\n\na", "r</think>a"])
def test_tags_that_pass(content: str) -> None:
    check_tags(answer(content))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("<think>r", "turn 2 opens <think> and does not close it"),
        ("<think>a<think>b</think>c</think>d", "opens 2 and closes 2 thoughts, one is allowed"),
        ("<think>a</think>b<think>c</think>d", "opens 2 and closes 2 thoughts, one is allowed"),
        ("<think>a</think>b</think>", "opens 1 and closes 2 thoughts"),
        ("a</think>b<think>", "closes </think> before it opens one"),
        ("a <think>r</think>", "opens <think> after text of the answer"),
    ],
)
def test_tags_that_are_refused(content: str, reason: str) -> None:
    with pytest.raises(BadRowError, match=reason) as error:
        check_tags(answer(content))
    assert error.value.hint == "check_thoughts=false takes tags as any other text"


def test_reasoning_twice_is_refused() -> None:
    messages = answer("<think>r</think>a", reasoning_content="r")
    with pytest.raises(BadRowError, match="turn 2 has reasoning_content, and <think> tags in its content"):
        check_tags(use_think_tags(messages))


# ------------------------------------------------------------ as rendered


@pytest.mark.parametrize("text", ["U:|a", "U:|<think>r</think>a", "U:<think>\n|r</think>a", "<think></think>:|a"])
def test_rendered_turns_that_pass(text: str) -> None:
    before, _, after = text.partition("|")
    check_rendered(before + after, len(before), len(text) - 1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("U:<think>\n|<think>r</think>a", "opens a thought that the answer opens too"),
        ("U:<think>\n|a", "opens a thought that the answer does not close"),
        ("U:|r</think>a", "neither it nor the chat template opens one"),
    ],
)
def test_rendered_turns_that_are_refused(text: str, reason: str) -> None:
    before, _, after = text.partition("|")
    with pytest.raises(BadRowError, match=reason):
        check_rendered(before + after, len(before), len(text) - 1)
