"""The panel of a run, drawn from its files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.errors import UsageError
from tqppo.run.folder import RunFolder
from tqppo.run.picture import panel_svg, progress_of

CONFIG = """mode = "grpo"
[run]
max_steps = 4
[model]
path = "tiny"
[rollout]
backend = "embedded"
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "mine")
    folder.path.mkdir(parents=True)
    folder.config.write_text(CONFIG)
    return folder


def write_steps(run: RunFolder) -> None:
    lines = [{"step": step, "critic/score/mean": step / 4, "timing_s/step": 30.0} for step in (1, 2, 3, 4)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = [{"event": "example", "text": text} for text in ("old", "'3142' → '1234', reward 1")]
    run.events.write_text("".join(json.dumps(each) + "\n" for each in events))


def test_the_panel_is_the_last_one_that_training_showed(run: RunFolder) -> None:
    write_steps(run)
    progress = progress_of(run)
    assert (progress.title, progress.subtitle) == ("mine", "grpo · tiny · embedded")
    assert (progress.step, progress.max_steps, progress.elapsed) == (4, 4, 120.0)
    assert progress.reward == [0.25, 0.5, 0.75, 1.0]
    assert progress.example == "'3142' → '1234', reward 1"


def test_the_picture_loads_nothing_from_elsewhere(run: RunFolder) -> None:
    write_steps(run)
    drawn = panel_svg(progress_of(run))
    assert drawn.startswith("<svg")
    assert "4/4" in drawn
    assert "@font-face" not in drawn
    assert "url(http" not in drawn
    assert drawn == panel_svg(progress_of(run))


def test_the_command_prints_the_panel_or_writes_it(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_steps(run)
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["runs", "show", "mine", "--panel"])
    assert "step 4/4" in shown.output
    assert "'3142' → '1234', reward 1" in shown.output
    assert CliRunner().invoke(app, ["runs", "show", "mine", "--svg", "mine.svg"]).exit_code == 0
    assert (tmp_path / "mine.svg").read_text().startswith("<svg")


def test_a_run_without_a_step_has_no_panel(run: RunFolder) -> None:
    with pytest.raises(UsageError, match="has not completed a step"):
        progress_of(run)
