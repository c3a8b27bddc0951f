"""The HTML page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from fp8ctl.report.build import make_report
from fp8ctl.report.html import render_html

VOID = {"meta", "link", "br", "img", "hr", "input", "path"}


class Outline(HTMLParser):
    """Checks that tags close in order, and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def page(make_run) -> str:
    bf16 = make_run("cpt-bf16", answers={"bf16": 0.6})
    return render_html(make_report([bf16, make_run("b<script>", precision="infir2", answers={"bf16": 0.5})]))


def test_tags_close_and_headings_descend(page: str) -> None:
    outline = Outline()
    outline.feed(page)
    assert outline.open == []
    levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    assert not re.search(
        r"https?:|//|@import|url\(|<script|<link|<img|<iframe|src=", re.sub(r"<!doctype html>", "", page)
    )


def test_names_are_escaped(page: str) -> None:
    assert "b&lt;script&gt;" in page and "b<script>" not in page


def test_it_fits_a_phone_and_both_themes(page: str) -> None:
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme: dark" in page and "color-scheme: light dark" in page
    assert page.count('class="scroll" role="region"') == page.count("<table")
    variables = set(re.findall(r"var\((--[\w-]+)\)", page))
    light, dark = page.split("prefers-color-scheme: dark", 1)
    for name in variables:
        assert f"{name}:" in light and f"{name}:" in dark, "each colour has a light and a dark value"


def contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def test_text_and_curves_stand_out_in_both_themes(page: str) -> None:
    light, dark = page.split("prefers-color-scheme: dark", 1)
    for theme in (light, dark):
        colors: dict[str, str] = dict(re.findall(r"(--[\w-]+): (#[0-9a-f]{6})", theme))
        for name in ("--ink", "--soft", "--good", "--bad", "--warn"):
            for ground in ("--page", "--card"):
                assert contrast(colors[name], colors[ground]) >= 4.5, (name, ground)
        for i in range(6):
            assert contrast(colors[f"--c{i}"], colors["--page"]) >= 3.0


def test_long_runs_make_a_small_page(make_run) -> None:
    folders = [
        make_run("a", num_steps=6000),
        *(make_run(f"b{i}", precision="infir2", num_steps=6000) for i in range(2)),
    ]
    assert len(render_html(make_report(folders)).encode()) < 300_000


def test_one_run(make_run) -> None:
    page = render_html(make_report([make_run("a")]))
    assert "figures only" in page and "At a glance" not in page and "<svg" in page


def test_a_run_that_logged_nothing(make_run) -> None:
    folder = make_run("a", state="failed", cause="no such file")
    (folder / "metrics.jsonl").unlink()
    report: dict[str, Any] = make_report([folder])
    page = render_html(report)
    assert "no such file" in page and "no step was logged" in page and "<svg" not in page
