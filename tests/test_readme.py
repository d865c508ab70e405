"""What the README shows is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.pages import ROOT, Page, checked, follow
from tqppo import dataflow
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text

README = Page.read("README.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    README.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("folder")
def test_the_commands_of_the_readme_run() -> None:
    """What trains on one's own data is run, and every other run is checked."""
    for command in README.commands:
        if "first --prompt" not in command:
            follow(command, may_train="mine.toml" in command)
    assert AutoConfig.from_pretrained("hf").model_type == "llama"
    subprocess.run([sys.executable, "script.py"], check=True, capture_output=True, timeout=240)


def test_the_commands_in_tables_are_accepted() -> None:
    commands = re.findall(r"^\| `(tqppo train [^`]*)` \|", README.text, re.M)
    assert len(commands) == 4
    for command in commands:
        checked(command)


def test_every_block_of_code_is_a_file() -> None:
    assert set(README.files) == {"rewards.py", "mine.toml", "script.py"}
    assert README.unused == ["script.py"]


def test_the_picture_is_there_and_loads_nothing_from_elsewhere() -> None:
    (name,) = re.findall(r"^!\[.*\]\((.*)\)$", README.text, re.M)
    picture = (ROOT / name).read_text()
    assert "400/400" in picture.replace("&#160;", " ")
    assert "url(http" not in picture
    assert f"tqppo runs show first --svg {name}" in README.text


def test_every_page_is_listed() -> None:
    pages = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    table = README.text.split("## Pages")[1].split("## What works")[0]
    assert not [page for page in pages if f"`{page}`" not in table]


def test_the_picture_of_a_step_shows_the_stages_and_columns_of_ppo() -> None:
    (picture,) = re.findall(r"<!-- step: begin -->\n```\n(.*?)```", README.text, re.DOTALL)
    drawn = {line.split()[0]: line for line in picture.splitlines()[2:]}
    stages = {stage.name: stage for stage in dataflow.MODES["ppo"].stages}
    assert [name for name in drawn if name in stages] == list(stages)
    for name, stage in stages.items():
        put = drawn[name].partition(" put ")[2].split(", ") if " put " in drawn[name] else []
        assert [column.strip() for column in put] == list(stage.writes(EVERYTHING)), name


def test_the_mistake_is_shown_as_the_readme_shows_it(folder: Path) -> None:
    (shown,) = re.findall(r"```\n(error\[.*?)```", README.text, re.DOTALL)
    (folder / "mine.toml").write_text('extends = "quickstart"\n\n[algorithm]\nadvantage = "grop"\n')
    assert render_text(compile_config(None, [Path("mine.toml")], environ={}).diagnostics) == shown


EVERYTHING = dataflow.Features(
    has_critic=True, uses_values=True, has_reward_model=True, kl_in_loss=True, recomputes_old_logprobs=True
)
