"""docs/distillation.md: its files compile, its commands run, its metrics and settings exist.

A command that trains is checked by `validate-config` with the same options.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.pages import Page, checked, make_data_of_presets, run
from tqppo.algorithms import kl, top_k
from tqppo.config.sections import DistillationSection
from tqppo.config.show.keys import all_keys
from tqppo.rollout.teachers.figures import RolloutReport, TeacherFigures
from tqppo.tiny.model import write_tiny_model
from tqppo.workers.compute.divergence_figures import DivergenceFigures

PAGE = Page.read("docs/distillation.md")
ROW = {"prompt": [{"role": "user", "content": "21"}], "reward_model": {"ground_truth": "12"}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, and the model and data that they name."""
    PAGE.write(tmp_path)
    write_tiny_model(tmp_path / "runs" / "quickstart-1" / "export" / "hf")
    (tmp_path / "data").mkdir()
    subjects_of = {"school": ["sorting", "reversing"], "work": ["mirroring"], "exam": ["sorting", "mirroring"]}
    for name, subjects in subjects_of.items():
        rows = [json.dumps({**ROW, "subject": subject}) + "\n" for subject in subjects]
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k", "code"):
        make_data_of_presets(tmp_path / "copies", name)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", [each for each in PAGE.commands if "resume" not in each])
def test_a_command_of_the_page_is_accepted_without_a_complaint(command: str) -> None:
    assert ("teacher sorter scored" in checked(command)) == ("--probe" in command)


@pytest.mark.usefixtures("folder")
def test_the_command_that_resumes_looks_for_the_run() -> None:
    (command,) = [each for each in PAGE.commands if "resume" in each]
    assert "'mine' is neither a checkpoint nor a run" in run(command, code=5)


def test_every_file_of_the_page_is_used_by_a_command() -> None:
    assert len(PAGE.files) > 3
    assert not PAGE.unused


def test_every_metric_that_the_page_names_exists() -> None:
    teacher = RolloutReport({"NAME": TeacherFigures(seconds=[1.0])})
    known = {"val-core/distillation/reverse_kl/mean", *teacher.metrics()}
    for loss in (*top_k.KINDS, *kl.ESTIMATORS):
        figures = DivergenceFigures(loss, ("NAME", "OTHER"))
        known |= {*figures.mean_names, *figures.extreme_names}
    named = set(re.findall(r"`((?:distillation|teacher|val-core)/[^`]+)`", PAGE.text)) - {"distillation/"}
    assert len(named) > 15
    assert not named - known
    assert not {name for name in teacher.metrics() if name not in named}


def test_the_page_explains_every_loss_and_names_only_settings_that_exist() -> None:
    table = PAGE.text.split("## Which loss")[1].split("## What")[0]
    losses = DistillationSection.model_fields["loss"].annotation.__args__  # type: ignore[union-attr]
    assert not [loss for loss in losses if f"`{loss}`" not in table]
    keys = {key.name for key in all_keys()}
    named = re.findall(r"`((?:distillation|rollout|teachers)\.[\w.]+)", PAGE.text)
    assert named
    assert not [name for name in named if name.replace("teachers.NAME", "teachers.*") not in keys]
