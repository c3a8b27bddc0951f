from __future__ import annotations

import time
from pathlib import Path

import pytest

from fp8ctl.data import chat_template
from fp8ctl.data.chat_template import ChatTemplate, TemplateLimitError, load_template
from fp8ctl.data.rows import BadRowError, Message
from fp8ctl.data.tokenizer import TextTokenizer, load_tokenizer
from fp8ctl.errors import DataError

CHAT: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return load_tokenizer(tokenizer_folder)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, name="test")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(10 ** 9) %}{% endfor %}", "refuses the conversation: Range too big"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than 1,000,000 steps for one conversation",
        ),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth|1,000,000 steps"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "1,000,000 steps",
        ),
        ("{% block b %}{{ self.b() }}{% endblock %}", "maximum recursion depth"),
        ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "maximum recursion depth|1,000,000 steps"),
        ("{{ 10 ** 10 ** 10 }}", "computes with numbers that are too large"),
        ("{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}", "numbers that are too large"),
        ("{{ 'a' * 10 ** 11 }}", "takes too much memory"),
        ("{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "too much memory"),
        ("{{ 'a' | center(10 ** 11) }}", "too much memory"),
        ("{{ '%099999999999d' % 1 }}", "too much memory|refuses the conversation"),
        ("{{ messages | tojson(indent=10 ** 11) }}", "too much memory"),
        ("{{ [1, 2] | random }}", "refuses the conversation|is broken"),
        ("{{ lipsum(n=10 ** 9) }}", "'lipsum' is undefined"),
        ("{% include 'x' %}", "refuses the conversation"),
        ("{{ strftime_now('%d') }}", "'strftime_now' is undefined"),
    ],
)  # fmt: skip
def test_hostile_templates_are_refused(source: str, reason: str) -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match=reason):
        template(source).render(CHAT)
    assert time.monotonic() - start < 30
    assert template("{{ messages[0].content }}").render(CHAT) == ("q", [])  # limits are off again


def test_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.05)
    with pytest.raises(TemplateLimitError, match="takes more than 0 seconds for one conversation"):
        template("{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}").render(CHAT)


def test_long_conversations_are_within_the_limits() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    text, spans = template(source).render([{"role": "assistant", "content": "x" * 1000}] * 50_000)
    assert len(text) == 50_000_000 and len(spans) == 50_000


def test_counting_steps_changes_no_text() -> None:
    source = "{% for m in messages %}{{ loop.index ~ loop.last }}{% else %}none{% endfor %}"
    source += "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}"
    assert template(source).render(CHAT)[0] == "1False2True<1>"
    assert template(source).render([])[0] == "none<1>"


def test_words_of_the_code() -> None:
    chat = template("plain tool {# developer #}{% if message.role == 'ipython' or tools %}{{ tool_calls }}{% endif %}")
    known = {word for word in ("tool", "developer", "ipython", "tools", "tool_calls") if chat.knows(word)}
    assert known == {"ipython", "tools", "tool_calls"}


def test_a_template_that_is_no_text(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="can't be read: 'utf-8' codec"):
        load_template(str(tmp_path / "a.jinja"), tokenizer)


def test_refusals_are_of_the_row() -> None:
    with pytest.raises(BadRowError, match="refuses the conversation: no"):
        template("{{ raise_exception('no') }}").render(CHAT)
