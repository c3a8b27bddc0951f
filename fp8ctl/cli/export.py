"""fp8ctl export"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fp8ctl.cli.console import say


class Format(StrEnum):
    """What the exported weights are stored as."""

    HF = "hf"
    FP8_BLOCK = "fp8-block"


def export(
    run: Annotated[Path, typer.Argument(help="Run folder, checkpoint folder or Hugging Face folder.")],
    dst: Annotated[Path, typer.Argument(help="Folder to write.")],
    format_: Annotated[
        Format, typer.Option("--format", help="hf: BF16 safetensors. fp8-block: 128x128 block-scaled E4M3 weights.")
    ] = Format.HF,
) -> None:
    """Writes a Hugging Face folder that transformers (and, as fp8-block, vLLM) loads."""
    from fp8ctl.engine.manifest import find_weights
    from fp8ctl.precision.export import export_fp8_block, export_hf

    weights = find_weights(run)
    if format_ is Format.HF:
        export_hf(weights, dst)
        say(f"{weights} exported to {dst}")
        return
    summary = export_fp8_block(weights, dst, **_as_trained(run))
    stored, kept = len(summary.fp8_linears), len(summary.kept_linears)
    say(f"{weights} exported to {dst}: {stored} of {stored + kept} linears in FP8, the rest as they were")


def _as_trained(run: Path) -> dict[str, Any]:
    """A run's own scales, and the linears that its plan kept in BF16; nothing for a bare model folder."""
    from fp8ctl.paths import RunPaths
    from fp8ctl.precision.plan import PrecisionPlan
    from fp8ctl.track.record import RunRecord

    if not RunPaths(run).plan.exists():
        return {}
    plan = PrecisionPlan.from_json(RunRecord(run).json(RunPaths(run).plan))
    if not plan.fp8_linears:
        return {}  # trained in BF16: block FP8 is then a choice for serving alone
    return {"scale_kind": plan.recipe.scale, "keep": [p.fqn for p in plan.linears if p.precision == "bf16"]}
