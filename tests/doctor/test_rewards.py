"""`reward try`: scores on rows, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.data.prompts import Prompt
from tqppo.doctor.rewards import TriedAnswer, try_reward
from tqppo.rewards.scorer import ScorerSpec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n{"question": "3+3?", "answer": "6"}\n')
    (tmp_path / "mine.py").write_text(
        "def grade(completions, answer, **columns):\n"
        "    return [float(a == b) for a, b in zip(completions, answer)]\n\n"
        "def broken(completions, **columns):\n    return [columns['tests']]\n"
    )
    return tmp_path


def test_the_reference_and_an_empty_answer_are_scored() -> None:
    prompt = Prompt("p", 0, [1], "4", "s", {}, "2+2?")
    first, second = try_reward(ScorerSpec("exact_match"), [("rows:1", prompt)], [""], references=True)
    assert (first.where, first.answer, first.score, second.answer, second.score) == ("rows:1", "4", 1.0, "", 0.0)
    assert isinstance(first, TriedAnswer)


def test_the_command_prints_scores_on_rows(folder: Path) -> None:
    command = ["reward", "try", f"{folder}/mine.py:grade", "--data", f"{folder}/rows.jsonl", "--answer", "6"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[1:3] for line in lines[1:]] == [['"6"', "0"], ['"6"', "1"]]
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert [each["score"] for each in found] == [0.0, 1.0]


def test_a_function_that_fails_says_where(folder: Path) -> None:
    result = CliRunner().invoke(app, ["reward", "try", f"{folder}/mine.py:broken", "--data", f"{folder}/rows.jsonl"])
    assert result.exit_code == 1
    assert "KeyError: 'tests'" in result.output
    assert f"{folder}/mine.py:5" in result.output


def test_without_rows_it_says_what_is_missing() -> None:
    result = CliRunner().invoke(app, ["reward", "try", "exact_match"])
    assert result.exit_code == 2
    assert "--data FILE" in result.output
