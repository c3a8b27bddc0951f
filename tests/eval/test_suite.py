"""Questions of a suite; the bundled suites ask what fine-tuning data can teach."""

from __future__ import annotations

import pytest

from fp8ctl.config.compose import compose
from fp8ctl.config.schema import SuiteConfig
from fp8ctl.data.reasoning_gym import FAMILIES, iter_questions
from fp8ctl.errors import ConfigError
from fp8ctl.eval.suite import build_questions


def test_bundled_suites() -> None:
    smoke, reasoning = (compose("eval", [f"suite={name}"]).suite for name in ("smoke", "reasoning"))
    assert (len(smoke.families), smoke.num_questions) == (8, 5)
    assert (set(reasoning.families), reasoning.num_questions) == (set(FAMILIES), 25)
    for suite in (smoke, reasoning):
        questions = build_questions(suite)
        assert len({q.question for q in questions}) == len(questions) == len(suite.families) * suite.num_questions


def test_training_never_sees_a_question_even_of_the_same_seed() -> None:
    suite = SuiteConfig(families=("chain_sum", "lcm"), num_questions=20, seed=1)
    trained = {q.question for f in suite.families for q in iter_questions(f, 500, 1, held_out=False)}
    assert not trained & {q.question for q in build_questions(suite)}


def test_questions_are_the_same_every_time_and_follow_the_seed() -> None:
    suite = SuiteConfig(families=("leg_counting",), num_questions=4)
    assert build_questions(suite) == build_questions(suite)
    assert build_questions(suite) != build_questions(suite.model_copy(update={"seed": suite.seed + 1}))


def test_suites_that_can_not_be_asked() -> None:
    with pytest.raises(ConfigError, match="suite mine has no questions") as caught:
        build_questions(SuiteConfig(name="mine"))
    assert "suite=smoke" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match=r"suite\.families names lcm more than once"):
        build_questions(SuiteConfig(families=("lcm", "chain_sum", "lcm")))
    with pytest.raises(ConfigError, match="unknown reasoning-gym family: chain_sums") as caught:
        build_questions(SuiteConfig(families=("chain_sums",)))
    assert caught.value.hint == "did you mean chain_sum?"
