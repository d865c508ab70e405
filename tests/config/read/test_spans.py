"""Positions from tree-sitter against values from tomllib."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, event, given, settings

from tqppo.config.read.spans import Document, parse, parse_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BARE = st.text("abcdefgxyz0123456789_-", min_size=1, max_size=6)
TEXT = st.text("aZ 9é漢🙂ñ#=[]{}.,'\"\\", max_size=8)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


SCALARS = st.one_of(
    st.integers(-(10**9), 10**9).map(str),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(lambda x: repr(float(x))),
    st.sampled_from(["true", "false", "inf", "-inf", "0xff", "1_000", "1e6", "1979-05-27", "07:32:00"]),
    st.sampled_from(["1979-05-27T07:32:00Z", "'raw \\ text'", '""', "''"]),
    TEXT.map(quoted),
    st.lists(TEXT.map(lambda each: each.replace('"', "").replace("\\", "")), min_size=1, max_size=3).map(
        lambda lines: '"""\n' + "\n".join(lines) + '"""'
    ),
)
COMMENTS = st.sampled_from(["", "  # a comment", " # ünï = [1]", "\t#[x]"])


@st.composite
def values(draw: st.DrawFn, depth: int = 2) -> str:
    kind = draw(st.sampled_from(["scalar", "scalar", "array", "inline"])) if depth else "scalar"
    if kind == "array":
        gap = draw(st.sampled_from([" ", "\n  ", "  # inside\n  "]))
        inside = draw(st.lists(values(depth - 1), max_size=3))
        return "[" + "".join(f"{gap}{each}," for each in inside) + "\n]"
    if kind == "inline":
        names = draw(st.lists(keys(), max_size=3, unique_by=lambda key: key.split(".")[0].strip('"')))
        return "{" + ", ".join(f"{name} = {draw(values(0)).replace(chr(10), '')}" for name in names) + "}"
    return draw(SCALARS)


@st.composite
def keys(draw: st.DrawFn) -> str:
    part = st.one_of(BARE, TEXT.map(lambda text: quoted(f"q{text}")))
    return draw(st.sampled_from([".", " . "])).join(draw(st.lists(part, min_size=1, max_size=3)))


@st.composite
def documents(draw: st.DrawFn) -> str:
    lines: list[str] = []

    def statements() -> None:
        for name in draw(st.lists(keys(), max_size=4)):
            lines.append(f"{name} = {draw(values())}{draw(COMMENTS)}")
            lines.extend(draw(st.sampled_from([[], [""], ["# alone"]])))

    statements()
    for header in draw(st.lists(keys(), max_size=4)):
        lines.append(draw(st.sampled_from([f"[{header}]", f"[ {header} ]", f"[[{header}]]"])) + draw(COMMENTS))
        statements()
    return draw(st.sampled_from(["\n", "\r\n"])).join("\n".join(lines).split("\n")) + "\n"


def leaves(path: tuple[Any, ...], value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        return [leaf for name, inner in value.items() for leaf in leaves((*path, name), inner)]
    if isinstance(value, list) and value:
        return [leaf for i, inner in enumerate(value) for leaf in leaves((*path, i), inner)]
    return [(path, value)]


def spelled(document: Document, path: tuple[Any, ...]) -> str:
    """The text that a value's span covers."""
    span = document.value_spans[path]
    lines = document.text.split("\n")
    start = sum(len(line) + 1 for line in lines[: span.line - 1]) + span.column - 1
    return document.text[start : start + span.width]


@pytest.mark.slow
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(documents())
def test_spans_and_values_agree_on_any_document(text: str) -> None:
    try:
        expected = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        event("keys collide")
        return
    event("a document")
    document = parse(text, "file.toml")
    assert document.values == expected
    assert document.problems == []
    for path, value in leaves((), expected):
        assert parse_value(spelled(document, path)) == value
        key = document.key_spans.get(path) if isinstance(path[-1], str) else None
        assert key is None or key.text == document.line(key.line)


def test_a_key_is_found_under_its_header_with_its_column() -> None:
    document = parse('[actor]\n  lr = 1e-3 # é\r\n[teachers."a b"]\nmatch = ["é", "x"]\n', "f.toml")
    lr, second = document.key_spans["actor", "lr"], document.value_spans["teachers", "a b", "match", 1]
    assert (lr.line, lr.column, lr.width, lr.text) == (2, 3, 2, "  lr = 1e-3 # é")
    assert (second.line, second.column, second.width) == (4, 15, 3)


def test_every_broken_line_is_reported_and_the_rest_is_still_read() -> None:
    document = parse("a = 1\nb = \nc = 3\nd = nope\ne = 5\n", "f.toml")
    assert [problem.span.line for problem in document.problems] == [2, 4]
    assert document.values == {"a": 1, "c": 3, "e": 5}


def test_an_open_bracket_is_one_problem_and_not_one_per_line() -> None:
    document = parse("a = [1,\nb = 2\nc = 3\nd = 4\n", "f.toml")
    assert len(document.problems) == 1


def test_depth_is_bounded_before_anything_recurses() -> None:
    for text in (
        "x = " + "[" * 5000 + "]" * 5000,
        "[" + ".".join("a" * 5000) + "]",
        "x = " + "{a=" * 300 + "1" + "}" * 300,
    ):
        assert parse(text, "f.toml").too_deep is not None
