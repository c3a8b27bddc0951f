"""The report as Markdown."""

from __future__ import annotations

import re

from fp8ctl.report.build import make_report
from fp8ctl.report.markdown import escape, render_markdown


def test_tables_have_one_width_each_and_figures_to_the_right(make_run) -> None:
    text = render_markdown(
        make_report([make_run("a", answers={"bf16": 0.6}), make_run("b|c", precision="infir2", answers={"bf16": 0.5})])
    )
    tables = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.M)
    assert len(tables) >= 9
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.strip().split("\n")}
        assert len(widths) == 1
    assert "| step, median (s) | 2.000 |" in text
    assert "| --- | ---: | ---: | ---: |" in text
    assert r"| B | FP8 infir2 | b\|c | finished | 60 of 60 | 122,880 |" in text


def test_it_opens_with_the_verdict_and_has_the_curves_as_text(make_run) -> None:
    text = render_markdown(make_report([make_run("a"), make_run("b", precision="infir2")]))
    start = "# fp8ctl report\n\n## Verdict\n\n**PARITY**: B FP8 infir2 against A BF16; every rule that applies held\n\n- Training loss gap"
    assert text.startswith(start)
    assert text.count("```text\n") == 2
    assert "\n\n\n" not in text
    assert text.endswith("report schema 1.\n")


def test_markup_in_names_is_kept_from_working() -> None:
    assert escape("a|b *c* _d_ <e> [f]") == r"a\|b \*c\* \_d\_ \<e\> \[f\]"
