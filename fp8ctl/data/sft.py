"""Rows of conversations to samples: settings applied, mask made, length dealt with, every outcome told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from fp8ctl.config.data_schema import DataPrepConfig
from fp8ctl.data import thoughts
from fp8ctl.data.chat import render
from fp8ctl.data.chat_template import ChatTemplate, TemplateLimitError, load_template
from fp8ctl.data.rows import BadRow, BadRowError, Conversation, Dropped, Encoded, Message, Sample
from fp8ctl.data.shards import count_trained
from fp8ctl.data.tokenizer import TextTokenizer
from fp8ctl.errors import DataError

_EXCERPT_CHARS = 200


class ConversationEncoder:
    """Encodes conversations one by one, as the settings of a preparation say."""

    def __init__(self, config: DataPrepConfig, tokenizer: TextTokenizer) -> None:
        """Raises DataError when the chat template can't be used at all."""
        self._config = config
        self._tokenizer = tokenizer
        self.template = load_template(config.chat_template, tokenizer, config.default_system)
        _try_out(self.template, tokenizer)
        if config.default_system == "none" and not self.template.knows("default_system"):
            raise DataError(
                f"the chat template {self.template.name} has no variable default_system, so nothing can be left out of it",
                "set chat_template to one of templates/chat, or default_system=keep, or system_prompt=TEXT",
            )

    def encode(self, row: Conversation) -> Encoded:
        """Samples of one conversation (several where it was split), or why there are none.

        Raises:
            DataError: `over_length=error` and the conversation is too long.
        """
        try:
            if row.tokens is not None:
                return self._fitted(row, *self._checked(row.tokens), parts=[])
            messages = self._settled(row.messages)
            ids, mask = self._render(messages, row)
            return self._fitted(row, ids, mask, messages)
        except BadRowError as error:
            text = str(row.messages[-1]["content"]) if row.messages else ""
            return BadRow(row.origin, error.message, ascii(text[:_EXCERPT_CHARS]))

    def _checked(self, tokens: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        largest, size = int(tokens[0].max()), self._tokenizer.vocab_size
        if largest >= size:
            raise BadRowError(f"input_ids holds {largest:,}, the tokenizer has {size:,} tokens")
        return tokens

    def _settled(self, messages: list[Message]) -> list[Message]:
        """The conversation as the template gets it."""
        roles = {m["role"] for m in messages}
        if "tool" in roles and not self.template.knows("tool"):
            raise BadRowError(f"the chat template {self.template.name} knows no tools")
        if any(m.get("tool_calls") for m in messages) and not self.template.knows("tool_calls"):
            raise BadRowError(f"the chat template {self.template.name} knows no calls of tools")
        if "developer" in roles and not self.template.knows("developer"):
            # the newer name of the same role
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if self._config.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self._config.system_prompt}, *messages]
        if self._config.thought_markers == "think":
            messages = thoughts.use_think_tags(messages)
        if self._config.check_thoughts:
            thoughts.check_tags(messages)
        return messages

    def _render(self, messages: list[Message], row: Conversation) -> tuple[np.ndarray, np.ndarray]:
        if row.tools and not self.template.knows("tools"):
            raise BadRowError(f"the chat template {self.template.name} knows no tools")
        return render(
            messages,
            self.template,
            self._tokenizer,
            tools=row.tools,
            control_tokens=self._config.chat_control_tokens,
            check_thoughts=self._config.check_thoughts,
        )

    # -------------------------------------------------------- length

    def _fitted(self, row: Conversation, ids: np.ndarray, mask: np.ndarray, parts: list[Message]) -> Encoded:
        limit, policy, key = self._config.max_tokens, self._config.over_length, _key(row)
        if limit is None or len(ids) <= limit:
            samples = [Sample(ids, mask, key)]
        elif policy == "drop":
            return Dropped("too_long", len(ids))
        elif policy == "error":
            raise DataError(
                f"{row.origin.file} line {row.origin.line} has {len(ids):,} tokens, max_tokens is {limit:,}",
                "raise max_tokens, or set over_length=drop, truncate_tail or split",
            )
        elif policy == "truncate_tail":
            samples = [Sample(ids[:limit], mask[:limit], key, "truncated", len(ids) - limit)]
        else:
            samples = [Sample(i, m, key, note) for i, m, note in self._split(row, ids, mask, parts, limit)]
        trained = [s for s in samples if count_trained(len(s.ids), s.mask)]
        if not trained:
            return Dropped("no_trained_token", len(ids))
        untrained = sum(len(s.ids) for s in samples) - sum(len(s.ids) for s in trained)
        if untrained:  # a part of a split with nothing to learn
            first = trained[0]
            trained[0] = Sample(first.ids, first.mask, key, first.note, first.tokens_cut + untrained)
        return trained

    def _split(
        self, row: Conversation, ids: np.ndarray, mask: np.ndarray, messages: list[Message], limit: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
        """As few parts as possible that fit, each a conversation of its own; what can't be parted between turns is cut inside."""
        system, exchanges = _exchanges(messages)
        while exchanges:
            taken, rendered = 1, self._render([*system, *exchanges[0]], row)
            low, high = 1, len(exchanges)
            while low < high and len(rendered[0]) <= limit:
                middle = (low + high + 1) // 2
                longer = self._render([*system, *(m for exchange in exchanges[:middle] for m in exchange)], row)
                if len(longer[0]) <= limit:
                    low, taken, rendered = middle, middle, longer
                else:
                    high = middle - 1
            yield from _pieces(*rendered, limit)
            exchanges = exchanges[taken:]
        if not messages:  # tokens without turns
            yield from _pieces(ids, mask, limit)


def _exchanges(messages: list[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The system message in front, and the rest cut before each question that follows an answer."""
    num_system = 1 if messages and messages[0]["role"] in ("system", "developer") else 0
    exchanges: list[list[Message]] = []
    for before, message in zip([None, *messages], messages, strict=False):
        if message is messages[0] and num_system:
            continue
        begins = before is not None and before["role"] == "assistant" and message["role"] == "user"
        if begins or not exchanges:
            exchanges.append([])
        exchanges[-1].append(message)
    return messages[:num_system], exchanges


def _pieces(ids: np.ndarray, mask: np.ndarray, limit: int) -> Iterator[tuple[np.ndarray, np.ndarray, str]]:
    note = "split" if len(ids) <= limit else "split_within_turn"
    for start in range(0, len(ids), limit):
        yield ids[start : start + limit], mask[start : start + limit], note


def _key(row: Conversation) -> int:
    """Hash of what was asked before the first answer.

    Answers to one question stay on one side: a validation question must not have been trained with another answer. Nor under
    another system message.
    """
    if row.tokens is not None:
        ids, mask = row.tokens
        question = ids[: int(np.argmax(mask))] if mask.any() else ids
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(question).tobytes())
    messages = row.messages
    first_answer = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    asked = [m for m in messages[:first_answer] if m["role"] == "user"] or messages[:first_answer] or messages
    text = "\x1e".join(f"{m['role']}\x1f{m['content']}" for m in asked)
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", errors="surrogatepass"))


def _try_out(template: ChatTemplate, tokenizer: TextTokenizer) -> None:
    """Refuses a template that no row could pass, before thousands of rows are put into quarantine.

    Raises:
        DataError: it runs on without end, takes all memory, or writes the beginning-of-text token twice.
    """
    try:
        text, _ = template.render([{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}])
    except TemplateLimitError as error:
        raise DataError(error.message, "set chat_template to one of templates/chat, or mend the template") from None
    except BadRowError:
        return  # it may want a system message, or tools: the rows will tell
    bos = tokenizer.template_variables.get("bos_token", "")
    if bos and text.startswith(bos + bos):
        raise DataError(
            f"the chat template {template.name} writes the beginning-of-text token {bos} twice",
            "take one out of the template",
        )
