"""Accuracies and paired differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8ctl.eval.statistics import estimate
from fp8ctl.report import accuracy
from fp8ctl.report.load import load_run


def test_figures_are_those_of_the_evaluation(make_run) -> None:
    run = load_run(make_run("bf16", answers={"bf16": 0.6}), "A")
    found = accuracy.summarize(run.evaluations[0])
    expected = estimate(run.evaluations[0].scores)
    assert found.total is not None
    assert (found.total.accuracy, found.total.se, found.total.low) == (expected.accuracy, expected.se, expected.low)
    assert found.total.accuracy == 0.6
    assert (found.total.num_questions, found.total.truncated_share, found.total.no_answer_share) == (40, 0.05, 0.1)
    assert list(found.families) == ["basic_arithmetic", "chain_sum", "gcd", "letter_counting"]
    assert (found.suite, found.precision) == ("smoke", "bf16")


def test_arms_are_paired_question_by_question(make_run) -> None:
    a = load_run(make_run("a", answers={"bf16": 0.6}), "A")
    b = load_run(make_run("b", answers={"bf16": 0.5}), "B")
    (found,), notes = accuracy.compare(a, b)
    assert notes == []
    assert (found.baseline, found.candidate, found.num_questions, found.num_samples) == (0.6, 0.5, 40, 1)
    assert found.difference.value == pytest.approx(-0.1)
    spread = (a.evaluations[0].scores, b.evaluations[0].scores)
    assert all(later <= earlier for earlier, later in zip(*(s.values() for s in spread), strict=True))
    se_of_two = 2 * 1.96 * (2 * 0.25 / 40) ** 0.5
    assert found.difference.high - found.difference.low < 0.75 * se_of_two, "pairing narrows it"  # type: ignore[operator]


def test_the_same_inference_precision_is_compared(make_run) -> None:
    a = load_run(make_run("a", answers={"bf16": 0.6}), "A")
    b = load_run(make_run("b", answers={"bf16": 0.55, "fp8-infir2": 0.4}), "B")
    found, _ = accuracy.compare(a, b)
    assert [(p.precision, p.candidate) for p in found] == [("bf16", 0.55)]
    (inference,) = accuracy.compare_inference(b)
    assert (inference.precision, inference.baseline, inference.candidate) == ("bf16 | fp8-infir2", 0.55, 0.4)
    assert accuracy.compare_inference(a) == []


def test_without_a_common_precision_each_arms_own_is_taken_and_named(make_run) -> None:
    a = load_run(make_run("a", answers={"bf16": 0.6}), "A")
    b = load_run(make_run("b", answers={"fp8-infir2": 0.4}), "B")
    (found,), _ = accuracy.compare(a, b)
    assert (found.precision, found.difference.value) == ("bf16 | fp8-infir2", pytest.approx(-0.2))


def test_other_questions_are_not_compared(make_run, add_eval) -> None:
    a, b = make_run("a", answers={"bf16": 0.6}), make_run("b")
    add_eval(b, "bf16", 0.5, protocol="p2")
    found, notes = accuracy.compare(load_run(a, "A"), load_run(b, "B"))
    assert found == []
    assert notes == ["evaluations smoke-bf16 and smoke-bf16 asked in different ways, so they are not compared"]


def test_lost_answers_are_left_out_of_the_pairs_and_told(make_run) -> None:
    a, b = make_run("a", answers={"bf16": 0.6}), make_run("b", answers={"bf16": 0.6})
    file = b / "eval" / "smoke-bf16" / "completions.jsonl"
    file.write_text("\n".join(file.read_text().splitlines()[:30]) + "\n")
    (found,), _ = accuracy.compare(load_run(a, "A"), load_run(b, "B"))
    assert (found.num_questions, found.note) == (30, "10 questions answered by one only")


def test_several_samples_are_averaged_first(make_run, add_eval) -> None:
    a, b = make_run("a"), make_run("b")
    for folder, share in ((a, 0.5), (b, 0.45)):
        add_eval(folder, "bf16", share, samples=4)
    (found,), _ = accuracy.compare(load_run(a, "A"), load_run(b, "B"))
    assert (found.num_questions, found.num_samples) == (40, 4)
    assert found.difference.value == pytest.approx(-0.05)


def test_questions_needed_grow_with_the_square_of_the_width(make_run) -> None:
    a = load_run(make_run("a", answers={"bf16": 0.6}), "A")
    b = load_run(make_run("b", answers={"bf16": 0.5}), "B")
    (found,), _ = accuracy.compare(a, b)
    half = (found.difference.high - found.difference.low) / 2  # type: ignore[operator]
    assert found.questions_needed(half / 2) == pytest.approx(160, abs=1)


def test_a_result_without_figures_is_tolerated(make_run) -> None:
    folder: Path = make_run("a", answers={"bf16": 0.6})
    (folder / "eval" / "smoke-bf16" / "result.json").write_text(json.dumps({"schema": 9, "suite": "smoke"}))
    (folder / "eval" / "smoke-bf16" / "completions.jsonl").unlink()
    found = accuracy.summarize(load_run(folder, "A").evaluations[0])
    assert (found.total, found.families, found.precision) == (None, {}, "unknown")
