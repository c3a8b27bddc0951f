"""The table fits a narrow terminal and says what the numbers are."""

from __future__ import annotations

import io

from rich.console import Console

from fp8ctl.config.schema import EvalConfig, PrecisionConfig
from fp8ctl.eval.run import evaluate
from fp8ctl.eval.show import result_table


def shown(config: EvalConfig) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(result_table(evaluate(config)))
    return out.getvalue().splitlines()


def test_table_of_an_evaluation(config: EvalConfig) -> None:
    lines = shown(config.model_copy(update={"precision": PrecisionConfig(default="fp8")}))
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert lines[0].startswith("smoke, fp8-infir2 inference")
    assert rows["lcm"][1:8] == ["3", "0.0", "±", "0.0", "0", "-", "56"]
    assert rows["all"][1:8] == ["9", "0.0", "±", "0.0", "0", "-", "30"]
    text = " ".join(" ".join(lines).split())
    assert "ran 14 of 15 linears in FP8" in text and "fp32 elsewhere, on cpu" in text
    assert "tokens/s" in text and "± standard error over questions" in text


def test_single_question_with_samples(config: EvalConfig) -> None:
    suite = config.suite.model_copy(
        update={"families": ("lcm",), "num_questions": 1, "num_samples": 4, "temperature": 1.0}
    )
    row = next(line for line in shown(config.model_copy(update={"suite": suite})) if " lcm " in line)
    assert row.split()[:7] == ["lcm", "1", "x", "4", "0.0", "±", "?"]
