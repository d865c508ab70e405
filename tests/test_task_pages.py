"""docs/tasks/: each page is followed from its first command to its last, with fewer steps than it says.

What needs GPUs (files that end in `-gpu.toml`) is checked by `validate-config`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import ROOT, Page, follow

LONG = {"distillation": pytest.mark.long}  # two runs, and a model of each is asked
TASKS = sorted(path.stem for path in (ROOT / "docs" / "tasks").glob("*.md"))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("task", [pytest.param(each, marks=LONG.get(each, ())) for each in TASKS])
def test_a_newcomer_can_follow_the_page(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page.read(f"docs/tasks/{task}.md")
    page.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in page.commands:
        follow(command, may_train=True)
    assert list((tmp_path / "runs").glob("*/export/hf/config.json"))


@pytest.mark.parametrize("task", TASKS)
def test_every_file_of_the_page_is_used_and_a_run_is_part_of_it(task: str) -> None:
    page = Page.read(f"docs/tasks/{task}.md")
    assert not page.unused
    assert page.commands_of("tqppo train")
    assert any("-gpu.toml" in command for command in page.commands)


def test_there_is_a_page_for_each_kind_of_task() -> None:
    assert TASKS == ["distillation", "environment", "maths", "tools"]
