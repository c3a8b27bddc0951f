"""Chat templates: Jinja source from a stranger, compiled in a sandbox, rendered within limits, the same on every day and machine."""

from __future__ import annotations

import json
import re
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fp8ctl.data.rows import BadRowError, Message
from fp8ctl.data.tokenizer import TextTokenizer
from fp8ctl.errors import DataError
from fp8ctl.paths import templates_dir

# Unicode noncharacters, reserved for a program's own use: they stand in the rendered text until the spans are read off.
OPEN, CLOSE = "\ufdd0", "\ufdd1"

Span = tuple[int, int]

_MAX_STEPS = 1_000_000
"""Passes through loops and macros in one rendering: counted, so that no row fares differently on a slow machine."""
_MAX_SECONDS = 60.0
_MEMORY_BYTES = 2**30
_MEMORY_BYTES_PER_CHAR = 64
_LONGEST_INT_BITS = 256


class TemplateLimitError(BadRowError):
    """A template that does more than any honest one."""


class ChatTemplate:
    """A compiled template and the variables it is rendered with (bos_token and its like)."""

    def __init__(self, source: str, variables: dict[str, str], *, name: str, is_bundled: bool = False) -> None:
        """Raises DataError when the template has a syntax error."""
        self.source = source
        self.name = name
        self.is_bundled = is_bundled
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source, globals=dict(variables))
            tokens = [token for _, kind, token in self._environment.lex(source) if kind not in ("data", "comment")]
        except (jinja2.TemplateError, RecursionError) as error:
            raise DataError(f"chat template {name} is broken: {error}", "mend it, or set chat_template=NAME") from None
        self.has_marks = "generation" in tokens
        self._words = set(re.findall(r"\w+", " ".join(tokens)))

    def knows(self, word: str) -> bool:
        """Whether the template's code (not its plain text) has a name or string with this word in it."""
        return word in self._words

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = (), add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """Text of a conversation and the character ranges inside the template's generation marks.

        Raises:
            BadRowError: the template refuses these messages, or does too much for them (TemplateLimitError).
            DataError: it nests its generation marks.
        """
        variables = {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
        try:
            with self._limits(messages):
                marked = self._template.render(variables)
        except TemplateLimitError as error:
            raise TemplateLimitError(f"the chat template {self.name} {error.message}") from None
        except MemoryError:
            raise TemplateLimitError(
                f"the chat template {self.name} takes too much memory for one conversation"
            ) from None
        except Exception as error:  # a stranger's code: it may raise anything
            raise BadRowError(f"the chat template {self.name} refuses the conversation: {str(error)[:300]}") from None
        return _take_out_marks(marked)

    @contextmanager
    def _limits(self, messages: Sequence[Message]) -> Iterator[None]:
        self._environment.start()
        if self.is_bundled:
            yield
        else:
            chars = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
            with _memory_limit(_MEMORY_BYTES + _MEMORY_BYTES_PER_CHAR * chars):
                yield


def load_template(name: str | None, tokenizer: TextTokenizer, default_system: str = "keep") -> ChatTemplate:
    """A template by its name in templates/chat, by its path, or (None) the tokenizer's own.

    Args:
        default_system: keep, or none: no system message is written where a conversation has none (a variable of the same name says
            so; templates that don't know it write theirs).

    Raises:
        DataError: there is none, or it is broken.
    """
    bundled = {p.stem: p for p in sorted((templates_dir() / "chat").glob("*.jinja"))}
    variables = tokenizer.template_variables | ({"default_system": ""} if default_system == "none" else {})
    choose = f"set chat_template to one of {', '.join(bundled)}, or to the path of a .jinja file"
    if name is None:
        if tokenizer.chat_template is None:
            raise DataError(f"the tokenizer in {tokenizer.folder} has no chat template", choose)
        return ChatTemplate(tokenizer.chat_template, variables, name="of the tokenizer")
    path = bundled.get(name, Path(name))
    if not path.is_file():
        raise DataError(f"no chat template {name}", choose)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"chat template {name} can't be read: {error}", choose) from None
    return ChatTemplate(source, variables, name=name, is_bundled=name in bundled)


class _GenerationMarks(Extension):
    """{% generation %} ... {% endgeneration %}: puts the two marks around what the assistant said."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opening, closing = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (OPEN, CLOSE))
        return [opening, *body, closing]


class _CountsSteps(CodeGenerator):
    """Compiles a call of `count_step` into whatever a template can do over and over."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """See CodeGenerator."""
        for repeated in list(node.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
            call = nodes.Call(nodes.EnvironmentAttribute("count_step"), [], [], None, None)
            step = nodes.ExprStmt(call, lineno=repeated.lineno)
            step.set_environment(self.environment)
            repeated.body.insert(0, step)  # type: ignore[attr-defined]
        super().visit_Template(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as Hugging Face renders with it, without what makes a text depend on the day or on chance, and with limits.

    `strftime_now` is left out on purpose: templates that ask whether it is there fall back to a fixed date.
    """

    code_generator_class = _CountsSteps
    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationMarks])
        self.filters["tojson"] = _tojson
        del self.filters["random"]
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.start()

    def start(self) -> None:
        """Begins to count for one rendering."""
        self._steps, self._deadline = 0, time.monotonic() + _MAX_SECONDS

    def count_step(self) -> str:
        """Raises TemplateLimitError when there were too many."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise TemplateLimitError(f"takes more than {_MAX_STEPS:,} steps for one conversation")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"takes more than {_MAX_SECONDS:.0f} seconds for one conversation")
        return ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Products and powers of whole numbers stay small: nothing can interrupt them."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _LONGEST_INT_BITS:
                raise TemplateLimitError("computes with numbers that are too large")
        return super().call_binop(context, operator, left, right)


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[None]:
    """Lets this process take no more than so many bytes above what it has; where the system can't say or limit, all it wants."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + num_bytes
        if before[0] == resource.RLIM_INFINITY or limit < before[0]:
            resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _take_out_marks(marked: str) -> tuple[str, list[Span]]:
    pieces, spans, length = [], [], 0
    for number, piece in enumerate(marked.split(OPEN)):
        inside, closed, outside = piece.partition(CLOSE)
        if (number > 0) != bool(closed) or CLOSE in outside:
            raise DataError("the chat template nests its generation marks", "mark each assistant turn once")
        if closed:
            spans.append((length, length + len(inside)))
        pieces += [inside, outside]
        length += len(inside) + len(outside)
    return "".join(pieces), spans


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    # Jinja's own filter escapes HTML, which would change the text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
