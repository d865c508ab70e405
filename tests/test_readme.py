"""What the README shows is what happens."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tqppo import dataflow
from tqppo.config.compile import compile_config
from tqppo.config.diagnostics import render_text
from tqppo.config.show.keys import all_keys

README = Path(__file__).parent.parent / "README.md"


def test_the_queue_s_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert [row.tolist() for row in names["found"]["tokens"].unbind()] == [[0, 1, 2, 3, 4]]
    assert names["found"]["reward"].tolist() == [1.0]


def test_the_picture_of_a_step_shows_the_stages_and_columns_of_ppo() -> None:
    (picture,) = re.findall(r"<!-- step: begin -->\n```\n(.*?)```", README.read_text(), re.DOTALL)
    drawn = {line.split()[0]: line for line in picture.splitlines()[2:]}
    stages = {stage.name: stage for stage in dataflow.MODES["ppo"].stages}
    assert [name for name in drawn if name in stages] == list(stages)
    for name, stage in stages.items():
        put = drawn[name].partition(" put ")[2].split(", ") if " put " in drawn[name] else []
        assert [column.strip() for column in put] == list(stage.writes(EVERYTHING)), name


MISTAKES = """extends = "quickstart"

[algorithm]
advantage = "grop"

[actor]
mini_batch_size = 7
"""


def test_the_mistakes_are_shown_as_the_readme_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = re.findall(r"```\n(error\[.*?)```", README.read_text(), re.DOTALL)
    shutil.copytree(README.parent / "presets", tmp_path / "presets")
    (tmp_path / "mine.toml").write_text(MISTAKES)
    monkeypatch.chdir(tmp_path)
    assert render_text(compile_config(None, [Path("mine.toml")], environ={}).diagnostics) == shown


def test_the_documentation_of_mode_says_what_each_mode_says_of_itself() -> None:
    modes = ", ".join(f"{mode.name} ({mode.summary})" for mode in dataflow.MODES.values())
    (documented,) = (key.doc for key in all_keys() if key.name == "mode")
    assert documented == f"What to train with: {modes}."


EVERYTHING = dataflow.Features(
    has_critic=True, uses_values=True, has_reward_model=True, kl_in_loss=True, recomputes_old_logprobs=True
)
