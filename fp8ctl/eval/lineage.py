"""What the evaluated model was trained on, as far as run folders and data manifests tell, against the seed of the suite.

Generated questions of training and evaluation never share a text (`data.reasoning_gym`); that a seed is not shared either makes
it plain in the records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8ctl.config.schema import SuiteConfig
from fp8ctl.data.manifest import Manifest
from fp8ctl.errors import ConfigError, DataError, Fp8ctlError
from fp8ctl.eval.target import find_target
from fp8ctl.paths import RunPaths
from fp8ctl.track.record import RunRecord


def check_training_data(suite: SuiteConfig, run: Path | None) -> dict[str, list[str]]:
    """Follows a run and the runs it started from to their data sets.

    Returns:
        `checked`: data sets whose manifests were read; `unknown`: what could not be checked, and why. Part of the result.

    Raises:
        ConfigError: the model was trained on generated questions of a family of this suite with the suite's own seed.
    """
    checked: list[str] = []
    unknown: list[str] = []
    if run is None:
        return {"checked": checked, "unknown": ["not a run of fp8ctl: nothing says what the model was trained on"]}
    for ancestor in _lineage(run):
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
        checked.append(data)
    return {"checked": checked, "unknown": unknown}


def _lineage(run: Path) -> list[Path]:
    """The run, the run whose weights it started from, and so on."""
    found: list[Path] = []
    current: Path | None = run.resolve()
    while current is not None and current not in found:
        found.append(current)
        try:
            current = find_target(_setting(current, "model")).run
        except Fp8ctlError:  # random weights, or a folder that is gone: the line ends here
            current = None
    return found


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
