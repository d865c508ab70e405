"""docs/agents.md: its files are written, its sessions are played, its settings exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.pages import Page, checked, run
from tqppo.builtin import AGENT_ARGUMENTS, AGENTS
from tqppo.config.show.keys import all_keys

PAGE = Page.read("docs/agents.md")
PLAYED = PAGE.commands_of("tqppo agent try")
CHECKED = [each for each in PAGE.commands if each not in PLAYED]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    PAGE.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", PLAYED)
def test_a_session_of_the_page_is_played(command: str) -> None:
    output = run(command, "--set", "warm_start.steps=1")
    assert "turn 1 (" in output
    if "loop.toml" in command:
        assert "trajectory 2 of 2" in output
        assert "<|user|>Really?<|assistant|>" in output
        assert "agent/reviews 1" in output
    if "game.toml" in command:
        assert "<|user|>Guess.<|assistant|>" in output


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", CHECKED)
def test_a_config_of_the_page_is_accepted_without_a_complaint(command: str) -> None:
    checked(command, "--probe")


def test_every_file_of_the_page_is_used_and_every_block_is_a_file() -> None:
    assert len(PAGE.files) == 7
    assert not PAGE.unused


def test_the_page_names_every_loop_and_only_settings_that_exist() -> None:
    assert not [name for name in AGENTS if f"| `{name}` |" not in PAGE.text]
    keys = {key.name for key in all_keys()}
    arguments = {f"rollout.agent_args.{name}" for names in AGENT_ARGUMENTS.values() for name in names}
    named = set(re.findall(r"`((?:rollout|algorithm)\.\w+(?:\.\w+)?)", PAGE.text))
    assert len(named) > 5
    assert not {name for name in named if name not in keys | arguments}
