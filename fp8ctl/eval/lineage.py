"""What the evaluated model was trained on, as far as run folders and data manifests tell: other seeds, and which chat template.

Generated questions of training and evaluation never share a text (`data.reasoning_gym`); that a seed is not shared either makes
it plain in the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8ctl.config.schema import SuiteConfig
from fp8ctl.data.manifest import Manifest
from fp8ctl.errors import ConfigError, DataError, ModelError
from fp8ctl.eval.target import find_target
from fp8ctl.paths import RunPaths
from fp8ctl.track.record import RunRecord


@dataclass(frozen=True)
class TrainingData:
    """What the manifests behind a model say."""

    checked: tuple[str, ...] = ()
    """Data sets whose manifests were read."""
    unknown: tuple[str, ...] = ()
    """What could not be checked, and why."""
    chat_template: str | None = None
    """Template of the newest fine-tuning data; None: the tokenizer's own."""
    default_system: str = "keep"
    """`default_system` of the newest fine-tuning data."""


def read_training_data(suite: SuiteConfig, run: Path | None) -> TrainingData:
    """Follows a run, and the runs whose weights it started from, to their data sets.

    Raises:
        ConfigError: the model was trained on generated questions of a family of this suite with the suite's own seed.
    """
    if run is None:
        return TrainingData(unknown=("not a run of fp8ctl: nothing says what the model was trained on",))
    runs, unknown = _lineage(run)
    checked, template, default_system, is_tuned = [], None, "keep", False
    for ancestor in runs:
        data = _setting(ancestor, "data")
        try:
            if data is None:
                raise DataError("its config.yaml names no data set")
            manifest = Manifest.read(data)
        except DataError as error:
            unknown.append(f"{ancestor}: {error.message}")
            continue
        for source in manifest.prepared.get("sources") or ():
            _refuse_same_seed(suite, source, data)
        if manifest.kind == "sft" and not is_tuned:
            template, is_tuned = manifest.prepared.get("chat_template"), True
            default_system = manifest.prepared.get("default_system", "keep")
        checked.append(data)
    return TrainingData(tuple(checked), tuple(unknown), template, default_system)


def _lineage(run: Path) -> tuple[list[Path], list[str]]:
    """The run, the run whose weights it started from, and so on; and where the line is broken."""
    found: list[Path] = []
    current: Path | None = run.resolve()
    while current is not None and current not in found:
        found.append(current)
        start = _setting(current, "model")
        if start is None:  # random weights
            break
        try:
            current = find_target(start).run
        except ModelError as error:
            return found, [f"{current} started from weights that can't be found: {error.message}"]
    return found, []


def _setting(run: Path, group: str) -> str | None:
    """`<group>.path` of a run's settings."""
    if not RunPaths(run).config.is_file():
        return None
    config: dict[str, Any] = RunRecord(run).config()
    return (config.get(group) or {}).get("path")


def _refuse_same_seed(suite: SuiteConfig, source: dict[str, Any], data: str) -> None:
    if source.get("kind") != "reasoning_gym" or source.get("seed") != suite.seed:
        return
    # a source without families has all of them
    shared = [f for f in suite.families if not source.get("families") or f in source["families"]]
    if shared:
        raise ConfigError(
            f"the model was trained on questions of seed {suite.seed} ({', '.join(shared[:3])}; data set {data})",
            "set suite.seed to another number",
        )
