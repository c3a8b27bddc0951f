"""fp8ctl data dedup and decontaminate: what to leave out of a preparation."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from fp8ctl.cli.console import say, stdout
from fp8ctl.cli.options import AsJson
from fp8ctl.cli.progress import progress
from fp8ctl.cli.source_words import with_sources
from fp8ctl.cli.terminal import shown

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILES | OVERRIDES]...", help="Input files, and SETTING=VALUE.", show_default=False),
]
_FILES_SHOWN = 20


def dedup(words: Words = None, as_json: AsJson = False) -> None:
    """Rows that are there already: fp8ctl data dedup FILES out=FOLDER, then fp8ctl data prep exclude=[FOLDER].

    Exact by default; method=minhash finds near-duplicates too.
    """
    from fp8ctl.config.compose import compose
    from fp8ctl.data.dedup import dedup as run
    from fp8ctl.data.dedup import estimate

    config = compose("data_dedup", with_sources(words or []))
    expected = estimate(config)
    say(
        f"about {expected.documents:,} rows: {_size(expected.memory_bytes)} of memory, and {_size(expected.scratch_bytes)} "
        f"of scratch files in {config.out}"
    )
    with progress("MiB read") as tell:
        report = run(config, lambda done, total, rows: tell(done >> 20, (total >> 20) or None, f"{rows:,} rows"))
    if as_json:
        print(json.dumps(report, indent=2))
        return
    out = stdout()
    out.print(
        f"{report['documents']:,} rows with text, {report['duplicates']:,} duplicates, {report['near_duplicates']:,} "
        f"near-duplicates: {report['excluded_share']:.2%} of the rows, {report['excluded_chars_share']:.2%} of the text",
        highlight=False,
    )
    _by_file(out, report["by_file"])
    for cluster in report["largest_clusters"]:
        out.print(
            f"{cluster['documents']:,} times, first in {cluster['file']} line {cluster['line']}: "
            + shown(cluster["example"]),
            highlight=False,
            markup=False,
        )
    _tell_rest(report, str(config.out))


def decontaminate(words: Words = None, as_json: AsJson = False) -> None:
    """Rows that hold items of eval sets: fp8ctl data decontaminate FILES against=[EVAL_FILES] out=FOLDER.

    Then fp8ctl data prep exclude=[FOLDER]; mode=tag only reports, mode=fail exits 1 when anything matched.
    """
    from fp8ctl.config.compose import compose
    from fp8ctl.data.decontaminate import decontaminate as run

    config = compose("data_decontaminate", with_sources(words or []))
    with progress("MiB read") as tell:
        report = run(config, lambda done, total, rows: tell(done >> 20, (total >> 20) or None, f"{rows:,} rows"))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show_matches(report)
    for warning in report["warnings"]:
        say(f"warning: {shown(warning)}")
    if config.mode == "drop":
        _tell_rest(report, str(config.out))
    if config.mode == "fail" and report["contaminated"]:
        raise typer.Exit(1)


def _show_matches(report: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    out = stdout()
    out.print(
        f"{report['contaminated']:,} of {report['documents']:,} rows hold eval items ({report['contaminated_share']:.2%})",
        highlight=False,
    )
    table = Table("eval set", "items", "too short", "found", "matches", box=None)
    for file, counts in report["by_eval_file"].items():
        table.add_row(Text(shown(file)), *(f"{counts[c]:,}" for c in ("items", "unprotected", "found", "matches")))
    out.print(table)
    for match in report["examples"]:
        item = f"{match['eval_file']} item {match['eval_item']}"
        how = f"{match['num_words']} words" if match["how"] == "words" else "nearly the same"
        line = f"{match['file']} line {match['line']}: {item}, {how}: {match['text']}"
        out.print(shown(line), highlight=False, markup=False, soft_wrap=True)
    if report["contaminated"] > len(report["examples"]):
        out.print("and more, see matches.jsonl in out=FOLDER", highlight=False)


def _by_file(out: Any, by_file: dict[str, dict[str, int]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("file", "rows", "excluded", "share", box=None)
    most_first = sorted(by_file.items(), key=lambda item: -item[1]["excluded"])
    for file, counts in most_first[:_FILES_SHOWN]:
        share = counts["excluded"] / max(counts["documents"], 1)
        table.add_row(Text(shown(file)), f"{counts['documents']:,}", f"{counts['excluded']:,}", f"{share:.1%}")
    out.print(table)
    if len(most_first) > _FILES_SHOWN:
        out.print(f"and {len(most_first) - _FILES_SHOWN:,} more files, see report.json", highlight=False)


def _tell_rest(report: dict[str, Any], out: str) -> None:
    for what, why in (("empty", "without text"), ("bad", "that could not be read")):
        if report[what]:
            say(f"warning: {report[what]:,} rows {why} were passed over")
    say(f"exclusion list written: {out} ({report['excluded']:,} rows); use it with `fp8ctl data prep exclude=[{out}]`")


def _size(num_bytes: int) -> str:
    return f"{max(num_bytes / 2**20, 1):,.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"
