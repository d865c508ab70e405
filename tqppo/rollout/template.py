"""The chat template as text in, text out. `chat` keeps the tokens of a session; `doctor.template` looks for faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol, cast

from tqppo.data.dataset import Message

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # stands for a content whose place in the text is wanted
Schema = Mapping[str, object]  # a tool as templates take it: {"type": "function", "function": {...}}


class TemplateRefused(Exception):
    """The chat template raised an error for these messages."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that loops use."""

    chat_template: str | dict[str, str] | None  # several by name, or one
    eos_token_id: int | None
    eos_token: str | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def get_added_vocab(self) -> dict[str, int]: ...


class ChatTemplate:
    """Renders messages with the tokenizer's own template. Dates that a template inserts stay those of its making."""

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, object] | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = dict(options or {})  # further arguments of the template, such as enable_thinking
        self.special = {number: text for text, number in tokenizer.get_added_vocab().items()}
        self._now = datetime.now()

    @property
    def exists(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def with_options(self, options: Mapping[str, object]) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, {**self.options, **options})

    def render(self, messages: Sequence[Message], *, tools: Sequence[Schema] = (), generate: bool = False) -> str:
        """The text of these messages; with `generate`, up to where the assistant begins to speak."""
        from jinja2 import TemplateError

        apply = cast("Callable[..., str]", getattr(self.tokenizer, "apply_chat_template"))  # noqa: B009
        now = {"strftime_now": self._now.strftime}
        try:
            return apply(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generate,
                **{**now, **self.options},
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateRefused(f"the chat template rejects messages with the roles {roles}: {error}") from error

    def opening(self, messages: Sequence[Message], *, tools: Sequence[Schema] = ()) -> str:
        """What the template writes into the assistant's turn before the model speaks, such as `<think>`."""
        try:
            begun = self.render(messages, tools=tools, generate=True)
            spoken = self.render([*messages, {"role": "assistant", "content": MARK}], tools=tools)
        except TemplateRefused:
            return ""
        header = spoken.partition(MARK)[0]
        return begun[len(header) :] if begun.startswith(header) else ""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that follows a special token; special tokens in it are recognised."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int], *, special: bool = True) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=not special))

    def defused(self, text: str) -> str:
        """The text without special tokens: one that a tool prints becomes ordinary text, with a space after its first
        character."""
        for token in sorted(self.special.values(), key=len, reverse=True):
            text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text


def num_common(one: str, two: str) -> int:
    """How many characters two texts share at their beginning."""
    shorter = min(len(one), len(two))
    return next((i for i in range(shorter) if one[i] != two[i]), shorter)
