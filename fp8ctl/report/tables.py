"""Tables about all runs: which they are, what they come to, why, and where they come from."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from fp8ctl.report import figures
from fp8ctl.report.document import Cell, Json, Table, Tone, figure, words
from fp8ctl.report.figures import Kind

STAGE_NAMES = {
    "cpt": "Continual pre-training (CPT)",
    "sft": "Supervised fine-tuning (SFT)",
    "unknown": "Runs of unknown stage",
}

SHOWN_VERSIONS = ("python", "torch", "deepspeed", "triton", "transformer-engine", "transformers")
"""Versions shown; the record holds all."""

_TONES: dict[str, Tone] = {
    "parity": "good",
    "worse": "bad",
    "undecided": "warn",
    "does not pay": "warn",
    "ok": "good",
    "left out": "dim",
}


def tone_of(outcome: str) -> Tone:
    """Colour class of a verdict or of a rule's outcome."""
    return _TONES[outcome]


def runs_table(runs: list[Json]) -> Table:
    """Which letter is which run, and how it ended."""
    rows = []
    for run in runs:
        planned = f" of {figures.text(run['planned_steps'], 'count')}" if run["planned_steps"] else ""
        tokens = run["efficiency"]["tokens"] if run["efficiency"] else None
        state: Tone = (
            "good" if run["state"] == "finished" else "warn" if run["state"] in ("running", "unknown") else "bad"
        )
        rows.append(
            [
                words(run["label"]),
                words(run["precision"]),
                words(run["name"]),
                words(run["state"], state),
                Cell(f"{figures.text(run['num_steps'], 'count')}{planned}", value=run["num_steps"]),
                figure(tokens, "count"),
            ]
        )
    return Table("runs", "Runs", ["run", "precision", "folder", "state", "steps", "tokens"], rows, numbers=False)


def differences_table(comparison: Json) -> Table:
    """Everything that keeps two runs from being the same experiment."""
    b, c = comparison["baseline"], comparison["candidate"]
    rows = [
        [words(d["key"], "bad"), words(d["baseline"], "bad"), words(d["candidate"], "bad"), words(d["kind"])]
        for d in comparison["differences"]
    ]
    note = "These runs are not matched: what they differ in may explain any gap below."
    return Table(
        f"differences-{c}",
        f"{c} against {b}: not the same experiment",
        ["differs", b, c, "kind"],
        rows,
        note,
        numbers=False,
    )


def checks_table(comparison: Json) -> Table:
    """The rules behind one verdict."""
    b, c = comparison["baseline"], comparison["candidate"]
    rows = [
        [words(k["rule"]), words(k["outcome"], tone_of(k["outcome"])), words(k["text"])]
        for k in comparison["verdict"]["checks"]
    ]
    return Table(
        f"rules-{c}",
        f"Rules behind the verdict on {c} against {b}",
        ["rule", "outcome", "evidence"],
        rows,
        numbers=False,
    )


def events_table(runs: list[Json]) -> Table | None:
    """What the monitor decided, and what else happened."""
    rows = []
    for run in runs:
        for event in run["events"]["shown"]:
            rest = ", ".join(
                f"{k}={v}"
                for k, v in event.items()
                if k not in ("time", "kind", "step") and v not in (None, "", [], {})
            )
            rows.append([words(run["label"]), words(event.get("step")), words(event.get("kind")), words(rest)])
        if run["events"]["num_left_out"]:
            rows.append(
                [
                    words(run["label"]),
                    Cell(""),
                    words("earlier"),
                    words(f"{run['events']['num_left_out']} events not shown"),
                ]
            )
    return (
        Table("events", "Monitor and other events", ["run", "step", "kind", "what"], rows, numbers=False)
        if rows
        else None
    )


