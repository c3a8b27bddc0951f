"""Puts the report together: sections and blocks, verdict first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fp8ctl.report import figures, stage_tables, tables
from fp8ctl.report.build import ALONE
from fp8ctl.report.document import Block, Chart, Headline, Json, Line, Section, Sentence
from fp8ctl.report.loss import MARGIN
from fp8ctl.report.tables import STAGE_NAMES, tone_of
from fp8ctl.report.verdict import EMULATED, EVERY


def sections(report: Json) -> list[Section]:
    """The whole report as blocks, in reading order."""
    run = run_of(report)
    parts = [_summary(report, run)]
    for stage in report["stages"]:
        parts.append(_stage([run(label) for label in stage["runs"]], stage["comparisons"]))
    rules = [tables.checks_table(c) for c in comparisons_of(report)]
    if rules:
        parts.append(Section("How the verdict was reached", list(rules)))
    events = tables.events_table(report["runs"])
    parts.append(
        Section("Where it comes from", [*([events] if events else []), tables.provenance_table(report["runs"])])
    )
    return parts


def run_of(report: Json) -> Callable[[str], Json]:
    """Looks runs up by their letter."""
    by_label = {run["label"]: run for run in report["runs"]}
    return lambda label: by_label[label]


def comparisons_of(report: Json) -> list[Json]:
    """All comparisons of all stages."""
    return [comparison for stage in report["stages"] for comparison in stage["comparisons"]]


def headlines(report: Json) -> list[Headline]:
    """The verdicts in words, one per comparison."""
    if report["verdict"]["rule"] == ALONE:
        return [Headline("figures only", "dim", "one run, nothing to compare with", [])]
    run, found = run_of(report), []
    for stage in report["stages"]:
        for c in stage["comparisons"]:
            verdict, who = c["verdict"], f"{run(c['candidate'])['title']} against {run(c['baseline'])['title']}"
            which = f"{stage['stage'].upper()}: " if len(report["stages"]) > 1 else ""
            rule = verdict["rule"] if verdict["rule"] == EVERY else f"the rule that decided: {verdict['rule']}"
            reasons = [_sentence(reason) for reason in verdict["reasons"]]
            found.append(Headline(verdict["verdict"], tone_of(verdict["verdict"]), f"{which}{who}; {rule}", reasons))
    return found


def _summary(report: Json, run: Callable[[str], Json]) -> Section:
    blocks: list[Block] = list(headlines(report))
    blocks += [Sentence(note, "warn" if note.startswith(EMULATED) else "dim") for note in report["notes"]]
    glance = tables.glance_table(report)
    blocks += [*([glance] if glance else []), tables.runs_table(report["runs"])]
    for r in report["runs"]:
        if r["cause"]:
            hint = f" Hint: {r['hint']}." if r["hint"] else ""
            blocks.append(
                Sentence(
                    f"{r['title']}: {r['state']}, {r['cause']}.{hint}", "bad" if r["state"] == "failed" else "warn"
                )
            )
        if r["num_repeated"]:
            blocks.append(
                Sentence(f"{r['title']}: resumed; of {r['num_repeated']} steps logged twice the last counts.", "dim")
            )
        blocks += [Sentence(f"{r['title']}: {problem}.", "warn") for problem in r["problems"]]
    return Section("Verdict", blocks)


def _stage(runs: list[Json], comparisons: list[Json]) -> Section:
    optional = [
        *(tables.differences_table(c) for c in comparisons if c["differences"]),
        stage_tables.efficiency_table(runs, comparisons),
        loss_chart(runs),
        gap_chart(runs, comparisons),
        stage_tables.loss_table(runs),
        stage_tables.gap_table(comparisons),
        stage_tables.coverage_table(runs),
        stage_tables.accuracy_table(runs),
        stage_tables.paired_table(runs, comparisons),
        stage_tables.families_table(runs),
    ]
    blocks: list[Block] = [Sentence(_sentence(note), "dim") for c in comparisons for note in c["notes"]]
    return Section(
        STAGE_NAMES.get(runs[0]["stage"], str(runs[0]["stage"])),
        blocks + [block for block in optional if block is not None],
    )


def loss_chart(runs: list[Json]) -> Chart | None:
    """Training loss over steps, a curve per run."""
    lines = [Line(r["label"], r["title"], r["curve"]["step"], r["curve"]["value"]) for r in runs if r["curve"]["step"]]
    if not lines:
        return None
    told = [
        f"{r['title']} goes from {_loss(r['loss']['first'])} to {_loss(r['loss']['final'])}"
        for r in runs
        if r["curve"]["step"]
    ]
    description = f"Training loss in nats per token over steps. {'; '.join(told)} (mean of the last 10 %)."
    return Chart(f"loss-{runs[0]['stage']}", "Training loss", description, "loss", "loss", lines)


def gap_chart(runs: list[Json], comparisons: list[Json]) -> Chart | None:
    """Relative loss gap to the baseline over steps, with its band when there is one candidate."""
    found = [c for c in comparisons if c["gap"]]
    if not found:
        return None
    titles = {r["label"]: r["title"] for r in runs}
    lines = [
        Line(c["candidate"], titles[c["candidate"]], c["gap"]["windows"]["step"], c["gap"]["windows"]["value"])
        for c in found
    ]
    told = [f"{titles[c['candidate']]} ends at {figures.text(c['gap']['gap']['value'], 'gap')}" for c in found]
    base = titles[found[0]["baseline"]]
    windows = " and ".join(dict.fromkeys(str(c["gap"]["num_steps"]) for c in found))
    description = f"Relative difference of the training loss to {base} over sliding windows of {windows} steps. {'; '.join(told)}."
    band = faint = None
    if len(found) == 1:
        gap = found[0]["gap"]
        if gap["windows_low"][0] is not None:
            band = (gap["windows"]["step"], gap["windows_low"], gap["windows_high"])
        faint = Line("", "single steps", gap["per_step"]["step"], gap["per_step"]["value"])
    return Chart(
        key=f"gap-{runs[0]['stage']}",
        title=f"Loss gap to {base}",
        description=description,
        y_label="gap",
        y_kind="gap",
        lines=lines,
        faint=[faint] if faint else [],
        band=band,
        levels=[(MARGIN, f"+{figures.margin(MARGIN)}"), (0.0, "0"), (-MARGIN, f"-{figures.margin(MARGIN)}")],
        y_limits=_gap_limits(lines, band),
    )


def _gap_limits(lines: list[Line], band: tuple[list[float], list[float], list[float]] | None) -> tuple[float, float]:
    # The margin must stay visible as a distance: single wild steps and the widest bands are cut at the edge instead.
    values = np.concatenate([line.y for line in lines])
    low, high = min(-1.6 * MARGIN, 1.15 * float(values.min())), max(1.6 * MARGIN, 1.15 * float(values.max()))
    if band:
        low, high = min(low, float(np.quantile(band[1], 0.1))), max(high, float(np.quantile(band[2], 0.9)))
    return low, high


def _loss(value: float | None) -> str:
    return figures.text(value, "loss") if value is not None else "no finite value"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
