from __future__ import annotations

from fp8ctl.cli.terminal import shown


def test_what_steers_a_terminal_is_written_out() -> None:
    assert shown("a\x1b[31mred\x07\x00\x7f\x9b") == "a\\x1b[31mred\\x07\\x00\\x7f\\x9b"
    assert shown("back\u202etext\u2066 and\r over") == "back\\u202etext\\u2066 and\\x0d over"
    assert shown("lone \ud800") == "lone \\ud800"


def test_text_stays_as_it_is() -> None:
    text = "lines\n\tand tabs, \u00e9t\u00e9 \u6570\u5b66 \U0001f600 \u05d0"
    assert shown(text) == text
