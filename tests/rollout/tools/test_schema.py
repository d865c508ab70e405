from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from tqppo.errors import ConfigError
from tqppo.rollout.tools.schema import Tool, WrongArguments, function_schema


def search(query: str, top: int = 3, kind: Literal["web", "news"] = "web", tags: list[str] | None = None) -> str:
    """Look something up.

    The newest pages come first.

    Args:
        query: what to look for
        top (int): how many pages

    Returns:
        the pages
    """
    return query * top + kind + str(tags)


def sphinx(a: float, b: dict[str, int]) -> float:
    """Compute.

    :param a: the number
    :returns: another
    """
    return a + len(b)


def test_a_signature_and_its_docstring_become_a_schema() -> None:
    assert function_schema(search, "tools.py:search") == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Look something up.\n\nThe newest pages come first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for"},
                    "top": {"type": "integer", "description": "how many pages"},
                    "kind": {"type": "string", "enum": ["web", "news"]},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                },
                "required": ["query"],
            },
        },
    }


def test_docstrings_in_the_other_style_are_read_too() -> None:
    tool = Tool.of(function_schema(sphinx, "m:sphinx"))
    assert tool.parameters == {
        "a": {"type": "number", "description": "the number"},
        "b": {"type": "object", "additionalProperties": {"type": "integer"}},
    }
    assert tool.required == ("a", "b")


def bare(query) -> str:  # type: ignore[no-untyped-def]
    return str(query)


def many(*queries: str) -> str:
    return "".join(queries)


def odd(query: bytes) -> str:
    return str(query)


def unknown(query: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
    return str(query)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (bare, "argument 'query' has no annotation, such as `: str`"),
        (many, "cannot be described to a model"),
        (odd, r"argument 'query' has the type <class 'bytes'>; JSON has str"),
        (unknown, "its annotations cannot be read"),
    ],
)
def test_functions_that_cannot_be_described_are_refused(function: Callable[..., object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        function_schema(function, f"m:{function.__name__}")


def test_arguments_are_converted_where_text_stands_for_a_number() -> None:
    tool = Tool.of(function_schema(search, "m:search"))
    assert tool.arguments({"query": "x", "top": "5", "tags": '["a"]'}) == {"query": "x", "top": 5, "tags": ["a"]}
    assert tool.arguments({"": "12", "top": 2.0}) == {"query": "12", "top": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "'query' is missing"),
        ({"query": "x", "limit": 3}, r"search takes \(query, top, kind, tags\): no argument 'limit'"),
        ({"query": 3}, "argument 'query' should be string, not 3"),
        ({"query": "x", "top": "many"}, "argument 'top' should be integer, not 'many'"),
        ({"query": "x", "top": True}, "argument 'top' should be integer, not True"),
        ({"query": "x", "kind": "film"}, r"argument 'kind' should be \['web', 'news'\], not 'film'"),
        ({"query": "x", "tags": "[" * 100_000}, "argument 'tags' should be another type"),
    ],
)
def test_arguments_that_do_not_fit_are_told_to_the_model(given: dict[str, object], message: str) -> None:
    with pytest.raises(WrongArguments, match=message):
        Tool.of(function_schema(search, "m:search")).arguments(given)
