"""Short pages of docs/: their files are written, their commands are run in order, in one folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ELSEWHERE, ROOT, Page, follow, make_data_of_presets
from tqppo import errors
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.config.sections import Config
from tqppo.config.show.keys import all_keys
from tqppo.data.recipes import RECIPES

QUICK = ("config", "gpus-and-clusters")
MISTAKES = """extends = "quickstart"

[algorithm]
advantage = "grop"

[actor]
mini_batch_size = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run: with the data that presets name, which only a network could bring."""
    monkeypatch.chdir(tmp_path)
    for name in RECIPES:
        make_data_of_presets(tmp_path / "copies", name)
    return tmp_path


@pytest.mark.parametrize("name", QUICK)
def test_the_commands_of_a_page_are_accepted_without_a_complaint(name: str, folder: Path) -> None:
    page = Page.read(f"docs/{name}.md")
    page.write(folder)
    for command in page.commands:
        follow(command.partition(" > ")[0])
    assert not page.unused


@pytest.mark.long
@pytest.mark.ray
def test_the_commands_of_the_page_about_engines_run(folder: Path) -> None:
    page = Page.read("docs/engines.md")
    page.write(folder)
    for command in page.commands:
        follow(command)


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_first_hour_can_be_followed(folder: Path) -> None:
    page = Page.read("docs/getting-started.md")
    for command in page.commands:
        follow(command, may_train="--name first" in command)
    assert (folder / "sorter" / "config.json").is_file()
    assert (folder / "runs" / "third" / "metrics.jsonl").is_file()
    rows = re.findall(r"^\| (`[a-z].*?) \|", page.text, re.M)
    files = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(files) > 5
    assert not [name for name in files if not (folder / "runs" / "first" / name).exists()]


def test_the_mistakes_are_shown_as_the_page_shows_them(folder: Path) -> None:
    (shown,) = re.findall(r"```\n(error\[.*?)```", Page.read("docs/config.md").text, re.DOTALL)
    shutil.copytree(ROOT / "presets", folder / "presets")
    (folder / "mine.toml").write_text(MISTAKES)
    assert render_text(compile_config(None, [Path("mine.toml")], environ={}).diagnostics) == shown


def test_keys_and_exit_codes_of_the_page_exist() -> None:
    text = Page.read("docs/config.md").text
    known = {key.name for key in all_keys()} | set(Config.model_fields)
    named = {name.replace("teachers.NAME", "teachers.*") for name in re.findall(r"`([a-z_]+\.[A-Z]*\.?[a-z_]+)`", text)}
    assert len(named) > 15
    assert not named - known - {"file.py", "tests.py"}
    codes = {int(code) for code in re.findall(r"^\| (\d) \|", text, re.M)}
    kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.TqppoError)]
    assert codes == {0} | {kind.exit_code for kind in kinds}


def test_the_queue_of_one_process_runs() -> None:
    names: dict[str, Any] = {}
    exec(Page.read("docs/queue.md").files["rows.py"], names)
    assert [row.tolist() for row in names["found"]["tokens"].unbind()] == [[0, 1, 2, 3, 4]]
    assert names["found"]["reward"].tolist() == [1.0]


@pytest.mark.usefixtures("local_ray")
def test_the_queue_of_several_processes_runs() -> None:
    names: dict[str, Any] = {"__name__": "workers"}
    exec(Page.read("docs/queue.md").files["workers.py"], names)
    assert [row.tolist() for row in names["result"].unbind()] == [[2.0] * 3, [2.0] * 3]


def test_only_commands_of_other_programs_are_not_tried() -> None:
    pages = (ROOT / "docs").rglob("*.md")
    programs = {command.split()[0] for path in pages for command in Page(path.read_text()).commands}
    assert programs <= {"tqppo", "python", "TQPPO_FAKE_GPUS=8", *ELSEWHERE}
