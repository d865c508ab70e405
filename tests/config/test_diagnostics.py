"""The three renderings of a problem."""

from __future__ import annotations

import json
import re

from tqppo.config.diagnostics import Diagnostic, Span, in_order, render_github, render_text, summary

PROBLEM = Diagnostic("error", "E101", "unknown key a,b: 50%", Span("x.toml", 3, 5, 2, "漢 = ab"), "a", fix="write\nit")


def test_caret_stands_under_the_token_behind_wide_characters() -> None:
    lines = render_text([PROBLEM]).splitlines()
    assert lines[3] == "3 | 漢 = ab"
    assert lines[4] == "  |      ^^"  # one more cell than characters before it


def test_colour_is_only_paint() -> None:
    assert re.sub(r"\x1b\[[0-9;]*m", "", render_text([PROBLEM], color=True)) == render_text([PROBLEM])


def test_json_has_every_part() -> None:
    each = json.loads(json.dumps(PROBLEM.as_dict()))
    assert (each["file"], each["line"], each["column"], each["end_column"]) == ("x.toml", 3, 5, 7)
    assert set(each) >= {"severity", "code", "message", "key", "found", "allowed", "fix", "source", "notes"}


def test_github_commands_escape_what_they_must() -> None:
    line = render_github([PROBLEM])
    place = "file=x.toml,line=3,col=5,endColumn=7"
    assert line == f"::error title=tqppo E101,{place}::unknown key a,b: 50%25%0Afix: write%0Ait\n"


def test_summary_counts_errors_and_warnings() -> None:
    warning = Diagnostic("warning", "W008", "empty")
    assert summary([PROBLEM, PROBLEM, warning]) == "1 error, 1 warning"
    assert summary([]) == "no problems"


def test_errors_come_first_then_places_and_duplicates_are_dropped() -> None:
    warning = Diagnostic("warning", "W008", "empty", Span("a.toml", 1, 1, 1, ""))
    later = Diagnostic("error", "E101", "unknown", Span("x.toml", 4, 1, 1, ""))
    assert in_order([warning, later, PROBLEM, later]) == [PROBLEM, later, warning]


def test_a_place_in_the_environment_is_named_by_its_variable() -> None:
    assert str(Span("environment", 1, 9, 2, "TQPPO__X=1")) == "environment:TQPPO__X:9"
    problem = Diagnostic("error", "E103", "wrong", Span("--set", 1, 10, 1, "actor.lr=x"))
    assert render_github([problem]) == "::error title=tqppo E103::wrong%0Ain --set: actor.lr=x\n"
