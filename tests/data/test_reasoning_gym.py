from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fp8ctl.data.reasoning_gym import (
    FAMILIES,
    SYSTEM_PROMPT,
    extract_answer,
    is_held_out,
    iter_questions,
    messages,
    question,
    score,
)
from fp8ctl.errors import ConfigError, DataError, MissingPackageError

JUNK = ["", " ", "junk", "-", "nan", "inf", "-1e999999999", "1/0", "$\\frac{1}{0}$", "[", "\x00", ", , ,", "a" * 5000]


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_clean(family: str) -> None:
    asked = list(iter_questions(family, 12, seed=7))
    again = list(iter_questions(family, 12, seed=7))
    assert asked == again
    assert len({a.question for a in asked}) == 12
    for a in asked:
        assert score(a, f"<answer>{a.answer}</answer>") == 1.0
        assert score(a, f"I think so.\n<answer> {a.answer} </answer><|im_end|>") == 1.0
        assert score(a, a.answer) == 0.0, "an answer without its tags is no answer"
        for junk in JUNK:
            assert score(a, f"<answer>{junk}</answer>") == 0.0
        # short enough for rows of 512 tokens
        assert len(SYSTEM_PROMPT) + len(a.question) + len(a.answer) < 900


def test_known_question() -> None:
    assert question("chain_sum", 1, 0).question.startswith(
        "State the final answer to the following arithmetic problem: "
    )
    asked = question("spell_backward", 1, 3)
    assert asked.answer == asked.question.rsplit(" ", 1)[1][::-1]


def test_same_questions_in_every_process() -> None:
    code = (
        "from fp8ctl.data.reasoning_gym import *\n"
        "print([a.question + a.answer for f in FAMILIES for a in iter_questions(f, 5, 3)])"
    )
    outputs = {
        subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_training_and_evaluation_never_share_a_question() -> None:
    # products of small numbers: a space so small that two lists of this size would meet many times
    train = {a.question for seed in (1, 2) for a in iter_questions("products", 400, seed, held_out=False)}
    asked = {a.question for a in iter_questions("products", 150, 1)}
    assert not train & asked
    assert all(is_held_out(q) for q in asked)


def test_neighbouring_seeds_are_no_shifted_copies() -> None:
    first = [question("count_bits", 1, i).question for i in range(50)]
    second = [question("count_bits", 2, i).question for i in range(50)]
    assert len(set(first) & set(second)) < 3


def test_last_answer_counts() -> None:
    assert extract_answer("<answer>1</answer> no: <answer>\n2 </answer>") == "2"
    assert extract_answer("<answer>1") is None
    asked = question("chain_sum", 1, 0)
    assert score(asked, f"<answer>{asked.answer}</answer><answer>wrong</answer>") == 0.0


def test_part_marks_count_as_wrong() -> None:
    asked = question("spell_backward", 1, 0)
    assert score(asked, f"<answer>{asked.answer[:-1]}</answer>") == 0.0


def test_conversation() -> None:
    asked = question("lcm", 1, 0)
    assert messages(asked) == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": asked.question},
        {"role": "assistant", "content": f"<answer>{asked.answer}</answer>"},
    ]


def test_unknown_family_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown reasoning-gym family: chain_sums") as error:
        question("chain_sums", 1, 0)
    assert error.value.hint == "did you mean chain_sum?"


def test_too_many_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8ctl.data.reasoning_gym.is_held_out", lambda text: len(text) == 1)
    with pytest.raises(DataError, match="lcm gives only 0 different questions, 2 were asked for"):
        list(iter_questions("lcm", 2, seed=1))


def test_broken_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingPackageError, match="reasoning-gym can't be loaded") as error:
        question("lcm", 987_654, 0)
    assert error.value.hint == "pip install reasoning-gym==0.1.25"
