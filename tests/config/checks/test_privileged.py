"""A teacher's own prompt can be filled in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tqppo.config.checks.privileged import fields_of
from tqppo.config.compile import compile_config


def codes(prompt: str, *sets: str) -> list[str]:
    teacher = ["mode=distill", "teachers.t.path=student", f"teachers.t.prompt={json.dumps(prompt)}"]
    return [each.code for each in compile_config(None, [], [*teacher, *sets], {}).diagnostics]


def test_prompt_and_answer_are_fields_of_every_row() -> None:
    assert codes("{prompt}\nReference: {answer}") == []
    assert codes("{prompt} {{literally}}") == []
    assert codes("{prompt} {answer}", "data.answer_key=") == ["E524"]


def test_columns_are_looked_for_in_every_row(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    rows = [{"prompt": "1", "extra_info": {"hint": "a"}}, {"prompt": "2", "hint": "b"}]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert codes("{prompt} {hint}", f"data.train={path}") == []
    path.write_text(path.read_text() + '{"prompt": "3"}\n')
    assert codes("{prompt} {hint}", f"data.train={path}") == ["E524"]
    assert codes("{prompt} {hint}") == ["E524"]  # rows of tasks have no further columns


@pytest.mark.parametrize("template", ["{prompt", "{prompt} {}", "{prompt} {0}", "{prompt!r}", "{prompt:>9}", "{a b}"])
def test_what_cannot_be_filled_in_by_name_is_refused(template: str) -> None:
    assert codes(template) == ["E522"]


def test_fields_are_found_in_order() -> None:
    assert list(fields_of("{prompt} and {extra.hint} {{no}} {answer}")) == ["prompt", "extra.hint", "answer"]
