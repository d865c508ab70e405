"""Reads the tool calls in a turn of the model, in the common formats. Whatever the model writes, a parser returns.

A call that cannot be read has an `error`, which the model gets to see. A call among thoughts (`<think>…</think>`) is a
thought.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tqppo.errors import ConfigError
from tqppo.rollout.tools.calls import Reading, ToolCall
from tqppo.rollout.tools.schema import FIRST

Parser = Callable[[str], Reading]


def hermes(text: str) -> Reading:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Hermes and Qwen write it."""
    thoughts, spoken = _split(text)
    outside, pieces = _between(spoken, "<tool_call>", "</tool_call>")
    return Reading(thoughts + outside, tuple(_json_call(each) for each in pieces))


def llama3_json(text: str) -> Reading:
    """`{"name": …, "parameters": {…}}` as the whole turn, several separated by `;`, perhaps after `<|python_tag|>`."""
    thoughts, spoken = _split(text)
    body = spoken.rpartition("<|python_tag|>")[2].strip()
    if not body.startswith("{") or '"name"' not in body:
        return Reading(text)
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            calls.append(ToolCall("", error=f"the call is not valid JSON: {error}"))
            break
        calls.append(_as_call(value))
        body = body[end:].lstrip().removeprefix(";").lstrip()
    return Reading(thoughts, tuple(calls))


def mistral(text: str) -> Reading:
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` per call."""
    thoughts, spoken = _split(text)
    before, *parts = spoken.split("[TOOL_CALLS]")
    return Reading(thoughts + before, tuple(call for part in parts for call in _mistral_calls(part)))


def xml(text: str) -> Reading:
    """`<function=name><parameter=key>value</parameter></function>`, perhaps within `<tool_call>`."""
    thoughts, spoken = _split(text)
    outside, pieces = _between(spoken, "<function=", "</function>")
    outside = outside.replace("<tool_call>", "").replace("</tool_call>", "")
    return Reading(thoughts + outside.strip(), tuple(_xml_call(each) for each in pieces))


def tiny(text: str) -> Reading:
    """`@name(text)`: the short form for small models. The text is the tool's first argument."""
    calls, rest, begin = [], [], 0
    for found in re.finditer(r"@([A-Za-z_]\w*)\(", text):
        if found.start() < begin:
            continue
        rest.append(text[begin : found.start()])
        end = _closing(text, found.end())
        argument = text[found.end() : end - 1] if end else ""
        arguments = {FIRST: argument} if argument else {}
        calls.append(ToolCall(found[1], arguments, "" if end else "the call has no closing parenthesis"))
        begin = end or len(text)
    return Reading("".join([*rest, text[begin:]]), tuple(calls))


PARSERS: dict[str, Parser] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral,
    "xml": xml,
    "tiny": tiny,
}
MARKS = {"<function=": "xml", "<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json"}


def parser_named(name: str, template: str) -> Parser:
    """A parser by name; `auto` takes the one whose format the chat template writes."""
    if name == "auto":
        name = next((parser for mark, parser in MARKS.items() if mark in template), "")
        if not name:
            known = ", ".join(PARSERS)
            raise ConfigError(
                "rollout.agent_args.parser: the chat template has no known format of tool calls; "
                f"choose one of {known}, and describe it to the model in data.system_prompt"
            )
    return PARSERS[name]


class _Piece(NamedTuple):
    text: str
    is_closed: bool


def _split(text: str) -> tuple[str, str]:
    """The model's thoughts with their marks, and what it says after them. The template may have opened the thoughts."""
    if "</think>" in text:
        thoughts, mark, spoken = text.partition("</think>")
        return thoughts + mark, spoken
    spoken, mark, thoughts = text.partition("<think>")
    return (text, "") if mark else ("", text)


def _between(text: str, opening: str, closing: str) -> tuple[str, list[_Piece]]:
    """The text outside of the marks, and the pieces within. A piece that is not closed reaches to the end."""
    outside, pieces = "", []
    rest = text
    while opening in rest:
        before, _, rest = rest.partition(opening)
        piece, found, rest = rest.partition(closing)
        outside += before
        pieces.append(_Piece(piece, bool(found)))
    return (outside + rest).rstrip("\n"), pieces


def _json_call(piece: _Piece) -> ToolCall:
    if not piece.is_closed:
        return ToolCall("", error="the call has no end")
    try:
        return _as_call(json.loads(piece.text))
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"the call is not valid JSON: {error}")


def _as_call(value: object) -> ToolCall:
    """A call from its JSON value. Arguments may be an object or the text of one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", error='a call is an object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(value["name"], error=f"the arguments are not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(value["name"], error="the arguments are not an object")
    return ToolCall(value["name"], arguments)


def _mistral_calls(part: str) -> Iterator[ToolCall]:
    if "[ARGS]" in part:
        name, _, arguments = part.partition("[ARGS]")
        yield _json_arguments(name.partition("[CALL_ID]")[0].strip(), arguments)
        return
    try:
        values = json.loads(part)
    except (ValueError, RecursionError) as error:
        yield ToolCall("", error=f"the calls are not a JSON list: {error}")
        return
    yield from map(_as_call, values if isinstance(values, list) else [values])


def _json_arguments(name: str, text: str) -> ToolCall:
    try:
        return _as_call({"name": name, "arguments": json.loads(text)})
    except (ValueError, RecursionError) as error:
        return ToolCall(name, error=f"the arguments are not valid JSON: {error}")


def _xml_call(piece: _Piece) -> ToolCall:
    name, _, body = piece.text.partition(">")
    if not piece.is_closed:
        return ToolCall(name.strip(), error="the call has no end")
    arguments: dict[str, object] = {}
    for parameter in body.split("<parameter=")[1:]:
        key, _, value = parameter.partition(">")
        arguments[key.strip()] = value.rpartition("</parameter>")[0].strip("\n")
    return ToolCall(name.strip(), arguments)


def _closing(text: str, begin: int) -> int:
    """The index after the parenthesis that closes the one before `begin`; 0 if there is none."""
    depth = 1
    for i in range(begin, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i + 1
    return 0
