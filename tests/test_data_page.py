"""docs/data-and-rewards.md: its files are written, its commands are run, its names exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo.builtin import REWARDS
from tqppo.cli import app
from tqppo.data.layout import PROMPTS

PAGE = (Path(__file__).parents[1] / "docs" / "data-and-rewards.md").read_text()
FILES = dict(re.findall(r"```(?:toml|python)\n# (\S+\.(?:toml|py))\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
AFTER = re.findall(r"`(tqppo (?:runs|eval|sample|chat|export)[^`]*)`", PAGE.split("## Afterwards")[1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (rows,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "rows.jsonl").write_text(rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [each for each in COMMANDS if not each.startswith("tqppo train")])
def test_a_command_of_the_page_runs_without_a_complaint(command: str) -> None:
    _, *words = shlex.split(command)
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    assert "warning[" not in answer.output


@pytest.mark.slow
@pytest.mark.ray
def test_the_run_of_the_page_trains_and_answers_afterwards(folder: Path) -> None:
    cli = CliRunner()
    (train,) = (each for each in COMMANDS if each.startswith("tqppo train"))
    for command in [train, *(each for each in AFTER if " rm " not in each)]:
        answer = cli.invoke(app, shlex.split(command)[1:], input="2+2?\n\n")
        assert answer.exit_code == 0, f"{command}\n{answer.output}"
    assert (folder / "hf" / "config.json").is_file()
    assert cli.invoke(app, ["runs", "rm", "sums", "--yes"]).exit_code == 0


def test_names_of_rewards_and_columns_exist() -> None:
    table = PAGE.split("| built in | score |")[1].split("```sh")[0]
    names = {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert names == set(REWARDS) - {"task", "gym"}
    (listed,) = re.findall(r"The prompt is (.*?):", PAGE, re.DOTALL)
    assert tuple(re.findall(r"`(\w+)`", listed)) == PROMPTS


def test_every_block_of_code_is_a_file() -> None:
    assert len(re.findall(r"```(?:toml|python)\n", PAGE)) == len(FILES) == 3
    assert AFTER
