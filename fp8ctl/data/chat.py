"""Conversations to tokens, with an exact mask of the tokens that are trained.

What is trained is the assistant's text and the token that ends its turn. Where it stands is known from the template's
{% generation %} marks, else from rendering ever longer beginnings of the conversation; where neither is exact the
conversation is refused. The mask is never guessed from token ids, and nothing that somebody said may get lost in rendering.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding

from fp8ctl.data import thoughts
from fp8ctl.data.chat_template import CLOSE, OPEN, ChatTemplate, Span
from fp8ctl.data.rows import BadRowError, Message
from fp8ctl.data.survival import check_nothing_is_lost
from fp8ctl.data.tokenizer import TextTokenizer

# A third noncharacter: put inside a control token that somebody wrote, until the text is tokenized.
_BREAK = "\ufdd2"

Tools = Sequence[dict[str, Any]]


def render(
    messages: list[Message],
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    *,
    tools: Tools = (),
    control_tokens: str = "refuse",
    check_thoughts: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a whole conversation and which of them are trained.

    Args:
        control_tokens: what becomes of control tokens that a message holds. refuse: the conversation is. text: they are encoded as
            the text they are.
        check_thoughts: refuse turns whose <think> tags don't pair, those that the template writes included.

    Returns:
        ids (int32, shape [T]) and mask (uint8, shape [T]; 1 = this token is a target).

    Raises:
        BadRowError: the conversation can't be rendered exactly; the message says why.
    """
    if control_tokens == "text":
        messages, tools = _broken(messages, tokenizer), _broken(list(tools), tokenizer)
    else:
        refuse_control_tokens([*messages, *tools], tokenizer)
    text, spans = template.render(messages, tools=tools)
    if not template.has_marks:
        spans = _prefix_spans(messages, tools, template, text)
    check_nothing_is_lost(messages, text, spans, template.name)
    answers = [m for m in messages if m["role"] == "assistant"]
    if check_thoughts:
        for start, end in spans:
            thoughts.check_rendered(text, start, end)
    spans = [_cut_after_end_of_turn(text, span, tokenizer) for span in spans]
    ids, inside = (_encode_with_breaks if _BREAK in text else _encode)(text, spans, tokenizer)
    mask = np.zeros(len(ids), dtype=np.uint8)
    for answer, of_turn in zip(answers, inside, strict=True):
        if answer.get("is_trained", True):
            mask |= of_turn
    return ids, mask


def render_prompt(
    messages: list[Message], template: ChatTemplate, tokenizer: TextTokenizer, *, tools: Tools = ()
) -> np.ndarray:
    """Ids (int32) of a conversation that the assistant is to continue.

    Raises:
        BadRowError: the template refuses the conversation, or its text holds control tokens.
    """
    refuse_control_tokens([*messages, *tools], tokenizer)
    text, _ = template.render(messages, tools=tools, add_generation_prompt=True)
    return _tokenize(text, tokenizer)[0]


def refuse_control_tokens(values: list[Any], tokenizer: TextTokenizer) -> None:
    """Raises BadRowError when a text among the values could forge a turn: it holds a control token, or our own marks."""
    for text in _texts(values):
        _refuse_marks(text)
        if found := tokenizer.special_pattern.search(text):
            raise BadRowError(
                f"a message holds the control token {found.group()}",
                "chat_control_tokens=text encodes it as the text it is",
            )


def _refuse_marks(text: str) -> None:
    if OPEN in text or CLOSE in text or _BREAK in text:
        raise BadRowError("a message holds the noncharacter U+FDD0, U+FDD1 or U+FDD2")


