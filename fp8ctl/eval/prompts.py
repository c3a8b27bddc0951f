"""Questions to prompt tokens with the model's own chat template, and the tokens that end an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp8ctl.config.schema import ModelShape
from fp8ctl.data.chat import render_prompt
from fp8ctl.data.chat_template import ChatTemplate, load_template
from fp8ctl.data.rows import Message
from fp8ctl.data.tokenizer import TextTokenizer, load_tokenizer
from fp8ctl.errors import ModelError

# Stands for an answer while the end of its turn is looked for; no template changes it.
_ANSWER = "fp8ctl answer"


class Prompter:
    """Tokenizer and chat template of one model folder."""

    def __init__(self, weights: Path, chat_template: str | None = None, default_system: str = "keep") -> None:
        """Raises DataError: no tokenizer, no chat template, or a broken one."""
        self.weights = weights
        self.tokenizer: TextTokenizer = load_tokenizer(weights)
        self.template: ChatTemplate = load_template(chat_template, self.tokenizer, default_system)

    def prompt_ids(self, question: str, system_prompt: str) -> tuple[int, ...]:
        """Tokens after which the model answers.

        Raises:
            DataError: the template refuses the conversation, or the question holds control tokens.
        """
        return tuple(render_prompt(_conversation(question, system_prompt), self.template, self.tokenizer).tolist())

    def stop_ids(self) -> frozenset[int]:
        """Every token that ends an answer: the folder's end-of-text tokens and the template's end of turn.

        Raises:
            ModelError: there is none, so that no answer would ever end by itself.
        """
        found = set(_end_of_text(self.weights))
        if self.tokenizer.eos_id is not None:
            found.add(self.tokenizer.eos_id)
        text, _ = self.template.render(
            [*_conversation("question", "system"), {"role": "assistant", "content": _ANSWER}]
        )
        _, _, after_answer = text.rpartition(_ANSWER)
        if end_of_turn := self.tokenizer.special_pattern.search(after_answer):
            found.add(self.tokenizer.special_tokens[end_of_turn.group()])
        if not found:
            raise ModelError(
                f"no token ends an answer in {self.weights}",
                "give the folder a generation_config.json with eos_token_id, or set chat_template",
            )
        return frozenset(found)


def check_prompts(prompts: list[tuple[int, ...]], shape: ModelShape, max_new_tokens: int) -> None:
    """Refuses prompts that the model can't take, before its weights are loaded.

    Raises:
        ModelError: a token outside the model's vocabulary, or a prompt and its answer longer than the model's positions.
    """
    largest, longest = max(map(max, prompts)), max(map(len, prompts))
    if largest >= shape.vocab_size:
        raise ModelError(
            f"the tokenizer gives token {largest:,}, the model's vocabulary has {shape.vocab_size:,}",
            "the folder's tokenizer belongs to another model",
        )
    if longest + max_new_tokens > shape.max_positions:
        fits = shape.max_positions - longest
        raise ModelError(
            f"prompts of up to {longest:,} tokens and answers of {max_new_tokens:,} exceed the model's {shape.max_positions:,} positions",
            f"set suite.max_new_tokens={fits} or less" if fits > 0 else "this model is too short for the suite",
        )


def _conversation(question: str, system_prompt: str) -> list[Message]:
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": question}]


def _end_of_text(weights: Path) -> list[int]:
    """eos_token_id of generation_config.json or, where that says nothing, of config.json."""
    for name in ("generation_config.json", "config.json"):
        path = weights / name
        value: Any = None
        if path.is_file():
            try:
                value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (ValueError, AttributeError):
                raise ModelError(
                    f"{path} is not a JSON object", "copy it again from where the model came from"
                ) from None
        if value is not None:
            return [value] if isinstance(value, int) else [int(v) for v in value]
    return []
