"""Random conversations through random templates: nothing but a clear refusal, no row lost, nothing trained but the assistant's words.

FP8CTL_FUZZ_CASES sets the number of cases of each test.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8ctl.config.data_schema import DataPrepConfig
from fp8ctl.data import chat
from fp8ctl.data.chat_template import ChatTemplate
from fp8ctl.data.conversations import to_conversation
from fp8ctl.data.prep_task import Counts
from fp8ctl.data.rows import BadRow, BadRowError, Dropped, Encoded, Origin, Sample
from fp8ctl.data.sft import ConversationEncoder
from fp8ctl.data.tokenizer import TextTokenizer, load_tokenizer
from fp8ctl.errors import DataError

CASES = int(os.environ.get("FP8CTL_FUZZ_CASES", "100"))
fuzz = settings(
    max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=CASES == 100
)

PIECES = [
    "a", "answer ", " \n", "\n\n", "<think>", "</think>", "<think>\nr\n</think>\n\n", "<|im_end|>", "<|im_start|>", "<|endoftext|>",
    "<|begin_of_thought|>", "<|end_of_thought|>", "<|begin_of_solution|>", "<|end_of_solution|>", "<tool_response>", "</tool_response>",
    "\ufdd0", "\ufdd1", "\ufdd2", "\ud800", "\u00e9\u6f22\U0001f600", "\u2028", "\x00", "{{ x }}", "{% generation %}", "'\"\\",
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=4).map("".join)
junk: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "text", "type", "name"]), inner, max_size=3)
    ),
    max_leaves=6,
)
roles = st.sampled_from(
    ["system", "user", "human", "assistant", "gpt", "tool", "function", "developer", "function_call", "x", None, 3]
)
parts = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image"]), "text": texts}), max_size=2)
calls = st.one_of(
    st.lists(
        st.fixed_dictionaries({"name": texts, "arguments": st.one_of(st.dictionaries(texts, junk, max_size=2), texts)}),
        max_size=2,
    ),
    st.sampled_from(['[{"name": "f", "arguments": "{}"}]', "{", "[1]"]),
    junk,
)
turn = st.one_of(
    st.fixed_dictionaries(
        {"role": roles, "content": st.one_of(texts, texts, parts, junk)},
        optional={
            "reasoning_content": st.one_of(texts, junk),
            "tool_calls": calls,
            "weight": st.sampled_from([0, 1, 0.5]),
            "from": roles,
        },
    ),
    st.fixed_dictionaries(
        {"from": roles, "value": st.one_of(texts, junk)}, optional={"content": st.one_of(st.none(), texts)}
    ),
    junk,
)
good_turn = st.tuples(st.sampled_from(["user", "assistant", "assistant", "system", "tool"]), texts).map(
    lambda t: {"role": t[0], "content": t[1] or "x"}
)
ids = st.one_of(
    st.lists(st.integers(-2, 420), max_size=30), st.lists(st.integers(0, 300), min_size=3, max_size=30), junk
)


@st.composite
def token_rows(draw: st.DrawFn) -> dict[str, Any]:
    given_ids = draw(ids)
    row: dict[str, Any] = {"input_ids": given_ids}
    if isinstance(given_ids, list) and draw(st.booleans()):
        mask = draw(st.lists(st.integers(0, 1), min_size=len(given_ids), max_size=len(given_ids)))
        row["labels"] = [i if m else -100 for i, m in zip(given_ids, mask, strict=True)]
        if draw(st.booleans()):
            row["loss_mask"] = mask
    else:
        row[draw(st.sampled_from(["labels", "loss_mask"]))] = draw(ids)
    return row


answered = st.lists(good_turn, max_size=4).map(
    lambda turns: [*turns, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
)
rows = st.one_of(
    st.fixed_dictionaries(
        {"messages": st.one_of(answered, answered, st.lists(turn, max_size=4), junk)}, optional={"tools": junk, "system": texts}
    ),
    st.fixed_dictionaries({"conversations": st.lists(turn, max_size=4)}, optional={"messages": junk, "system": junk}),
    st.fixed_dictionaries({"prompt": st.one_of(texts, st.lists(turn, max_size=2)), "completion": st.one_of(texts, junk)}),
    st.fixed_dictionaries({"instruction": st.one_of(texts, junk), "input": st.one_of(texts, junk), "output": st.one_of(texts, junk)}),
    st.fixed_dictionaries({"input": texts, "output": texts}),
    token_rows(),
    st.dictionaries(st.sampled_from(["messages", "conversations", "input_ids", "x"]), junk, max_size=3),
)  # fmt: skip

FRAGMENTS = [
    "{% for m in messages %}", "{% endfor %}", "{% if m.role == 'assistant' %}", "{% else %}", "{% endif %}", "{% generation %}",
    "{% endgeneration %}", "{{ m.content }}", "{{ m['role'] + '\\n' + m.content }}", "{{ messages[0].content }}", "<|im_start|>",
    "<|im_end|>\n", "{% if add_generation_prompt %}", "{{ raise_exception('no') }}", "{{ m.content | trim }}", "{{ bos_token }}",
    "{{ tools | tojson }}", "{% set ns = namespace(x=0) %}", "{{ loop.index }}", "{{ 2 ** 99999 }}", "{{ m.content * 3 }}",
    "{{ undefined.x }}", "{%", "}}", "{{ '<think>' }}", "{% macro f(x) %}", "{% endmacro %}", "{{ f(1) }}", "{{ m.reasoning_content }}",
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
]  # fmt: skip
WHOLE = [
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}",
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
]
sources = st.one_of(
    st.sampled_from(WHOLE),
    st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join),
    st.tuples(st.sampled_from(WHOLE), st.sampled_from(FRAGMENTS), st.integers(0, 80)).map(
        lambda t: t[0][: t[2]] + t[1] + t[0][t[2] :]
    ),
)

choices = st.fixed_dictionaries(
    {
        "over_length": st.sampled_from(["drop", "truncate_tail", "split", "error"]),
        "max_tokens": st.one_of(st.none(), st.integers(1, 80)),
        "chat_control_tokens": st.sampled_from(["refuse", "text"]),
        "thought_markers": st.sampled_from(["keep", "think"]),
        "check_thoughts": st.booleans(),
        "system_prompt": st.sampled_from([None, "s"]),
    }
)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture(scope="module")
def spans(tokenizer: TextTokenizer) -> Callable[[], list[tuple[str, str]]]:
    """What `chat._encode` was last given, as (kind, text) in order: what is inside the assistant's spans and what is not."""
    seen: list[Any] = []
    for name in ("_encode", "_encode_with_breaks"):
        inner = getattr(chat, name)

        def watched(text: str, of: Any, tok: TextTokenizer, inner: Any = inner) -> Any:
            seen[:] = [text, of]
            return inner(text, of, tok)

        setattr(chat, name, watched)

    def read() -> list[tuple[str, str]]:
        text, of = seen
        out, place = [], 0
        for start, end in of:
            out += [("", text[place:start]), ("trained", text[start:end])]
            place = end
        return [*out, ("", text[place:])]

    return read