def glance_table(report: Json) -> Table | None:
    """What people ask first: how much faster, how much less memory, did quality suffer, how sure; two columns per comparison."""
    comparisons = [c for stage in report["stages"] for c in stage["comparisons"]]
    if not comparisons:
        return None
    runs = {run["label"]: run for run in report["runs"]}
    emulated = any(c["speed_is_emulated"] for c in comparisons)
    rows = [
        [words(name)]
        for name in ("step time, emulated" if emulated else "step time", "peak memory", "training loss gap")
    ]
    rows += [[words(name)] for name in ("validation loss gap", "accuracy difference (points)", "GEMM FLOPs in FP8")]
    columns = [""]
    for c in comparisons:
        who = f"{c['candidate']} / {c['baseline']}"
        columns += [who if c["matched"] else f"{who}, not matched", f"{who}, 95 % band"]
        ratios, gap = c["ratios"] or {}, c["gap"] or {}
        paired: Json = min(c["paired"], key=lambda p: p["difference"]["value"], default={})
        cells = [
            _with_band(ratios.get("step"), "ratio"),
            [figure(ratios.get("memory"), "ratio"), Cell("")],
            [words("not finite", "bad"), Cell("")]
            if _ends_not_finite(runs[c["candidate"]])
            else _with_band(gap.get("gap"), "gap"),
            [figure(gap.get("validation_gap"), "gap"), Cell("")],
            _with_band(paired.get("difference"), "points"),
            [figure((runs[c["candidate"]]["coverage"] or {}).get("total"), "share"), Cell("")],
        ]
        for row, pair in zip(rows, cells, strict=True):
            row += pair
    note = "Candidate against its baseline. Below 1x: less time, less memory. Above 0 %: higher loss."
    return Table("glance", "At a glance", columns, rows, note, group_size=2)


def _ends_not_finite(run: Json) -> bool:
    return run["loss"]["num_not_finite"] > 0 and run["loss"]["final"] is None


def _with_band(interval: Json | None, kind: Kind) -> list[Cell]:
    found = interval or {}
    return [figure(found.get("value"), kind), words(figures.between(found.get("low"), found.get("high"), kind))]


_NOT_EVERY_RUN = ("FP8 GEMMs", "attention", "torch.compile")
"""Facts that older runs and emulated ones have not; left out where no run tells them."""


def provenance_table(runs: list[Json]) -> Table:
    """What the runs ran on and with; a fact that all share stands once."""
    facts: dict[str, Callable[[Json], Any]] = {
        "model": lambda run: run["model"]["name"],
        "weights from": lambda run: run["model"]["path"],
        "data": lambda run: run["data"],
        "seed": lambda run: run["seed"],
        "device": lambda run: run["device"],
        "hardware": _hardware,
        "commit": _commit,
        "fp8ctl": lambda run: run["environment"].get("fp8ctl"),
        "versions": _versions,
        "FP8 backend": lambda run: _choice(run, "backend") or run["backend"],
        "FP8 GEMMs": lambda run: _choice(run, "backend", "gemm"),
        "attention": lambda run: _choice(run, "attention"),
        "torch.compile": lambda run: run["environment"].get("compile"),
        "run folder": lambda run: run["folder"],
        "command": command_of,
    }
    rows = []
    for name, tell in facts.items():
        told = [tell(run) for run in runs]
        if name in _NOT_EVERY_RUN and not any(told):
            continue
        if all(value == told[0] for value in told):
            rows.append([words(name), words("all" if len(runs) > 1 else runs[0]["label"]), words(told[0])])
        else:
            rows += [[words(name), words(run["label"]), words(value)] for run, value in zip(runs, told, strict=True)]
    return Table("provenance", "Hardware, versions, commands", ["", "run", ""], rows, numbers=False)


def command_of(run: Json) -> str | None:
    """The command line that made the run, as it can be typed again."""
    command = run["environment"].get("command")
    return shlex.join(map(str, command)) if isinstance(command, list) else command


def _hardware(run: Json) -> str:
    env = run["environment"]
    gpus = [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in env.get("gpus") or []]
    cpu = env.get("cpu") or {}
    parts = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    parts += [f"{cpu['model']}, {cpu.get('usable_cores') or cpu.get('cores')} cores"] if cpu.get("model") else []
    parts += [f"{env['memory_bytes'] / 2**30:.0f} GiB memory"] if env.get("memory_bytes") else []
    return "; ".join(parts)


def _commit(run: Json) -> str | None:
    git = run["environment"].get("git") or {}
    return f"{git['commit']}{' with changes' if git.get('is_dirty') else ''}" if git.get("commit") else None


def _versions(run: Json) -> str:
    env = run["environment"]
    named = {"python": env.get("python"), **(env.get("packages") or {})}
    return ", ".join(f"{name} {named[name]}" for name in SHOWN_VERSIONS if named.get(name))


def _choice(run: Json, what: str, name: str = "name") -> str | None:
    """What a run chose, and why."""
    chosen = run["environment"].get(what)
    if not isinstance(chosen, dict) or not chosen.get(name):
        return None
    reason = chosen.get("reason" if name == "name" else f"{name}_reason")
    return f"{chosen[name]}: {reason}" if reason else str(chosen[name])
