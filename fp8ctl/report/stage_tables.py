"""Tables of one stage: time and memory, loss, FP8 coverage, accuracy."""

from __future__ import annotations

from fp8ctl.report import figures
from fp8ctl.report.document import Cell, Json, Table, Tone, figure, words
from fp8ctl.report.figures import Kind
from fp8ctl.report.verdict import EMULATED


def efficiency_table(runs: list[Json], comparisons: list[Json]) -> Table | None:
    """Time and memory: a row per figure, a column per run and, beside each candidate, its ratio to the baseline."""
    if not any(run["efficiency"] for run in runs):
        return None
    ratios = {c["candidate"]: c["ratios"] or {} for c in comparisons}
    columns = [""]
    for run in runs:
        columns += [run["title"]] + ([f"{run['label']} / {runs[0]['label']}"] if run["label"] in ratios else [])
    rows = [_efficiency_row(runs, ratios, *row) for row in _EFFICIENCY]
    return Table("efficiency", "Time and memory", columns, rows, _efficiency_note(runs))


_EFFICIENCY: tuple[tuple[str, str, str, Kind], ...] = (
    ("step, median", "step_median_s", "step", "seconds"),
    ("step, 95th percentile", "step_p95_s", "step_p95", "seconds"),
    ("forward", "forward_s", "forward", "seconds"),
    ("backward", "backward_s", "backward", "seconds"),
    ("optimizer", "optimizer_s", "optimizer", "seconds"),
    ("data wait", "data_wait_s", "data_wait", "seconds"),
    ("tokens per second", "tokens_per_second", "tokens_per_second", "rate"),
    ("peak memory", "memory_peak_bytes", "memory", "bytes"),
)


_QUICK_S = 0.1


def _efficiency_row(
    runs: list[Json], ratios: dict[str, Json], name: str, key: str, ratio: str, kind: Kind
) -> list[Cell]:
    values = [(run["efficiency"] or {}).get(key) for run in runs]
    steps = [run["efficiency"]["step_median_s"] for run in runs if run["efficiency"]]
    # Milliseconds for all times of quick steps, and for what takes little of slow ones.
    if kind == "seconds" and (
        max(steps) < _QUICK_S or max((v for v in values if v is not None), default=1.0) < _QUICK_S
    ):
        kind = "milliseconds"
    row = [words(f"{name} ({figures.UNITS[kind]})" if kind != "rate" else name)]
    for run, value in zip(runs, values, strict=True):
        row.append(figure(value, kind))
        if run["label"] in ratios:
            found = ratios[run["label"]].get(ratio)
            row.append(figure(found["value"] if isinstance(found, dict) else found, "ratio"))
    return row


_MEMORY = {"cpu": "resident set of the largest process", "cuda": "allocated on the fullest GPU"}


def _efficiency_note(runs: list[Json]) -> str:
    counted = {
        run["label"]: f"{figures.text(e['num_steps'], 'count')} steps counted, {e['num_warmup']} of warm-up left out"
        for run in runs
        if (e := run["efficiency"])
    }
    told = "; ".join(f"{label}: {text}" for label, text in counted.items())
    if len(set(counted.values())) == 1 < len(counted):
        told = f"{', '.join(counted)}: {next(iter(counted.values()))}"
    memory = _MEMORY.get(runs[0]["device"], "largest of any rank")
    emulated = f"{EMULATED}. " if any(run["is_emulated"] and run["precision"].startswith("FP8") for run in runs) else ""
    return f"{emulated}{told}. Phases are medians. Peak memory: {memory}."


def loss_table(runs: list[Json]) -> Table:
    """Loss of each run by itself."""
    rows = []
    for run in runs:
        loss = run["loss"]
        steps = f"{loss['final_steps'][0]} to {loss['final_steps'][1]}" if loss["final_steps"] else None
        bad = loss["num_not_finite"]
        rows.append(
            [
                words(run["title"]),
                figure(loss["first"], "loss"),
                figure(loss["final"], "loss"),
                words(steps),
                figure(loss["validation"], "loss"),
                figure(loss["grad_norm"], "number"),
                Cell(f"{bad} (from step {loss['first_not_finite']})" if bad else "0", "bad" if bad else "", bad),
            ]
        )
    columns = ["run", "first step", "last 10 %", "its steps", "validation", "grad norm, median", "steps not finite"]
    return Table("loss", "Loss (nats per token)", columns, rows)


