"""A teacher's own prompt: the student's question with extra text for the teacher, such as the reference answer.

The rollout worker renders it as the dataset renders prompts, and the teacher scores the student's answer after it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from string import Formatter

from tqppo.data.dataset import Message
from tqppo.data.prompts import Prompt
from tqppo.errors import DataError
from tqppo.rollout.template import ChatTemplate


def filled_in(template: str, prompt: Prompt, question: str) -> str:
    """The template with {prompt}, {answer} and columns of the row; a brace itself is written twice."""
    own: dict[str, object] = {"prompt": question, "answer": prompt.answer}
    pieces: list[str] = []
    for text, field, _, _ in Formatter().parse(template):
        pieces.append(text)
        if field is not None:
            pieces.append(_text(own[field] if field in own else _column(prompt, field)))
    return "".join(pieces)


def _column(prompt: Prompt, name: str) -> object:
    value = prompt.column(name)
    if value is None:
        raise DataError(
            f"prompt {prompt.uid}: the teacher's prompt asks for {{{name}}}, and the row has no such column"
        )
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def own_prompt(template: str, prompt: Prompt, chat: ChatTemplate, *, is_chat: bool) -> list[int]:
    """The tokens of the teacher's prompt. In a chat, the template replaces the last message of the user."""
    if not is_chat:
        return chat.tokenizer.encode(filled_in(template, prompt, prompt.text), add_special_tokens=True)
    messages: list[Message] = [dict(message) for message in prompt.messages]
    asked = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    if not asked:
        raise DataError(f"prompt {prompt.uid}: it has no user message that the teacher's prompt could replace")
    last = messages[asked[-1]]
    last["content"] = filled_in(template, prompt, str(last["content"]))
    return chat.tokenizer.encode(chat.render(messages, generate=True), add_special_tokens=False)


def before_response(own: Sequence[int], prompt: Prompt, row_prompt: Sequence[int]) -> tuple[int, ...]:
    """The teacher's prompt for one row: in later turns of a session, what followed the question follows here too."""
    length = len(prompt.tokens)
    if list(row_prompt[:length]) != list(prompt.tokens):
        raise DataError(
            f"prompt {prompt.uid}: a trajectory does not begin with the prompt, so the teacher's own prompt cannot "
            "replace it; use an agent loop that keeps the prompt, or no teachers.NAME.prompt"
        )
    return (*own, *row_prompt[length:])
