"""The questions of a suite."""

from __future__ import annotations

from fp8ctl.config.schema import SuiteConfig
from fp8ctl.data.reasoning_gym import RgQuestion, iter_questions
from fp8ctl.errors import ConfigError


def build_questions(suite: SuiteConfig) -> list[RgQuestion]:
    """All questions of the suite, family by family; the same on every call.

    Raises:
        ConfigError: no families, a family twice, or one that does not exist (with the nearest name).
        DataError: a family has not so many different questions.
    """
    if not suite.families:
        raise ConfigError(
            f"suite {suite.name} has no questions", "choose suite=smoke or suite=reasoning, or set suite.families"
        )
    if twice := sorted({f for f in suite.families if suite.families.count(f) > 1}):
        raise ConfigError(f"suite.families names {', '.join(twice)} more than once", "name each family once")
    return [q for family in suite.families for q in iter_questions(family, suite.num_questions, suite.seed)]