def gap_table(comparisons: list[Json]) -> Table | None:
    """Relative loss gaps with their bands."""
    rows = []
    for comparison in comparisons:
        gap = comparison["gap"]
        if gap is None:
            continue
        who = _who(comparison)
        steps = f"steps {gap['steps'][0]} to {gap['steps'][1]}"
        values = [gap["baseline"], gap["candidate"]]
        band = figures.between(gap["gap"]["low"], gap["gap"]["high"], "gap")
        rows.append(
            [
                words(f"{who}, training, {steps}"),
                *(figure(v, "loss") for v in values),
                figure(gap["gap"]["value"], "gap"),
                words(band),
            ]
        )
        worst = f"steps {gap['worst_steps'][0]} to {gap['worst_steps'][1]}"
        rows.append([words(f"{who}, worst window, {worst}"), Cell(""), Cell(""), figure(gap["worst"], "gap"), Cell("")])
        if gap["validation_gap"] is not None:
            values = [gap["validation_baseline"], gap["validation_candidate"]]
            name = f"{who}, validation, step {gap['validation_step']}"
            rows.append(
                [words(name), *(figure(v, "loss") for v in values), figure(gap["validation_gap"], "gap"), Cell("")]
            )
    note = (
        "Gap = (candidate - baseline) / baseline, paired step by step: both saw the same batch. Band: 95 % interval of the mean "
        "paired difference, from means of contiguous batches of steps, so that neighbouring steps don't count twice. "
        "0.25 % is the relative loss error that DeepSeek-V3 reports as its bound for FP8."
    )
    return Table("gap", "Loss gap", ["", "baseline", "candidate", "gap", "95 % band"], rows, note) if rows else None


def _who(comparison: Json) -> str:
    return (
        f"{comparison['candidate']} against {comparison['baseline']}{'' if comparison['matched'] else ' (not matched)'}"
    )


def coverage_table(runs: list[Json]) -> Table | None:
    """What ran in FP8."""
    rows = []
    for run in runs:
        covered = run["coverage"]
        if covered is None:
            continue
        linears = (
            f"{covered['fp8_linears']} of {covered['num_linears']}" if covered["num_linears"] is not None else None
        )
        partly = f", {covered['mixed_linears']} for a part of the run" if covered["mixed_linears"] else ""
        rows.append(
            [words(run["title"]), words(f"{linears}{partly}" if linears else None)]
            + [figure(covered["shares"][direction], "share") for direction in ("fprop", "dgrad", "wgrad")]
            + [figure(covered["total"], "share"), words(covered["source"])]
        )
    note = "Share of the FLOPs of executed linear GEMMs, head and recomputation included; counted at the call, not read from settings."
    columns = ["run", "linears in FP8", "fprop", "dgrad", "wgrad", "all", "counted in"]
    return Table("coverage", "FP8 coverage", columns, rows, note) if rows else None


def accuracy_table(runs: list[Json]) -> Table | None:
    """Accuracy of every evaluation of every run."""
    rows = []
    for run in runs:
        for found in run["accuracy"]:
            total = found["total"] or {}
            rows.append(
                [
                    words(f"{run['title']}, {found['suite']}, {found['precision']} inference"),
                    _score(total),
                    words(figures.between(total.get("low"), total.get("high"), "share")),
                    figure(total.get("num_questions"), "count"),
                    figure(total.get("num_answers"), "count"),
                    figure(total.get("truncated_share"), "share"),
                    figure(total.get("no_answer_share"), "share"),
                    figure(total.get("mean_answer_tokens"), "count"),
                ]
            )
    note = "+- one standard error over questions; the 95 % interval is Wilson's. Cut off: the token budget ended the answer."
    columns = ["run", "accuracy", "95 % interval", "questions", "answers", "cut off", "no answer", "tokens"]
    return Table("accuracy", "Accuracy", columns, rows, note) if rows else None


def _score(score: Json) -> Cell:
    accuracy = score.get("accuracy")
    return Cell(figures.plus_minus(accuracy, score.get("se"), "share"), "" if accuracy is not None else "dim", accuracy)


def paired_table(runs: list[Json], comparisons: list[Json]) -> Table | None:
    """Paired differences in accuracy: between arms, and between inference precisions of one run."""
    found = [(_who(c), p) for c in comparisons for p in c["paired"]]
    found += [(run["label"], p) for run in runs for p in run["inference"]]
    rows = []
    for who, p in found:
        d = p["difference"]
        surely: Tone = "bad" if d["high"] is not None and d["high"] < 0 else ""
        rows.append(
            [
                words(f"{who}, {p['suite']}, {p['precision']} inference"),
                figure(p["baseline"], "share"),
                figure(p["candidate"], "share"),
                figure(d["value"], "points", surely),
                words(figures.between(d["low"], d["high"], "points"), surely),
                Cell(figures.text(p["num_questions"], "count") + (f" ({p['note']})" if p["note"] else "")),
            ]
        )
    note = (
        "Points of accuracy, candidate minus baseline, question by question. An interval that holds 0 shows no difference; "
        "it doesn't prove there is none."
    )
    columns = ["", "baseline", "candidate", "difference", "95 % interval", "questions"]
    return Table("paired", "Accuracy, paired by question", columns, rows, note) if rows else None


def families_table(runs: list[Json]) -> Table | None:
    """Accuracy per question family, a column per evaluation."""
    found = [(run, a) for run in runs for a in run["accuracy"] if a["families"]]
    names = list(dict.fromkeys(family for _, a in found for family in a["families"]))
    rows = []
    for family in names:
        rows.append([words(family), *(_score(a["families"].get(family) or {}) for _, a in found)])
    columns = ["family", *(f"{run['label']}, {a['suite']}, {a['precision']} inference" for run, a in found)]
    return Table("families", "Accuracy per family", columns, rows, is_detail=True) if rows else None
