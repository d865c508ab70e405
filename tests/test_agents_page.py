"""docs/agents.md: its files are written, its sessions are played, its settings exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo.builtin import AGENT_ARGUMENTS, AGENTS
from tqppo.cli import app
from tqppo.config.show.keys import all_keys

PAGE = (Path(__file__).parents[1] / "docs" / "agents.md").read_text()
FILES = dict(re.findall(r"```(?:toml|python)\n# (\S+\.(?:toml|py))\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
PLAYED = [each for each in COMMANDS if each.startswith("tqppo agent try")]
CHECKED = [each for each in COMMANDS if each not in PLAYED]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", PLAYED)
def test_a_session_of_the_page_is_played(command: str) -> None:
    _, *words = shlex.split(command)
    answer = CliRunner().invoke(app, [*words, "--set", "warm_start.steps=1"])
    assert answer.exit_code == 0, answer.output
    assert "turn 1 (" in answer.output
    assert "warning[" not in answer.output
    if "loop.toml" in command:
        assert "trajectory 2 of 2" in answer.output
        assert "<|user|>Really?<|assistant|>" in answer.output
        assert "agent/reviews 1" in answer.output
    if "game.toml" in command:
        assert "<|user|>Guess.<|assistant|>" in answer.output


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", CHECKED)
def test_a_config_of_the_page_is_accepted_without_a_complaint(command: str) -> None:
    _, name, *options = shlex.split(command)
    assert name in ("train", "validate-config")
    answer = CliRunner().invoke(app, ["validate-config", *options[:2], "--probe"])
    assert answer.exit_code == 0, answer.output
    assert "warning[" not in answer.output


def test_every_file_of_the_page_is_used_and_every_block_is_a_file() -> None:
    assert len(re.findall(r"```(?:toml|python)\n", PAGE)) == len(FILES) == 7
    configs = [name for name in FILES if name.endswith(".toml")]
    assert not [name for name in configs if not any(name in command for command in COMMANDS)]
    assert not [name for name in FILES if name.endswith(".py") and not any(name in FILES[each] for each in configs)]


def test_the_page_names_every_loop_and_only_settings_that_exist() -> None:
    assert not [name for name in AGENTS if f"| `{name}` |" not in PAGE]
    keys = {key.name for key in all_keys()}
    arguments = {f"rollout.agent_args.{name}" for names in AGENT_ARGUMENTS.values() for name in names}
    named = set(re.findall(r"`((?:rollout|algorithm)\.\w+(?:\.\w+)?)", PAGE))
    assert len(named) > 5
    assert not {name for name in named if name not in keys | arguments}
