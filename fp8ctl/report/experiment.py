"""Are two runs the same experiment but for precision? Everything that differs is listed; one difference, and they don't match."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fp8ctl.paths import shown_path
from fp8ctl.report.load import Run

FREE = ("precision", "name", "run_dir", "track")
"""Settings that arms of one experiment may differ in."""

ENVIRONMENT = ("fp8ctl", "python", "packages", "cpu", "gpus", "variables")
"""Parts of env.json that can change a loss or a time."""

_UNIMPORTANT = re.compile(r"usable_cores|uuid|_VISIBLE_DEVICES|SLURM_|free|used|serial|bus")
"""Facts within them that differ between equal machines, or say which of equal devices was taken."""


@dataclass(frozen=True)
class Difference:
    """One thing that two runs don't share."""

    key: str
    baseline: str
    candidate: str
    kind: str
    """setting, environment or data."""


@dataclass(frozen=True)
class Match:
    """Outcome of the same-experiment check."""

    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Differences that are part of the experiment, in words."""

    @property
    def is_matched(self) -> bool:
        """Whether the two differ in precision only."""
        return not self.differences


def match(baseline: Run, candidate: Run) -> Match:
    """Compares settings, environment and, step by step, the token counts of the batches."""
    if not (baseline.config and candidate.config):
        there = ["there" if run.config else "missing" for run in (baseline, candidate)]
        return Match([Difference("config.yaml", there[0], there[1], "setting")])
    settings, notes = _settings(baseline.config, candidate.config)
    return Match(
        settings + _environment(baseline.env, candidate.env) + _data(baseline, candidate),
        notes + _commits(baseline, candidate),
    )


def _commits(baseline: Run, candidate: Run) -> list[str]:
    # The commit is that of the folder the run was started in, which may or may not hold the code that ran: a hint, no proof.
    commits = [str((run.env.get("git") or {}).get("commit"))[:12] for run in (baseline, candidate)]
    return (
        [f"the runs were started at two commits, so their code may differ: {' | '.join(commits)}"]
        if commits[0] != commits[1]
        else []
    )


def _settings(baseline: dict[str, Any], candidate: dict[str, Any]) -> tuple[list[Difference], list[str]]:
    found = [d for d in _compared(baseline, candidate, "setting") if d.key.split(".")[0] not in FREE]
    notes, rest = [], []
    for d in found:
        if d.key == "model.path" and _continue_matched_runs(Path(d.baseline), Path(d.candidate)):
            notes.append(
                f"each arm continues its own run of the stage before: {shown_path(d.baseline)} | {shown_path(d.candidate)}"
            )
        elif d.key == "data.path" and _are_equal_data(Path(d.baseline), Path(d.candidate)):
            notes.append(
                f"the data lie in two places and have one fingerprint: {shown_path(d.baseline)} | {shown_path(d.candidate)}"
            )
        else:
            rest.append(d)
    return rest, notes


def _continue_matched_runs(baseline: Path, candidate: Path) -> bool:
    """Whether two weight folders are the same checkpoint of two runs that differ in precision only."""
    parents = [_run_folder(path) for path in (baseline, candidate)]
    if (
        parents[0] is None
        or parents[1] is None
        or baseline.relative_to(parents[0]) != candidate.relative_to(parents[1])
    ):
        return False
    configs = [yaml.safe_load((parent / "config.yaml").read_text()) or {} for parent in parents if parent]
    return not _settings(*configs)[0]


def _are_equal_data(*folders: Path) -> bool:
    """Whether two data sets hold the same tokens in the same order, by the fingerprints of their manifests."""
    try:
        fingerprints = [json.loads((folder / "manifest.json").read_text())["fingerprint"] for folder in folders]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return fingerprints[0] == fingerprints[1]


def _run_folder(path: Path) -> Path | None:
    for folder in (path, *path.parents):
        if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file():
            return folder
    return None


def _environment(baseline: dict[str, Any], candidate: dict[str, Any]) -> list[Difference]:
    shared = [key for key in ENVIRONMENT if key in baseline and key in candidate]
    ours, theirs = ({key: env[key] for key in shared} for env in (baseline, candidate))
    found = _compared(ours, theirs, "environment")
    return [d for d in found if not _UNIMPORTANT.search(d.key)]


def _data(baseline: Run, candidate: Run) -> list[Difference]:
    """Batches with other token counts are other batches: pairing their losses would compare different texts."""
    _, at_b, at_c = np.intersect1d(baseline.steps, candidate.steps, return_indices=True)
    for metric in ("trainable_tokens", "tokens"):
        b, c = baseline.values(metric)[at_b], candidate.values(metric)[at_c]
        unequal = np.flatnonzero(np.isfinite(b) & np.isfinite(c) & (b != c))
        if len(unequal):
            first = unequal[0]
            step = baseline.steps[at_b][first]
            return [Difference(f"{metric} of step {step}", f"{b[first]:.0f}", f"{c[first]:.0f}", "data")]
    return []


def _compared(baseline: dict[str, Any], candidate: dict[str, Any], kind: str) -> list[Difference]:
    flat = [_flatten(tree) for tree in (baseline, candidate)]
    keys = dict.fromkeys((*flat[0], *flat[1]))
    sides = ((key, flat[0].get(key), flat[1].get(key)) for key in keys)
    return [Difference(key, _shown(b), _shown(c), kind) for key, b, c in sides if b != c]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)
