"""fp8ctl export"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

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
    from fp8ctl.precision.export import export_fp8_block, export_hf
    from fp8ctl.track.checkpoints import find_weights

    weights = find_weights(run)
    if format_ is Format.HF:
        export_hf(weights, dst)
    else:
        export_fp8_block(weights, dst)
    say(f"{weights} exported to {dst} as {format_.value}")
