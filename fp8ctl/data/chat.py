"""Conversations to tokens: a sandboxed chat template, and an exact mask of the tokens that are trained.

What is trained is the assistant's text and the token that ends its turn. Where it stands is known from the template's
{% generation %} marks, else from rendering ever longer beginnings of the conversation; where neither is exact the
conversation is refused. The mask is never guessed from token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fp8ctl.data.rows import BadRowError, Message
from fp8ctl.data.tokenizer import TextTokenizer
from fp8ctl.errors import DataError
from fp8ctl.paths import templates_dir

# Unicode noncharacters, reserved for a program's own use: they stand in the rendered text until the spans are read off.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"

Span = tuple[int, int]


class _GenerationMarks(Extension):
    """{% generation %} ... {% endgeneration %}: puts the two marks around what the assistant said."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opening, closing = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_OPEN, _CLOSE))
        return [opening, *body, closing]


class ChatTemplate:
    """A compiled template and the variables it is rendered with (bos_token and its like)."""

    def __init__(self, source: str, variables: dict[str, str], *, name: str) -> None:
        """Raises DataError when the template has a syntax error."""
        self.source = source
        self.name = name
        # The two trim options and loop controls are what Hugging Face renders with. `strftime_now` is left out on
        # purpose: templates that ask for it fall back to a fixed date, and data does not depend on the day.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationMarks]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source, globals=variables)
            self.has_marks = any(t[1:] == ("name", "generation") for t in environment.lex(source))
        except jinja2.TemplateError as error:
            raise DataError(f"chat template {name} is broken: {error}", "mend it, or set chat_template=NAME") from None

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """Text of a conversation and the character ranges inside the template's generation marks.

        Raises:
            BadRowError: the template refuses these messages.
        """
        try:
            marked = self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, tools=None)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            raise BadRowError(f"the chat template {self.name} refuses the conversation: {error}") from None
        return _take_out_marks(marked)


def load_template(name: str | None, tokenizer: TextTokenizer) -> ChatTemplate:
    """A template by its name in templates/chat, by its path, or (None) the tokenizer's own.

    Raises:
        DataError: there is none, or it is broken.
    """
    bundled = {p.stem: p for p in sorted((templates_dir() / "chat").glob("*.jinja"))}
    choose = f"set chat_template to one of {', '.join(bundled)}, or to the path of a .jinja file"
    if name is None:
        if tokenizer.chat_template is None:
            raise DataError(f"the tokenizer in {tokenizer.folder} has no chat template", choose)
        return ChatTemplate(tokenizer.chat_template, tokenizer.template_variables, name="of the tokenizer")
    path = bundled.get(name, Path(name))
    if not path.is_file():
        raise DataError(f"no chat template {name}", choose)
    return ChatTemplate(path.read_text(encoding="utf-8"), tokenizer.template_variables, name=name)


def render(messages: list[Message], template: ChatTemplate, tokenizer: TextTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a whole conversation and which of them are trained.

    Returns:
        ids (int32, shape [T]) and mask (uint8, shape [T]; 1 = this token is a target).

    Raises:
        BadRowError: the conversation can't be rendered exactly; the message says why.
    """
    refuse_control_tokens(messages, tokenizer)
    text, spans = template.render(messages)
    if not template.has_marks:
        spans = _prefix_spans(messages, template, text)
    _check_every_answer_survives(messages, text, spans)
    spans = [_cut_after_end_of_turn(text, span, tokenizer) for span in spans]
    ids, ranges = _encode(text, spans, tokenizer)
    mask = np.zeros(len(ids), dtype=np.uint8)
    for start, end in spans:
        mask |= (ranges[:, 0] >= start) & (ranges[:, 0] < end)
    return ids, mask


def render_prompt(messages: list[Message], template: ChatTemplate, tokenizer: TextTokenizer) -> np.ndarray:
    """Ids (int32) of a conversation that the assistant is to continue.

    Raises:
        BadRowError: the template refuses the conversation, or its text holds control tokens.
    """
    refuse_control_tokens(messages, tokenizer)
    text, _ = template.render(messages, add_generation_prompt=True)
    return tokenizer.encode_chat(text)[0]


def refuse_control_tokens(messages: list[Message], tokenizer: TextTokenizer) -> None:
    """Raises BadRowError when a message's text could forge a turn: it holds a control token, or our own marks."""
    for message in messages:
        for value in message.values():
            if found := tokenizer.special_pattern.search(value):
                raise BadRowError(f"a message holds the control token {found.group()}")
            if _OPEN in value or _CLOSE in value:
                raise BadRowError("a message holds the noncharacter U+FDD0 or U+FDD1")


def _take_out_marks(marked: str) -> tuple[str, list[Span]]:
    pieces, spans, length = [], [], 0
    for number, piece in enumerate(marked.split(_OPEN)):
        inside, closed, outside = piece.partition(_CLOSE)
        if (number > 0) != bool(closed) or _CLOSE in outside:
            raise DataError("the chat template nests its generation marks", "mark each assistant turn once")
        if closed:
            spans.append((length, length + len(inside)))
        pieces += [inside, outside]
        length += len(inside) + len(outside)
    return "".join(pieces), spans


def _prefix_spans(messages: list[Message], template: ChatTemplate, text: str) -> list[Span]:
    """What each assistant turn adds to the rendering of the turns before it; exact, or refused."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = template.render(messages[:i], add_generation_prompt=True)
        after, _ = template.render(messages[: i + 1])
        if not (text.startswith(after) and after.startswith(before)):
            raise BadRowError(
                f"the chat template {template.name} has no generation marks and renders turn {i + 1} differently "
                "within the conversation",
                "set chat_template to a template with {% generation %} marks",
            )
        spans.append((len(before), len(after)))
    return spans


def _check_every_answer_survives(messages: list[Message], text: str, spans: list[Span]) -> None:
    answers = [m for m in messages if m["role"] == "assistant"]
    if len(answers) != len(spans):
        raise BadRowError(f"{len(answers)} assistant turns, but the chat template marks {len(spans)}")
    for number, (answer, (start, end)) in enumerate(zip(answers, spans, strict=True), start=1):
        # White space may change: templates trim it. Anything else that is missing would never be trained.
        shown = "".join(text[start:end].split())
        for key in ("reasoning_content", "content"):
            if "".join(answer.get(key, "").split()) not in shown:
                raise BadRowError(f"the chat template drops text of assistant turn {number} ({key})")


def _cut_after_end_of_turn(text: str, span: Span, tokenizer: TextTokenizer) -> Span:
    start, end = span
    last = None
    for last in tokenizer.special_pattern.finditer(text, start, end):  # noqa: B007
        pass
    if last is None or text[last.end() : end].strip():
        raise BadRowError("the chat template does not train the token that ends the assistant's turn")
    return start, last.end()


def _encode(text: str, spans: list[Span], tokenizer: TextTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids and character ranges; no token crosses the start of a span, since generation starts there too."""
    ids, ranges = tokenizer.encode_chat(text)
    cuts = [s for s, _ in spans if ((ranges[:, 0] < s) & (s < ranges[:, 1])).any()]
    if not cuts:
        return ids, ranges
    all_ids, all_ranges = [], []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        ids, ranges = tokenizer.encode_chat(text[start:end])
        all_ids.append(ids)
        all_ranges.append(ranges + start)
    return np.concatenate(all_ids), np.concatenate(all_ranges)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    # Jinja's own filter escapes HTML, which would change the text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
