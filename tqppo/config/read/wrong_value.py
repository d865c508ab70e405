"""Describes a value that its setting does not accept, and how to write the value that was probably meant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, get_args

from tqppo.config.diagnostics import Diagnostic
from tqppo.config.read.assignment import KeyAssignment
from tqppo.config.read.nearest import nearest
from tqppo.config.schema import Setting, describe
from tqppo.config.values import brief_toml, kind_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_RANGE_FIXES: dict[str, Callable[[ErrorDetails], str]] = {
    "greater_than_equal": lambda error: f"write {error['ctx']['ge']} or more",
    "greater_than": lambda error: f"write a number above {error['ctx']['gt']:g}",
    "less_than_equal": lambda error: f"write {error['ctx']['le']:.10g} or less",
    "less_than": lambda error: f"write a number below {error['ctx']['lt']:g}",
    "finite_number": lambda error: "write a finite number",
}


def wrong_value(one: KeyAssignment, setting: Setting, errors: list[ErrorDetails]) -> Diagnostic:
    """The problem behind pydantic's errors about one value, placed at the list element if it concerns one."""
    first = errors[0]
    index = next((part for part in first["loc"] if isinstance(part, int)), None)
    at = one.element_spans[index] if index is not None and index < len(one.element_spans) else one.value_span
    value = first["input"] if index is not None else one.value
    found, allowed = brief_toml(value), setting.allowed
    if first["type"] == "literal_error" and isinstance(value, str):
        code, message, fix = "E104", f"{one.key} cannot be {found}", _choice_fix(value, setting)
    elif first["type"] in _RANGE_FIXES and len(errors) == 1:
        code, message, fix = "E105", f"{one.key} is out of range: {found}", _RANGE_FIXES[first["type"]](first)
    else:
        is_entry = len(one.path) > setting.depth
        allowed = describe(get_args(setting.field.annotation)[1]) if is_entry else allowed
        code, message = "E103", f"{one.key} must be {allowed}"
        fix = f"write {allowed}" if is_entry else conversion(value, setting)
        found = found if isinstance(value, bool) else f"{kind_of(value)} {found}"
    return Diagnostic("error", code, message, at, one.key, found, allowed, fix)


def _choice_fix(value: str, setting: Setting) -> str:
    names = [str(each) for each in setting.choices]
    close = nearest(value, names, limit=1)
    return f'did you mean "{close[0]}"?' if close else f"write one of {', '.join(names)}"


def conversion(value: object, setting: Setting) -> str:
    """How to write a value of the wrong type in the right one."""
    kind = setting.field.annotation
    wants_list = "list" in str(kind)
    if isinstance(value, str) and value.lower() in ("true", "false") and kind is bool:
        return f"write {value.lower()}, without quotes"
    if isinstance(value, str) and kind in (int, float):
        return f"write {value}, without quotes" if _is_number(value) else "write a number"
    if isinstance(value, float) and kind is int:
        return f"write {round(value)}" if not math.isnan(value) and abs(value) < 1e15 else "write a whole number"
    if wants_list and not isinstance(value, list) and str in get_args(kind):
        return f'write ["{value}"]' if not isinstance(value, dict) else "write a list"
    if kind is str and not isinstance(value, (list, dict)):
        return f'write "{brief_toml(value)}", in quotes'
    if kind is bool:
        return "write true or false"
    return f"write {setting.allowed}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
