"""Values as text."""

from __future__ import annotations

import datetime

import pytest

from tqppo.config.values import MAX_BRIEF, brief_toml, kind_of, toml_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (1e-06, "1e-06"),
        ('a "b"', '"a \\"b\\""'),
        ([1, "x"], '[1, "x"]'),
        ({"a": {"b": False}}, "{a = {b = false}}"),
    ],
)
def test_a_value_is_written_as_toml(value: object, text: str) -> None:
    assert toml_value(value) == text


def test_a_brief_value_is_cut_and_a_complete_one_is_not() -> None:
    long = ["word"] * 40
    assert brief_toml(long).endswith("…")
    assert len(brief_toml(long)) <= MAX_BRIEF
    assert toml_value(long).count("word") == 40


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, "true or false"), (1, "the whole number"), ("x", "the string"), ({}, "the table")],
)
def test_a_value_has_a_kind_in_words(value: object, kind: str) -> None:
    assert kind_of(value) == kind
    assert kind_of(datetime.date(2026, 1, 1)) == "the date or time"
