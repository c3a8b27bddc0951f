"""What `fp8ctl monitor show` draws of a run folder: running, finished, crashed or BF16, with whatever is there."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fp8ctl.monitor.health import ROLES, SQNR_DB, UNDERFLOW_SHARE, HeatMap, Level, heat_map, worst
from fp8ctl.monitor.layer_table import LayerRow, read_layers
from fp8ctl.monitor.policy import RULES
from fp8ctl.monitor.sparkline import Sparkline
from fp8ctl.track.record import RunRecord

_SYMBOLS = {Level.GOOD: ".", Level.FAIR: "-", Level.POOR: "+", Level.BAD: "#", Level.BROKEN: "!"}
_STYLES = {
    Level.GOOD: "green",
    Level.FAIR: "yellow",
    Level.POOR: "dark_orange",
    Level.BAD: "red",
    Level.BROKEN: "bold red",
}
_STATE_STYLES = {"finished": "green", "running": "cyan", "failed": "bold red", "preempted": "yellow"}
_NUM_EVENTS = 12
_NUM_WORST = 5


def render(record: RunRecord, console: Console) -> None:
    """Prints the picture of a run; legible without colour, at any width, and in a file."""
    console.print(view(record), highlight=False)


def view(record: RunRecord) -> RenderableType:
    """The whole picture as one renderable.

    Raises:
        DataError: a line in the middle of metrics.jsonl or events.jsonl is damaged.
    """
    steps, events, config = record.steps(), record.events(), _or_empty(record.config)
    return Group(
        _header(record, config, steps, events),
        *_curves(steps),
        *_layers(record, config, steps),
        *_events(events),
    )


# ------------------------------------------------------------ header


def _header(
    record: RunRecord, config: dict[str, Any], steps: list[dict[str, Any]], events: list[dict[str, Any]]
) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("run", _plain(record.name))
    grid.add_row("state", _state(record, config, steps))
    grid.add_row("precision", _plain_lines(_precision(record, steps)))
    policy = config.get("monitor", {}).get("policy", "unknown policy")
    grid.add_row("monitor", _plain(f"{policy}; {_judged(events)}"))
    return grid


def _state(record: RunRecord, config: dict[str, Any], steps: list[dict[str, Any]]) -> Text:
    status = _or_empty(lambda: record.json(record.paths.status))
    state = str(status.get("state", "unknown: no status.json that can be read"))
    step = steps[-1]["step"] if steps else 0
    goal = config.get("loop", {}).get("num_steps")
    text = Text(state, style=_STATE_STYLES.get(state, ""))
    text.append(f", step {step:,}" + (f" of {goal:,}" if goal else ""), style="default")
    if steps and "time" in steps[-1]:
        text.append(f", last step {_ago(steps[-1]['time'])}", style="default")
    if state == "running" and _is_gone(record, status):
        text.append("\nits process is not there any more: it crashed, or was killed", style="bold red")
    for name in ("cause", "hint"):
        if status.get(name):
            text.append(f"\n{name}: ", style="bold").append(_clean(status[name]), style="default")
    return text


def _is_gone(record: RunRecord, status: dict[str, Any]) -> bool:
    """Whether the run's process is known to be dead: that can be told only on the machine it ran on."""
    env = _or_empty(lambda: record.json(record.paths.env))
    if env.get("hostname") != platform.node() or not isinstance(status.get("pid"), int):
        return False
    try:
        os.kill(status["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # somebody else's process
    return False


def _precision(record: RunRecord, steps: list[dict[str, Any]]) -> list[str]:
    plan = _or_empty(lambda: record.json(record.paths.plan))
    done = _or_empty(lambda: record.json(record.paths.coverage))
    lines = [f"plan: {plan['summary']}" if "summary" in plan else "no plan.json"]
    share = done.get("fp8_share", {})
    if share.get("total") is not None:
        by_direction = ", ".join(f"{d} {_percent(v)}" for d, v in share.items() if d != "total" and v is not None)
        ran = f"{done['fp8_linears']} of {done['num_linears']} linears"
        lines.append(f"ran in FP8: {ran}, {_percent(share['total'])} of the GEMM FLOPs ({by_direction})")
    elif steps and "fp8_flops_share" in steps[-1]:
        lines.append(f"ran in FP8: {_percent(steps[-1]['fp8_flops_share'])} of the linear GEMM FLOPs of the last step")
    return lines


def _judged(events: list[dict[str, Any]]) -> str:
    rules = [e["rule"] for e in events if e["kind"] == "monitor" and e.get("rule")]
    if not rules:
        return "no step was judged bad"
    by_rule = [f"{rules.count(rule)} x {rule} ({RULES.get(rule, 'unknown rule')})" for rule in sorted(set(rules))]
    return f"{len(rules)} step{'s were' if len(rules) > 1 else ' was'} judged bad: " + ", ".join(by_rule)


# ------------------------------------------------------------ curves


def _curves(steps: list[dict[str, Any]]) -> list[RenderableType]:
    if not steps:
        return [Rule("loss and gradient norm", align="left"), Text("no steps yet: metrics.jsonl is absent or empty")]
    parts: list[RenderableType] = []
    for key, title, is_log in (("loss", "loss", False), ("grad_norm", "gradient norm (log)", True)):
        points = [(s["step"], float(s[key])) for s in steps if key in s]
        if points:
            parts += [Rule(title, align="left"), Sparkline([v for _, v in points], is_log), _plain(_extremes(points))]
    validated = [s for s in steps if s.get("validation_loss") is not None]
    if validated:
        last = validated[-1]
        parts.append(_plain(f"validation loss {last['validation_loss']:.4f} at step {last['step']:,}"))
    return parts


def _extremes(points: Sequence[tuple[int, float]]) -> str:
    finite = [(value, step) for step, value in points if math.isfinite(value)]
    text = f"now {points[-1][1]:.4g}, first {points[0][1]:.4g}"
    if finite:
        (low, low_at), (high, high_at) = min(finite), max(finite)
        text += f", lowest {low:.4g} (step {low_at:,}), highest {high:.4g} (step {high_at:,})"
    lost = len(points) - len(finite)
    return text + (f", not finite {lost:,} times" if lost else "")


# ------------------------------------------------------------ layers


def _layers(record: RunRecord, config: dict[str, Any], steps: list[dict[str, Any]]) -> list[RenderableType]:
    table = read_layers(record.paths.layers)
    title = "quantisation by layer"
    if not table.num_rows:
        return [Rule(title, align="left"), _plain(_why_no_layers(config, steps))]
    last = table["step"].to_pylist()[-1]
    rows = [LayerRow(**row) for row in table.slice(table["step"].index(last).as_py()).to_pylist()]
    heat = heat_map(rows)
    return [Rule(f"{title}, step {last:,}", align="left"), _HeatPicture(heat), _legend(heat), _worst_table(rows)]


def _why_no_layers(config: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    monitor = config.get("monitor", {})
    every = monitor.get("layer_stats_every_steps")
    if monitor.get("policy") == "off":
        return "no layers.parquet: monitor.policy is off"
    if every and not steps:
        return "no layers.parquet yet: the first statistics come with the first step"
    return "no layers.parquet: no statistics were written"


@dataclass(frozen=True)
class _HeatPicture:
    """The heat map as tables one below the other, as many as the width asks for: a cut-off cell would mislead."""

    heat: HeatMap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        label_width = max(len("block"), *map(len, self.heat.blocks)) + 1
        widths = {kind: max(len(kind), len(ROLES) + 1) + 2 for kind in self.heat.kinds}
        kinds: list[str] = []
        used = label_width
        for kind in self.heat.kinds:
            if kinds and used + widths[kind] > options.max_width:
                yield _heat_table(self.heat, kinds)
                kinds, used = [], label_width
            kinds.append(kind)
            used += widths[kind]
        yield _heat_table(self.heat, kinds)


def _heat_table(heat: HeatMap, kinds: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("block", justify="right", no_wrap=True)
    for kind in kinds:
        table.add_column(_clean(kind), no_wrap=True)
    is_mixed = 0 < len(heat.bf16) < len(heat.cells)
    for block in heat.blocks:
        cells = []
        for kind in kinds:
            levels = heat.cells.get((block, kind), {})
            signs = [(_SYMBOLS[levels[r]], _STYLES[levels[r]]) if r in levels else (" ", "") for r in ROLES]
            mark = "b" if is_mixed and (block, kind) in heat.bf16 else ""
            cells.append(Text.assemble(*signs, mark))
        table.add_row(block, *cells)
    return table


def _legend(heat: HeatMap) -> Text:
    text = Text("each group of three: input, weight, output gradient\n")
    said = {Level.GOOD: "good"}
    for lvl in (Level.FAIR, Level.POOR, Level.BAD):
        said[lvl] = (
            f"{lvl.name.lower()} (SQNR < {SQNR_DB[lvl]:.0f} dB or underflow >= {_percent(UNDERFLOW_SHARE[lvl], 0)})"
        )
    said[Level.BROKEN] = "not finite"
    for lvl, words in said.items():
        text.append(_SYMBOLS[lvl], style=_STYLES[lvl]).append(f" {words}" + ("; " if lvl != Level.BROKEN else "\n"))
    if heat.bf16:
        which = "b runs" if len(heat.bf16) < len(heat.cells) else "all run"
        text.append(f"{which} in BF16: the symbols say what FP8 would do\n")
    text.rstrip()
    return text


def _worst_table(rows: Sequence[LayerRow]) -> Table:
    table = Table(
        box=None, padding=(0, 1), pad_edge=False, header_style="bold", title="worst tensors", title_justify="left"
    )
    table.add_column("linear", overflow="fold")
    for name in ("role", "runs in", "SQNR dB", "underflow", "amax"):
        table.add_column(
            name, justify="left" if name in ("role", "runs in") else "right", no_wrap=True, min_width=len(name)
        )
    for row in worst(rows, _NUM_WORST):
        numbers = (f"{row.sqnr_db:.1f}", _percent(row.underflow_share, 2), f"{row.amax:.3g}")
        table.add_row(_clean(row.fqn), _clean(row.role), _clean(row.precision), *numbers)
    return table


# ------------------------------------------------------------ events


def _events(events: list[dict[str, Any]]) -> list[RenderableType]:
    rows = _grouped(events)
    title = f"events, the last {_NUM_EVENTS} of {len(rows)}" if len(rows) > _NUM_EVENTS else "events"
    if not rows:
        return [Rule(title, align="left"), Text("none: events.jsonl is absent or empty")]
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("time", no_wrap=True)
    table.add_column("what", overflow="fold")
    for first, last in rows[-_NUM_EVENTS:]:
        span = f"{first['step']}" if first is last else f"{first['step']}-{last['step']}"
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(first["time"]))
        table.add_row(span, when, _event_text(first))
    return [Rule(title, align="left"), table]


def _grouped(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(first, last) of runs of steps that one rule judged, so that a long incident is one line; others by themselves."""
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
    incident = -1  # where the last judged steps stand; checkpoints may lie between
    for event in events:
        is_judged = event["kind"] == "monitor"
        if is_judged and incident >= 0:
            first, last = groups[incident]
            if event.get("rule") == last.get("rule") and event["step"] == last["step"] + 1:
                groups[incident] = (first, event)
                continue
        if is_judged:
            incident = len(groups)
        groups.append((event, event))
    return groups


def _event_text(event: dict[str, Any]) -> Text:
    if event["kind"] == "monitor":
        action, verdict = event.get("action"), event.get("verdict")
        did = f"would {verdict}" if action == "go" != verdict else str(action)
        units = f" [{', '.join(event['units'])}]" if event.get("units") else ""
        return Text(_clean(f"{event.get('rule')} {did}{units}: {event.get('reason')}"), style="yellow")
    details = ", ".join(f"{k} {v}" for k, v in event.items() if k not in ("time", "kind", "step"))
    return _plain(f"{event['kind']}: {details}" if details else str(event["kind"]))


# ------------------------------------------------------------ words


def _or_empty(read: Callable[[], Any]) -> dict[str, Any]:
    """What `read` gives, if it is there and a mapping: a crash leaves files absent or damaged."""
    try:
        value = read()
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _clean(value: Any) -> str:
    # Text from files must not move the cursor or set colours.
    return "".join(c if c.isprintable() else " " for c in str(value))


def _plain(text: str) -> Text:
    return Text(_clean(text))


def _plain_lines(lines: Sequence[str]) -> Text:
    return Text("\n".join(map(_clean, lines)))


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
