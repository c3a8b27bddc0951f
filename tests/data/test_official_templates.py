"""The bundled templates against the official ones, byte by byte.

official_chats.json holds what transformers rendered with the models' own templates (Llama 3.2's with its date fixed). Where the
package trl is installed, which carries those templates, they are compared on many more conversations.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8ctl.data.chat_template import ChatTemplate, load_template
from fp8ctl.data.rows import Message
from fp8ctl.data.tokenizer import TextTokenizer, load_tokenizer
from fp8ctl.paths import templates_dir

STORED = Path(__file__).parent / "official_chats.json"
OFFICIAL = {"qwen2_5": ["qwen2_5"], "qwen3": ["qwen3"], "llama3": ["llama3_1", "llama3_2"]}
"""Names of the official templates in trl, by ours."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'It\'s <b>\u00e9</b> & "more"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


def say(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CHATS: dict[str, list[Message]] = {
    "one turn": [say("user", "Hi"), say("assistant", " Yo ")],
    "system": [say("system", " Be kind\n"), say("user", "a\n\nb"), say("assistant", "c\n")],
    "many turns": [say("user", "1"), say("assistant", "2"), say("user", "3"), say("assistant", "4")],
    "two in a row": [say("user", "1"), say("user", "2"), say("assistant", "3"), say("assistant", "4")],
    "system in the middle": [say("user", "1"), say("system", "s"), say("user", "2"), say("assistant", "3")],
    "assistant first": [say("assistant", "Hello"), say("user", "x"), say("assistant", "y")],
    "reasoning in the text": [say("user", "q"), say("assistant", "<think>\nr\n\nr2\n</think>\n\na")],
    "reasoning apart": [say("user", "q"), say("assistant", "a", reasoning_content="\nr\n")],
    "empty reasoning": [say("user", "q"), say("assistant", "<think>\n\n</think>\n\na")],
    "call": [say("user", "q"), say("assistant", "", tool_calls=[call("weather", city="K\u00f6ln", days=[1, None, True])])],
    "call with text": [say("user", "q"), say("assistant", "Let me see", tool_calls=[call("now")])],
    "call and answer": [
        say("system", "s"),
        say("user", "q"),
        say("assistant", "", tool_calls=[call("weather", city="x")], reasoning_content="think"),
        say("tool", '{"t": "1\u00b0"}\n'),
        say("assistant", "It is 1\u00b0"),
    ],
    "two calls, two answers": [
        say("user", "q"),
        say("assistant", "Both", tool_calls=[call("weather", city="x"), call("now")]),
        say("tool", "a"),
        say("tool", "b"),
        say("assistant", "c", reasoning_content="r"),
        say("user", "<tool_response>\nx\n</tool_response>"),
        say("assistant", "d"),
    ],
    "letters": [say("user", "\u6f22\U0001f600 {{ x }} {% y %} <b> & '\""), say("assistant", "def f():\n\treturn 1\n    \n")],
}  # fmt: skip


def bundled(name: str) -> ChatTemplate:
    source = (templates_dir() / "chat" / f"{name}.jinja").read_text()
    return ChatTemplate(source, {"bos_token": "<|begin_of_text|>"}, name=name)


def ours(name: str, messages: list[Message], tools: list[Any], prompt: bool) -> str | None:
    """The text, or None when the template refuses."""
    from fp8ctl.data.rows import BadRowError

    try:
        return bundled(name).render(messages, tools=tools, add_generation_prompt=prompt)[0]
    except BadRowError:
        return None


def test_stored_renderings() -> None:
    stored = json.loads(STORED.read_text())
    assert {case["template"] for case in stored} == {"qwen2_5", "qwen3", "llama3", "smollm2"} and len(stored) > 100
    for case in stored:
        messages, tools = CHATS[case["chat"]], TOOLS if case["tools"] else []
        assert ours(case["template"], messages, tools, case["prompt"]) == case["text"], case


Render = Callable[[list[Message], list[Any], bool], str | None]


@pytest.fixture(scope="module", params=[(a, b) for a, names in OFFICIAL.items() for b in names], ids=lambda p: p[1])
def official(request: pytest.FixtureRequest, tokenizer_folder: Path) -> tuple[str, Render]:
    """Our template's name, and the official one as transformers renders it."""
    pytest.importorskip("transformers")
    from transformers import PreTrainedTokenizerFast

    try:
        files = importlib.metadata.files("trl") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(
            "trl, which holds the official templates, is not installed; stored renderings of them are compared above"
        )
    name, theirs = request.param
    source = next(f.read_text() for f in files if f.name == f"{theirs}.jinja")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_folder / "tokenizer.json"), bos_token="<|begin_of_text|>"
    )

    def render(messages: list[Message], tools: list[Any], prompt: bool) -> str | None:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tools=tools or None, chat_template=source, add_generation_prompt=prompt, tokenize=False,
                    date_string="26 Jul 2024",
                )
            )  # fmt: skip
        except Exception:  # jinja2's, of transformers' own choice
            return None

    return name, render


def test_against_transformers(official: tuple[str, Render]) -> None:
    name, render = official
    draw = random.Random(4)
    words = [
        "a",
        " b\n",
        "\n\nc",
        "<think>\nr\n</think>\n\ns",
        "<tool_response>x</tool_response>",
        "'\"\\",
        "\u00e9\u6f22",
        "{{ }}",
    ]
    refused = 0
    for _ in range(400):
        messages = [say("system", draw.choice(words))] if draw.random() < 0.4 else []
        for _ in range(draw.randint(1, 6)):
            role = draw.choice(("user", "assistant", "assistant", "tool", "system"))
            message = say(role, "".join(draw.choices(words, k=draw.randint(1, 2))))
            if role == "assistant" and draw.random() < 0.3:
                message["reasoning_content"] = draw.choice(words[:3])
            if role == "assistant" and draw.random() < 0.3:
                message["tool_calls"] = [call("f", x=draw.choice(words), y={"z": [draw.random()]})] * draw.randint(1, 2)
                message["content"] *= draw.random() < 0.5
            messages.append(message)
        tools, prompt = TOOLS[: draw.randint(0, 2)], draw.random() < 0.5
        expected = render(messages, tools, prompt)
        refused += expected is None
        assert ours(name, messages, tools, prompt) == expected, messages
    assert refused < 200


# ------------------------------------------------------------ SmolLM2, whose tokenizer is real


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> tuple[TextTokenizer, Any]:
    from transformers import AutoTokenizer

    return load_tokenizer(smollm2_folder), AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.slow
def test_smollm2_of_transformers(smollm2: tuple[TextTokenizer, Any]) -> None:
    from fp8ctl.data.chat import render

    tokenizer, official = smollm2
    own, template = load_template(None, tokenizer), load_template("smollm2", tokenizer)
    for name, messages in CHATS.items():
        if any(m.get("tool_calls") or m["role"] == "tool" for m in messages):
            continue
        text = official.apply_chat_template(messages, tokenize=False)
        assert own.render(messages)[0] == template.render(messages)[0] == text, name
        if not any("reasoning_content" in m for m in messages):
            ids = official.apply_chat_template(messages, tokenize=True, return_dict=False)
            assert render(messages, template, tokenizer)[0].tolist() == ids, name
