"""Shows a running job: a progress bar on a terminal, plain lines elsewhere. Reads what the run writes, talks to no rank."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fp8ctl.config.schema import TrainConfig
from fp8ctl.paths import RunPaths

_QUIET_S = 15.0


class TrainProgress:
    """Follows metrics.jsonl and events.jsonl of one run. Call it a few times a second."""

    def __init__(self, config: TrainConfig, paths: RunPaths, console: Console) -> None:
        self._every = config.loop.log_every_steps
        self._total = config.loop.num_steps
        self._name = config.name or paths.root.name
        self._console = console
        self._metrics = _Tail(paths.metrics)
        self._events = _Tail(paths.events)
        self._last_said_s = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(), TimeRemainingColumn(), console=console,
            )  # fmt: skip
            self._task = self._bar.add_task(f"{self._name}: starting", total=self._total, figures="")

    def __enter__(self) -> TrainProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def poll(self) -> None:
        """Shows what was written since the last call."""
        for event in self._events.new():
            if event["kind"] in ("checkpoint", "resumed", "monitor", "backend", "signal"):
                self._say(f"{self._name}: {_event_line(event)}")
        for line in self._metrics.new():
            figures = _figures(line)
            if self._bar:
                self._bar.update(self._task, completed=line["step"], description=self._name, figures=figures)
            elif line["step"] % self._every == 0 or line["step"] == self._total:
                self._say(f"{self._name}: step {line['step']}/{self._total}  {figures}")
        if not self._bar and time.monotonic() - self._last_said_s > _QUIET_S:
            self._say(f"{self._name}: working")

    def _say(self, text: str) -> None:
        self._last_said_s = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class _Tail:
    """New whole lines of a JSON-lines file; starts at its present end."""

    def __init__(self, path: Any) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        with open(self._path, "rb") as f:
            f.seek(self._offset)
            data = f.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return [json.loads(line) for line in data[:whole].splitlines() if line]


def _figures(line: dict[str, Any]) -> str:
    parts = [
        f"loss {_number(line['loss'], '.4f')}",
        f"grad norm {_number(line['grad_norm'], '.2f')}",
        f"lr {line['lr']:.1e}",
    ]
    if line.get("validation_loss") is not None:
        parts.insert(1, f"validation {_number(line['validation_loss'], '.4f')}")
    parts += [f"{line['step_time_s']:.2f} s", f"{line['tokens_per_second']:,.0f} tok/s"]
    if line["fp8_flops_share"]:
        parts.append(f"FP8 {line['fp8_flops_share']:.0%}")
    return "  ".join(parts)


def _number(value: Any, spec: str) -> str:
    return value if isinstance(value, str) else format(value, spec)  # "nan" and "inf" are strings in the record


def _event_line(event: dict[str, Any]) -> str:
    details = {k: v for k, v in event.items() if k not in ("time", "kind", "step") and not isinstance(v, (dict, list))}
    return f"{event['kind']} at step {event['step']}" + "".join(f", {k} {v}" for k, v in details.items())