def encoded(of: ConversationEncoder, row: Any) -> Encoded:
    try:
        conversation = to_conversation(row, Origin("f", 1))
    except BadRowError as error:
        assert error.message
        return BadRow(Origin("f", 1), error.message)
    try:
        return of.encode(conversation)
    except DataError as error:
        assert "max_tokens is" in error.message or "nests its generation marks" in error.message, error.message
        return Dropped("error")


def check(result: Encoded, limit: int | None, size: int) -> None:
    counts = Counts()
    counts.see(result)
    assert counts.rows == 1 == counts.kept + sum(counts.dropped.values()) + counts.bad
    assert not isinstance(result, list) or result
    for sample in result if isinstance(result, list) else ():
        assert sample.mask is not None and len(sample.ids) == len(sample.mask) > 0
        assert sample.ids.dtype == np.int32 and sample.mask.dtype == np.uint8
        assert sample.mask[1:].any() and sample.mask.max() == 1
        assert sample.ids.min() >= 0 and sample.ids.max() < size
        assert limit is None or len(sample.ids) <= limit
    if isinstance(result, BadRow):
        assert result.reason


BUNDLED: dict[tuple[str | None, str], ConversationEncoder] = {}


@fuzz
@given(
    row=rows, options=choices, name=st.sampled_from(["smollm2", "qwen2_5", "qwen3", "llama3", None]), none=st.booleans()
)
def test_rows(tokenizer: TextTokenizer, row: Any, options: dict[str, Any], name: str | None, none: bool) -> None:
    default = "none" if none and name else "keep"
    config = DataPrepConfig(kind="sft", chat_template=name, default_system=default, **options)
    if (name, default) not in BUNDLED:
        BUNDLED[name, default] = ConversationEncoder(config, tokenizer)
    of = BUNDLED[name, default]
    of._config = config
    check(encoded(of, row), options["max_tokens"], tokenizer.vocab_size)


@fuzz
@given(row=st.fixed_dictionaries({"messages": answered}), source=sources, options=choices)
def test_templates(
    tokenizer: TextTokenizer, spans: Any, tmp_path_factory: Any, row: Any, source: str, options: dict[str, Any]
) -> None:
    try:
        template = ChatTemplate(source, tokenizer.template_variables, name="fuzzed")
    except DataError as error:
        assert error.message.startswith("chat template fuzzed is broken: ")
        return
    of = ConversationEncoder(DataPrepConfig(kind="sft", chat_template="smollm2", **options), tokenizer)
    of.template = template
    result = encoded(of, row)
    check(result, options["max_tokens"], tokenizer.vocab_size)
    if isinstance(result, list) and not result[0].note:
        _check_mask(result[0], spans(), tokenizer)


def _check_mask(sample: Sample, pieces: list[tuple[str, str]], tokenizer: TextTokenizer) -> None:
    """Trained tokens are exactly the text of the assistant's spans, the rest is exactly the rest."""
    assert sample.mask is not None
    for trained in (1, 0):
        text = tokenizer.decode(sample.ids[sample.mask == trained])
        expected = "".join(piece for kind, piece in pieces if (kind == "trained") == bool(trained)).replace(
            "\ufdd2", ""
        )
        assert text == expected, (text, expected)
