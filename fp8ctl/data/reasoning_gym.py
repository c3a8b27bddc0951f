"""Questions from reasoning-gym: short generated problems whose answers a program can check.

Training and evaluation can't meet: a question belongs to one of them by the hash of its own text, whatever the seeds.
The package itself takes a second to import, so it is loaded inside functions only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from fp8ctl.config.problems import nearest
from fp8ctl.errors import ConfigError, DataError, MissingPackageError

SYSTEM_PROMPT = "Answer the question. Write only the final answer, inside <answer></answer> tags."
"""Said to the model both in the training conversations and in evaluation."""

FAMILIES: tuple[str, ...] = (
    "base_conversion",
    "basic_arithmetic",
    "chain_sum",
    "count_bits",
    "decimal_chain_sum",
    "fraction_simplification",
    "lcm",
    "leg_counting",
    "letter_counting",
    "products",
    "simple_equations",
    "simple_geometry",
    "spell_backward",
    "word_sequence_reversal",
)
"""Fast families, the same in every process; their own answers score 1, junk scores 0 and never makes a scorer raise.

Left out on purpose: isomorphic_strings and ransom_note depend on Python's hash seed; gcd and syllogism reward junk.
"""

_HELD_OUT_ONE_IN = 8
_LONGEST_ANSWER_CHARS = 1000
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class RgQuestion:
    """One question; `index` counts the family's raw questions of one seed, `entry` is the package's own record."""

    family: str
    index: int
    question: str
    answer: str
    entry: dict[str, Any]


def question(family: str, seed: int, index: int) -> RgQuestion:
    """The raw question `index` of a seed: the same on every call and machine for one version of the package.

    Raises:
        ConfigError: a family that is not in `FAMILIES`.
        MissingPackageError: reasoning-gym is absent or broken.
    """
    if family not in FAMILIES:
        near = nearest(family, FAMILIES)
        raise ConfigError(
            f"unknown reasoning-gym family: {family}",
            f"did you mean {near}?" if near else f"families: {', '.join(FAMILIES)}",
        )
    # The package draws question i of seed s from Random(s + i): neighbouring seeds would give shifted copies of a list.
    spread_seed = xxhash.xxh3_64_intdigest(f"{family}:{seed}".encode()) % 2**31
    entry = _dataset(family, spread_seed)[index]
    return RgQuestion(family, index, str(entry["question"]).strip(), str(entry["answer"]), dict(entry))


def iter_questions(family: str, num: int, seed: int, *, held_out: bool = True) -> Iterator[RgQuestion]:
    """`num` different questions of one family, in a fixed order.

    Args:
        held_out: True (evaluation) gives only the eighth of all question texts that training never sees; False
            (training) the other seven eighths.

    Raises:
        ConfigError, MissingPackageError: see `question`.
        DataError: the family has not so many different questions.
    """
    seen: set[str] = set()
    for index in range(1000 + 100 * num):
        if len(seen) == num:
            return
        candidate = question(family, seed, index)
        if is_held_out(candidate.question) == held_out and candidate.question not in seen:
            seen.add(candidate.question)
            yield candidate
    if len(seen) < num:
        raise DataError(
            f"reasoning-gym family {family} gives only {len(seen)} different questions, {num} were asked for",
            "ask for fewer questions per family",
        )


def is_held_out(question_text: str) -> bool:
    """Whether a question text is reserved for evaluation."""
    return xxhash.xxh3_64_intdigest(question_text.encode()) % _HELD_OUT_ONE_IN == 0


def messages(asked: RgQuestion) -> list[dict[str, str]]:
    """The training conversation: instruction, question, and the bare answer inside its tags."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": asked.question},
        {"role": "assistant", "content": f"<answer>{asked.answer}</answer>"},
    ]


def extract_answer(text: str) -> str | None:
    """What stands inside the last <answer></answer> of a completion; None where there is none."""
    found = _ANSWER.findall(text)
    return found[-1].strip() if found else None


def score(asked: RgQuestion, text: str) -> float:
    """1.0 when the answer in `text` is right by the family's own scorer, else 0.0 (part marks too). Never raises."""
    answer = extract_answer(text)
    if not answer or len(answer) > _LONGEST_ANSWER_CHARS:
        return 0.0
    if answer == asked.answer.strip():
        return 1.0
    try:
        return float(_dataset(asked.family, 0).score_answer(answer, asked.entry) == 1.0)
    except Exception:  # a scorer that can't read the answer: the answer is wrong
        return 0.0


@functools.lru_cache(maxsize=128)
def _dataset(family: str, seed: int) -> Any:
    try:
        import reasoning_gym
    except Exception as error:
        raise MissingPackageError(
            f"reasoning-gym can't be loaded: {error}", "pip install reasoning-gym==0.1.25"
        ) from None
    return reasoning_gym.create_dataset(family, seed=seed, size=2**31 - 1)
