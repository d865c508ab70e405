"""docs/distillation.md: its files compile, its commands run, its metrics and settings exist.

A command that trains is checked by `validate-config` with the same options.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo.algorithms import kl, top_k
from tqppo.cli import app
from tqppo.config.sections import DistillationSection
from tqppo.config.show.keys import all_keys
from tqppo.data.make import make_files
from tqppo.data.recipes import RECIPES
from tqppo.rollout.teachers.figures import RolloutReport, TeacherFigures
from tqppo.tiny.model import write_tiny_model
from tqppo.workers.compute.divergence_figures import DivergenceFigures

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "distillation.md").read_text()
FILES = dict(re.findall(r"```toml\n# (\S+\.toml)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]
ROW = {"prompt": [{"role": "user", "content": "21"}], "reward_model": {"ground_truth": "12"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, and the model and data that they name."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    write_tiny_model(tmp_path / "runs" / "quickstart-1" / "export" / "hf")
    (tmp_path / "data").mkdir()
    subjects_of = {"school": ["sorting", "reversing"], "work": ["mirroring"], "exam": ["sorting", "mirroring"]}
    for name, subjects in subjects_of.items():
        rows = [json.dumps({**ROW, "subject": subject}) + "\n" for subject in subjects]
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    make_data_of_presets(tmp_path / "copies")
    return tmp_path


def make_data_of_presets(copies: Path) -> None:
    """Files where `distill-7b` looks for them, as `tqppo data get` makes them of copies."""
    rows = {
        "gsm8k": {"question": "2 + 2?", "answer": "#### 4"},
        "code": {"text": "Add two.", "test_list": ["assert f(1) == 3"]},
    }
    for name, row in rows.items():
        for split in ("train", "test"):
            copy = copies / name / f"{split}.jsonl"
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(json.dumps(row) + "\n")
        make_files(RECIPES[name], [copies / name], Path(RECIPES[name].folder))


def without(options: list[str], name: str) -> list[str]:
    """The options without one that has a value."""
    if name not in options:
        return options
    place = options.index(name)
    return [*options[:place], *options[place + 2 :]]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [each for each in COMMANDS if "resume" not in each])
def test_a_command_of_the_page_is_accepted_without_a_complaint(command: str) -> None:
    program, name, *options = shlex.split(command)
    assert (program, name) in {("tqppo", "train"), ("tqppo", "validate-config")}
    answer = CliRunner().invoke(app, ["validate-config", *without(options, "--name")])
    assert answer.exit_code == 0, answer.output
    assert "warning[" not in answer.output
    assert ("teacher sorter scored" in answer.output) == ("--probe" in options)


@pytest.mark.usefixtures("folder")
def test_the_command_that_resumes_looks_for_the_run() -> None:
    (command,) = [each for each in COMMANDS if "resume" in each]
    answer = CliRunner().invoke(app, shlex.split(command)[1:])
    assert answer.exit_code == 5
    assert "'mine' is neither a checkpoint nor a run" in answer.output


def test_every_file_of_the_page_is_used_by_a_command() -> None:
    assert len(re.findall(r"```toml\n", PAGE)) == len(FILES) > 3
    assert not [name for name in FILES if not any(name in command for command in COMMANDS)]


def test_every_metric_that_the_page_names_exists() -> None:
    teacher = RolloutReport({"NAME": TeacherFigures(seconds=[1.0])})
    known = {"val-core/distillation/reverse_kl/mean", *teacher.metrics()}
    for loss in (*top_k.KINDS, *kl.ESTIMATORS):
        figures = DivergenceFigures(loss, ("NAME", "OTHER"))
        known |= {*figures.mean_names, *figures.extreme_names}
    named = set(re.findall(r"`((?:distillation|teacher|val-core)/[^`]+)`", PAGE)) - {"distillation/"}
    assert len(named) > 15
    assert not named - known
    assert not {name for name in teacher.metrics() if name not in named}


def test_the_page_explains_every_loss_and_names_only_settings_that_exist() -> None:
    table = PAGE.split("## Which loss")[1].split("## What")[0]
    losses = DistillationSection.model_fields["loss"].annotation.__args__  # type: ignore[union-attr]
    assert not [loss for loss in losses if f"`{loss}`" not in table]
    keys = {key.name for key in all_keys()}
    named = re.findall(r"`((?:distillation|rollout|teachers)\.[\w.]+)", PAGE)
    assert named
    assert not [name for name in named if name.replace("teachers.NAME", "teachers.*") not in keys]