def _texts(value: Any) -> Iterator[str]:
    """Every text inside a value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _broken(value: Any, tokenizer: TextTokenizer) -> Any:
    """The same value with every control token in its texts broken up by a mark."""
    if isinstance(value, str):
        _refuse_marks(value)
        while tokenizer.special_pattern.search(value):  # breaking one may leave another that overlapped it
            value = tokenizer.special_pattern.sub(lambda m: m.group()[0] + _BREAK + m.group()[1:], value)
        return value
    if isinstance(value, dict):
        return {_broken(k, tokenizer): _broken(v, tokenizer) for k, v in value.items()}
    return [_broken(v, tokenizer) for v in value] if isinstance(value, (list, tuple)) else value


def _prefix_spans(messages: list[Message], tools: Tools, template: ChatTemplate, text: str) -> list[Span]:
    """What each assistant turn adds to the rendering of the turns before it; exact, or refused."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = template.render(messages[:i], tools=tools, add_generation_prompt=True)
        after, _ = template.render(messages[: i + 1], tools=tools)
        if not (text.startswith(after) and after.startswith(before)):
            raise BadRowError(
                f"the chat template {template.name} has no generation marks and renders turn {i + 1} differently within the conversation",
                "set chat_template to a template with {% generation %} marks",
            )
        spans.append((len(before), len(after)))
    return spans


def _cut_after_end_of_turn(text: str, span: Span, tokenizer: TextTokenizer) -> Span:
    start, end = span
    last = None
    for last in tokenizer.special_pattern.finditer(text, start, end):  # noqa: B007
        pass
    if last is None or text[last.end() : end].strip():
        raise BadRowError("the chat template does not train the token that ends the assistant's turn")
    return start, last.end()


def _encode(text: str, spans: list[Span], tokenizer: TextTokenizer) -> tuple[np.ndarray, list[np.ndarray]]:
    """Ids, and for each span which of them begin in it; no token crosses the start of a span, since generation starts there too."""
    ids, encoding = _tokenize(text, tokenizer)
    inside = []
    for start, end in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        chars = encoding.token_to_chars(first) if first is not None else None
        if first is None or last is None or chars is None or chars[0] != start:
            return _encode_in_pieces(text, spans, tokenizer)
        inside.append(np.zeros(len(ids), dtype=np.uint8))
        inside[-1][first : last + 1] = 1
    return ids, inside


def _encode_in_pieces(text: str, spans: list[Span], tokenizer: TextTokenizer) -> tuple[np.ndarray, list[np.ndarray]]:
    """The same where a token would cross the start of a span: the text is cut at every start and after every end."""
    edges = sorted({0, len(text), *(place for span in spans for place in span)})
    pieces = [_tokenize(text[start:end], tokenizer)[0] for start, end in zip(edges, edges[1:], strict=False)]
    begins = np.repeat(edges[:-1], [len(piece) for piece in pieces])
    return np.concatenate(pieces), [((begins >= start) & (begins < end)).astype(np.uint8) for start, end in spans]


def _encode_with_breaks(text: str, spans: list[Span], tokenizer: TextTokenizer) -> tuple[np.ndarray, list[np.ndarray]]:
    """The same of a text with broken control tokens: whole ones are the template's, all between them is plain text."""
    borders = {0, len(text), *(start for start, _ in spans)}
    for found in tokenizer.special_pattern.finditer(text):
        borders |= {found.start(), found.end()}
    edges = sorted(borders)
    pieces = []
    for start, end in zip(edges, edges[1:], strict=False):
        piece = text[start:end]
        special = tokenizer.special_tokens.get(piece)
        ids = np.array([special], dtype=np.int32) if special is not None else _as_text(piece, tokenizer)
        pieces.append(ids)
    begins = np.repeat(edges[:-1], [len(piece) for piece in pieces])
    # spans begin at a border and end after a control token, so no piece is partly inside
    return np.concatenate(pieces), [((begins >= start) & (begins < end)).astype(np.uint8) for start, end in spans]


def _as_text(piece: str, tokenizer: TextTokenizer) -> np.ndarray:
    ids, _ = _tokenize(piece.replace(_BREAK, ""), tokenizer, special_as_text=True)
    if np.isin(ids, list(tokenizer.special_tokens.values())).any():
        raise BadRowError("the tokenizer can't encode a control token as text")
    return ids


def _tokenize(text: str, tokenizer: TextTokenizer, *, special_as_text: bool = False) -> tuple[np.ndarray, Encoding]:
    try:
        return tokenizer.encode_chat(text, special_as_text=special_as_text)
    except (TypeError, ValueError):  # a lone surrogate is no Unicode text
        raise BadRowError("the tokenizer refuses the text") from None
