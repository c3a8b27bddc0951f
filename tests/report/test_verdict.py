"""Each rule of the verdict, decided by real run folders."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fp8ctl.report.build import exit_code, make_report


def verdict(*folders: Any) -> tuple[str, str, str, int]:
    report = make_report(list(folders))
    (stage,) = report["stages"]
    found = stage["comparisons"][0]["verdict"]
    assert (report["verdict"]["verdict"], report["verdict"]["rule"]) == (found["verdict"], found["rule"])
    return found["verdict"], found["rule"], "; ".join(found["reasons"]), exit_code(report)


def test_parity(make_run) -> None:
    word, rule, why, code = verdict(
        make_run("a", answers={"bf16": 0.6}), make_run("b", precision="infir2", answers={"bf16": 0.6})
    )
    assert (word, rule, code) == ("parity", "every rule that applies held", 0)
    assert "within the margin of 0.25 %" in why and "validation loss gap" in why
    assert (
        "no difference in accuracy visible: 0.0 points (95 % -6.8 to +6.8) on 40 questions of smoke, bf16 inference"
        in why
    )
    assert "to exclude a loss of 2 points would take about" in why


def test_worse_by_loss(make_run) -> None:
    word, rule, why, code = verdict(make_run("a"), make_run("b", precision="infir2", gap=0.01))
    assert (word, rule, code) == ("worse", "loss not above margin", 3)
    assert "training loss gap +1.0" in why and "all of it above the margin of 0.25 %" in why


def test_undecided_when_the_band_reaches_across_the_margin(make_run) -> None:
    word, rule, why, code = verdict(make_run("a"), make_run("b", precision="infir2", gap=0.0022, drift=0.001))
    assert (word, rule, code) == ("undecided", "loss within margin", 4)
    assert "it reaches across the margin of 0.25 %" in why


def test_worse_by_accuracy(make_run) -> None:
    word, rule, why, _ = verdict(
        make_run("a", answers={"bf16": 0.9}), make_run("b", precision="infir2", answers={"bf16": 0.5})
    )
    assert (word, rule) == ("worse", "accuracy not lower")
    assert why.startswith("accuracy is lower: -40.0 points (95 % -")
    assert why.endswith("on 40 questions of smoke, bf16 inference")


def test_a_worse_validation_loss_keeps_parity_open(make_run) -> None:
    losses = np.full(60, 2.0)
    fp8 = make_run("b", precision="infir2", losses=losses, drift=0.0001)
    file = fp8 / "metrics.jsonl"
    file.write_text(file.read_text().replace('"validation_loss": 2.0', '"validation_loss": 2.1'))
    word, rule, why, _ = verdict(make_run("a", losses=losses), fp8)
    assert (word, rule) == ("undecided", "validation within margin")
    assert "is above the margin of 0.25 %, the training loss is within it" in why


def test_another_setting_is_not_the_same_experiment(make_run) -> None:
    config = {"optim.peak_lr": 1e-3, "seed": 3, "data.path": "/data/x", "loop.save_every_steps": 7}
    word, rule, why, code = verdict(make_run("a"), make_run("b", precision="infir2", gap=0.01, config=config))
    assert (word, rule, code) == ("undecided", "same experiment", 4)
    assert why == "the runs are not matched: seed, data.path, optim.peak_lr and 1 more differ"


def test_one_differing_setting_is_named(make_run) -> None:
    _, _, why, _ = verdict(make_run("a"), make_run("b", precision="infir2", config={"seed": 3}))
    assert why == "the runs are not matched: seed differs"


def test_losses_that_end_not_finite_are_worse(make_run) -> None:
    losses = np.full(60, 2.0)
    broken = losses.copy()
    broken[40:] = math.nan
    word, rule, why, code = verdict(make_run("a", losses=losses), make_run("b", precision="infir2", losses=broken))
    assert (word, rule, code) == ("worse", "losses finite", 3)
    assert why == "B FP8 infir2 has losses that are not finite, the first at step 41, and some among its last 10 %"
    word, rule, _, _ = verdict(make_run("c", losses=broken), make_run("d", precision="infir2", losses=losses))
    assert (word, rule) == ("undecided", "losses finite")


def test_a_single_step_that_was_not_finite_decides_nothing(make_run) -> None:
    losses = np.full(60, 2.0)
    losses[20] = math.nan
    assert verdict(make_run("a"), make_run("b", precision="infir2"))[0] == "parity"
    report = make_report([make_run("c", losses=np.full(60, 2.0)), make_run("d", precision="infir2", losses=losses)])
    found = report["stages"][0]["comparisons"][0]["verdict"]
    assert found["verdict"] == "parity"
    assert [c["text"] for c in found["checks"] if c["rule"] == "losses finite"] == [
        "1 losses not finite, none at the end"
    ]


def test_an_unfinished_run_is_undecided_with_its_cause(make_run) -> None:
    crashed = make_run("b", precision="infir2", logged=40, state="failed", cause="rank 1 was killed")
    word, rule, why, _ = verdict(make_run("a"), crashed)
    assert (word, rule) == ("undecided", "both finished")
    assert why == "B FP8 infir2 has not finished: failed at step 40 (rank 1 was killed)"


def test_fp8_must_be_shown_to_have_run(make_run) -> None:
    word, rule, why, _ = verdict(make_run("a"), make_run("b", precision="infir2", fp8_share=0.0))
    assert (word, rule) == ("undecided", "FP8 ran")
    assert why == "B FP8 infir2 asks for FP8 and ran none of its GEMMs in it"


def test_two_steps_make_no_verdict(make_run) -> None:
    word, rule, why, _ = verdict(make_run("a", num_steps=1), make_run("b", precision="infir2", num_steps=1))
    assert (word, rule, why) == ("undecided", "enough steps", "1 common steps are too few for a noise band")


@pytest.mark.parametrize(
    ("step_time_s", "memory_gib", "word"),
    [(1.6, 3.0, "parity"), (2.2, 2.5, "parity"), (2.2, 3.0, "does not pay"), (2.0, 2.97, "does not pay")],
)
def test_real_fp8_must_pay(make_run, gpu, step_time_s: float, memory_gib: float, word: str) -> None:
    fp8 = make_run("b", precision="infir2", env=gpu, step_time_s=step_time_s, memory_bytes=int(memory_gib * 2**30))
    found, rule, why, code = verdict(make_run("a", env=gpu), fp8)
    assert found == word
    if word == "does not pay":
        assert (rule, code) == ("pays", 5)
        assert why.startswith("quality holds, but a step takes 1.")


def test_emulated_fp8_is_never_judged_by_its_speed(make_run) -> None:
    report = make_report([make_run("a"), make_run("b", precision="infir2", step_time_s=9.0)])
    found = report["stages"][0]["comparisons"][0]["verdict"]
    assert found["verdict"] == "parity"
    assert found["checks"][-1] == {
        "rule": "pays",
        "outcome": "left out",
        "text": "FP8 is emulated here: its speed is not a speed claim, and speed did not enter the verdict",
    }


def test_two_bf16_runs_are_a_yardstick(make_run) -> None:
    report = make_report([make_run("a"), make_run("b")])
    assert report["verdict"]["verdict"] == "parity"
    assert "A BF16 and B BF16 both run without FP8: their gap is a yardstick for noise." in report["notes"]
