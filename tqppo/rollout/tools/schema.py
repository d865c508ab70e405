"""Tools as chat templates describe them: a JSON schema from a function's signature and docstring.

The process of the tools makes schemas; the loop checks the arguments of calls against them.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Union

from tqppo.errors import ConfigError

PLAIN: dict[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
PARAM_LINE = re.compile(r"\s*:param\s+(?:\w+\s+)?(\w+):\s*(.*)")
ARGUMENT_LINE = re.compile(r"\s+(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
FIRST = ""  # the name of an argument that a parser does not know: it belongs to the first parameter


class WrongArguments(Exception):
    """A call does not fit its tool; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the worker knows it. The function itself lives in the tools' processes."""

    name: str
    schema: Mapping[str, object]  # as templates take it: {"type": "function", "function": {...}}
    parameters: Mapping[str, Mapping[str, object]]
    required: tuple[str, ...]

    @classmethod
    def of(cls, schema: Mapping[str, object]) -> Tool:
        function = typing.cast(Mapping[str, object], schema["function"])
        parameters = typing.cast(Mapping[str, object], function["parameters"])
        properties = typing.cast(Mapping[str, Mapping[str, object]], parameters["properties"])
        required = typing.cast("list[str]", parameters["required"])
        return cls(str(function["name"]), schema, properties, tuple(required))

    def arguments(self, given: Mapping[str, object]) -> dict[str, object]:
        """The arguments of a call by name, with numbers that came as text converted; raises WrongArguments."""
        names = list(self.parameters)
        named = {(names[0] if key == FIRST and names else key): value for key, value in given.items()}
        unknown = [name for name in named if name not in self.parameters]
        missing = [name for name in self.required if name not in named]
        if unknown or missing:
            wrong = [f"no argument {name!r:.60}" for name in unknown] + [f"{name!r} is missing" for name in missing]
            raise WrongArguments(f"{self.name} takes ({', '.join(names)}): {', '.join(wrong)}")
        return {name: _fitting(name, value, self.parameters[name]) for name, value in named.items()}


def function_schema(function: Callable[..., object], name: str) -> dict[str, object]:
    """The schema of a function; ConfigError if it cannot be a tool."""
    if not callable(function):
        raise ConfigError(f"tool {name!r} is not a function")
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigError(f"tool {name!r}: its annotations cannot be read: {error}") from None
    summary, notes = read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, object] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name!r}: {parameter} cannot be described to a model; give each argument a name")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name!r}: argument {parameter.name!r} has no annotation, such as `: str`")
        described = type_schema(hints[parameter.name], f"tool {name!r}: argument {parameter.name!r}")
        if note := notes.get(parameter.name):
            described["description"] = note
        properties[parameter.name] = described
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    about = {"name": name.rpartition(":")[2], "description": summary, "parameters": parameters}
    return {"type": "function", "function": about}


def type_schema(annotation: object, what: str) -> dict[str, object]:
    """The JSON schema of an annotation."""
    if annotation in PLAIN:
        return {"type": PLAIN[annotation]}
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return {"type": PLAIN.get(type(inner[0]), "string"), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(each, what) for each in inner]}
    if annotation is list or origin is list:
        return {"type": "array", **({"items": type_schema(inner[0], what)} if inner else {})}
    if annotation is dict or origin is dict:
        return {"type": "object", **({"additionalProperties": type_schema(inner[1], what)} if inner else {})}
    allowed = "str, int, float, bool, list, dict, Literal and unions of them"
    raise ConfigError(f"{what} has the type {annotation}; JSON has {allowed}")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description, and what an `Args:` section or lines like `:param name: …` say of arguments."""
    summary: list[str] = []
    notes: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        heading = re.fullmatch(r"(\w+):\s*", line)
        in_arguments = section in ("Args", "Arguments", "Parameters")
        note = PARAM_LINE.match(line) or (ARGUMENT_LINE.match(line) if in_arguments else None)
        if heading:
            section = heading[1]
        elif note:
            notes[note[1]] = note[2].strip()
        elif not section and not line.startswith(":"):
            summary.append(line)
    return "\n".join(summary).strip(), notes


def _fitting(name: str, value: object, schema: Mapping[str, object]) -> object:
    """The value as its parameter takes it. Text is read as JSON where text is not wanted."""
    if _fits(value, schema):
        return value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            read = value
        if _fits(read, schema):
            return read
    if isinstance(value, float) and value.is_integer() and _fits(int(value), schema):
        return int(value)
    wanted = schema.get("enum") or schema.get("type") or "another type"
    raise WrongArguments(f"argument {name!r} should be {wanted}, not {value!r:.60}")


def _fits(value: object, schema: Mapping[str, object]) -> bool:
    if choices := typing.cast("list[Mapping[str, object]] | None", schema.get("anyOf")):
        return any(_fits(value, each) for each in choices)
    if "enum" in schema:
        return value in typing.cast("list[object]", schema["enum"])
    match schema.get("type"):
        case "string":
            return isinstance(value, str)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            inner = typing.cast("Mapping[str, object]", schema.get("items", {}))
            return isinstance(value, list) and all(_fits(each, inner) for each in value)
        case "object":
            inner = typing.cast("Mapping[str, object]", schema.get("additionalProperties", {}))
            return isinstance(value, dict) and all(_fits(each, inner) for each in value.values())
    return True
