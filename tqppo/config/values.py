"""A value as text: as TOML writes it, shortened for messages, and the name of its kind."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping

MAX_BRIEF = 60
_KINDS: tuple[tuple[tuple[type, ...], str], ...] = (
    ((bool,), "true or false"),
    ((int,), "the whole number"),
    ((float,), "the number"),
    ((str,), "the string"),
    ((list,), "the list"),
    ((dict,), "the table"),
    ((datetime.date, datetime.time), "the date or time"),
)


def toml_value(value: object) -> str:
    """The complete value as TOML, on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {toml_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(each) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else brief_toml(value)


def brief_toml(value: object) -> str:
    """The value as a user writes it in TOML, cut after 60 characters and without escapes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, list):
        text = "[" + ", ".join(brief_toml(each) for each in value) + "]"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{name} = {brief_toml(each)}" for name, each in value.items()) + "}"
    else:
        text = str(value)
    return text if len(text) <= MAX_BRIEF else text[: MAX_BRIEF - 3] + "…"


def kind_of(value: object) -> str:
    """The kind of a TOML value in words, as in `found: the string "1e-3"`."""
    return next((words for kinds, words in _KINDS if isinstance(value, kinds)), type(value).__name__)
