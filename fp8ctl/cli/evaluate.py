"""fp8ctl eval"""

from __future__ import annotations

from fp8ctl.cli.console import stdout
from fp8ctl.cli.options import AsJson, Overrides
from fp8ctl.cli.progress import progress


def evaluate(overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Reasoning benchmarks with error bars: fp8ctl eval model=RUN suite=smoke precision=infir2."""
    import json

    from fp8ctl.config.compose import compose
    from fp8ctl.eval.run import evaluate as run_evaluation
    from fp8ctl.eval.show import result_table

    config = compose("eval", overrides or [])
    with progress("eval") as report:
        result = run_evaluation(config, lambda done, total, tokens: report(done, total, f"{tokens:,} tokens"))
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        stdout().print(result_table(result))
