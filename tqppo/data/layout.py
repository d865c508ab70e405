"""Rows, and which columns of a file hold their prompt, answer and source: as the config says, or found by themselves.

Names that verl, TRL and common datasets use are known. What cannot be found is an error with the line to write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeGuard

from tqppo.errors import DataError
from tqppo.tables import FileRow

AUTO = "auto"
DEFAULT_SOURCE_KEY = "data_source"
PROMPTS = ("prompt", "question", "messages", "problem", "instruction", "query", "conversation", "input")
ANSWERS = (
    "reward_model.ground_truth",
    "reward_spec.ground_truth",
    "ground_truth",
    "answer",
    "solution",
    "final_answer",
    "label",
    "target",
    "output",
    "completion",
)

Message = dict[str, object]  # of a chat: role, content, …


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `prompt` is plain text or a list of chat messages; `answer` and `extra` are JSON values."""

    prompt: str | list[Message]
    answer: object
    source: str
    extra: dict[str, object] = field(default_factory=dict)
    shown: tuple[list[Message], str] | None = None  # what a warm start learns instead of the answer


class Dataset(Protocol):
    """Rows by index."""

    def __len__(self) -> int: ...
    def row(self, index: int) -> Row: ...
    def where(self, index: int) -> str:
        """The row's name in messages, such as `train.jsonl:12`."""

    def fingerprint(self) -> str:
        """A digest that changes when the rows or their order change."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of the columns; a dot leads into a nested column, `auto` finds the column by itself.

    An empty `answer` means that rows have none.
    """

    prompt: str = AUTO
    answer: str = AUTO
    source: str = DEFAULT_SOURCE_KEY

    def found_in(self, columns: FileRow, where: str) -> Keys:
        """The names with `auto` replaced by the column that this row has."""
        prompt = self.prompt if self.prompt != AUTO else _first(columns, PROMPTS)
        if not prompt:
            raise DataError(f"{where}: no column looks like a prompt; {has(columns)}. To fix it, {_way_to(columns)}")
        answer = self.answer if self.answer != AUTO else self._answer(columns, prompt, where)
        return replace(self, prompt=prompt, answer=answer)

    @staticmethod
    def _answer(columns: FileRow, prompt: str, where: str) -> str:
        found = _first(columns, [name for name in ANSWERS if name != prompt])
        if not found and _spoken_answer(_value(columns, prompt)) is not None:
            return prompt
        if not found:
            fix = 'set data.answer_key to the column with it, or data.answer_key = "" if your reward needs none'
            empty = [name for name in ANSWERS if name in columns and columns[name] is None]
            what = f"column {empty[0]!r} is null" if empty else "no column looks like a reference answer"
            raise DataError(f"{where}: {what}; {has(columns)}. To fix it, {fix}")
        return found


def _way_to(columns: FileRow) -> str:
    """What to do about a row in which no column is known to hold the prompt."""
    if len(columns) == 1 and (other := next((each for each in (";", "\t", "|") if each in next(iter(columns))), "")):
        return f"separate the columns by commas: here {other!r} does"
    texts = {name: value for name, value in columns.items() if _is_prompt(value)}
    if not texts:
        return "add a column with text, or with chat messages that have role and content"
    longest = max(texts, key=lambda name: len(str(texts[name])))
    return f'set data.prompt_key to the column with the prompt, such as data.prompt_key = "{longest}"'


def to_row(columns: FileRow, keys: Keys, *, where: str, stem: str) -> Row:
    """Read a row in verl's layout (nested answer, `extra_info`) or TRL's (any further columns)."""
    keys = keys.found_in(columns, where)
    prompt = _lookup(columns, keys.prompt, where, "data.prompt_key")
    if not _is_prompt(prompt):
        raise DataError(
            f"{where}: column {keys.prompt!r} should be text or a list of chat messages, not {prompt!r:.80}"
        )
    if not isinstance(prompt, str):
        _check_messages(prompt, f"{where}: column {keys.prompt!r}")
    if keys.answer == keys.prompt:
        answer: object = _spoken_answer(prompt)
    else:
        answer = _lookup(columns, keys.answer, where, "data.answer_key") if keys.answer else None
    used = {key.split(".")[0] for key in (keys.prompt, keys.answer, keys.source)} | {"reward_model", "extra_info"}
    extra = {name: value for name, value in columns.items() if name not in used}
    further = columns.get("extra_info") or {}
    if not isinstance(further, dict):
        raise DataError(f"{where}: column 'extra_info' should be an object, not {further!r:.80}")
    return Row(_question(prompt), answer, _source(columns, keys, where, stem), extra | further)


def _source(columns: FileRow, keys: Keys, where: str, stem: str) -> str:
    if keys.source == DEFAULT_SOURCE_KEY and keys.source not in columns:
        return stem  # TRL's files have no such column, so the file's name is the source
    return str(_lookup(columns, keys.source, where, "data.source_key"))


def has(columns: Mapping[str, object]) -> str:
    return f"columns here: {', '.join(columns) or 'none'}"


def _first(columns: FileRow, names: Sequence[str]) -> str:
    return next((name for name in names if _value(columns, name) is not None), "")


def _value(columns: FileRow, key: str) -> object:
    """The value of a column, None if the row lacks it."""
    value: object = columns
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _lookup(columns: FileRow, key: str, where: str, setting: str) -> object:
    value: object = columns
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise DataError(f"{where}: no column {key!r}; {has(columns)}. Set {setting} to the one to use")
        value = value[part]
    return value


def _is_prompt(value: object) -> TypeGuard[str | list[Message]]:
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and "role" in each and "content" in each for each in value)
    )


def _check_messages(messages: list[Message], place: str) -> None:
    """DataError if a message has no text: a chat template would render `None`, or fail."""
    for number, message in enumerate(messages, 1):
        role, content = message["role"], message["content"]
        calls_tools = content is None and role == "assistant" and bool(message.get("tool_calls"))
        if not isinstance(role, str) or not (isinstance(content, str) or calls_tools or _is_parts(content)):
            wrong = f"role is {role!r:.40}" if not isinstance(role, str) else f"content is {content!r:.80}"
            raise DataError(f"{place}, message {number}: its {wrong}; both must be text")


def _is_parts(content: object) -> bool:
    """Whether a content is a list of parts, as `[{"type": "text", "text": "…"}]`."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


def text_of(message: Message) -> str:
    """The text of a message, also of one that is a list of parts; empty if it has none."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(str(part["text"]) for part in content)
    return "" if content is None else str(content)


def _question(prompt: str | list[Message]) -> str | list[Message]:
    """The prompt without the assistant's last message, which demonstrations have."""
    if isinstance(prompt, list) and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
        return prompt[:-1]
    return prompt


def _spoken_answer(prompt: object) -> object:
    """The assistant's last message of a chat, None if the chat does not end with one."""
    if _is_prompt(prompt) and not isinstance(prompt, str) and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
        return prompt[-1]["content"]
    return None
