"""docs/data-and-rewards.md: its files are written, its commands are run, its names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import Page, make_data_of_presets, run
from tqppo.builtin import REWARDS
from tqppo.data.layout import PROMPTS

PAGE = Page.read("docs/data-and-rewards.md")
AFTER = re.findall(r"`(tqppo (?:runs|eval|sample|chat|export)[^`]*)`", PAGE.text.split("## Afterwards")[1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    PAGE.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [each for each in PAGE.commands if " train " not in each])
def test_a_command_of_the_page_runs_without_a_complaint(command: str) -> None:
    make_data_of_presets(Path("copies"), "gsm8k")
    run(command)


@pytest.mark.slow
@pytest.mark.ray
def test_the_run_of_the_page_trains_and_answers_afterwards(folder: Path) -> None:
    for command in [*PAGE.commands_of("tqppo train"), *(each for each in AFTER if " rm " not in each)]:
        run(command, typed="2+2?\n\n")
    assert (folder / "hf" / "config.json").is_file()
    run("tqppo runs rm sums --yes")


def test_names_of_rewards_and_columns_exist() -> None:
    table = PAGE.text.split("| built in | score |")[1].split("```sh")[0]
    names = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert names == set(REWARDS) - {"task", "gym"}
    (listed,) = re.findall(r"The prompt is (.*?):", PAGE.text, re.DOTALL)
    assert tuple(re.findall(r"`(\w+)`", listed)) == PROMPTS


def test_every_block_of_code_is_a_file() -> None:
    assert len(PAGE.files) == 4
    assert not [each for each in PAGE.unused if each != "script.py"]  # what it does is tests/api/test_runs.py's
    assert AFTER
