"""Plain `validate-config` looks whether files are there, and says where it looked."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tqppo.cli import app
from tqppo.config.compile import compile_config
from tqppo.doctor.files import missing_files


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "run.toml").write_text(
        'extends = "base-tiny"\n[data]\ntrain = "train.jsonl"\n[reward]\nfunction = "reward.py:score"\n'
    )
    return tmp_path


def test_missing_files_are_warnings_with_the_places_that_were_searched(folder: Path) -> None:
    data, code = missing_files(compile_config(None, ["mine/run.toml"], ["warm_start.steps=0"], {}))
    assert (data.code, code.code, data.severity) == ("W623", "W623", "warning")
    assert f"looked for {folder}/mine/train.jsonl" in data.message
    assert f"looked for {folder}/mine/reward.py" in code.message
    assert data.span is not None
    assert str(data.span) == "mine/run.toml:3:9"


def test_files_that_are_there_are_no_problem(folder: Path) -> None:
    (folder / "mine" / "train.jsonl").write_text("{}\n")
    (folder / "mine" / "reward.py").write_text("")
    assert missing_files(compile_config(None, ["mine/run.toml"], [], {})) == []


def test_a_folder_that_is_written_as_one_must_be_there(folder: Path) -> None:
    (found,) = missing_files(compile_config("quickstart", [], ["model.path=./none", "warm_start.steps=0"], {}))
    assert (found.code, found.key) == ("W623", "model.path")


def test_validate_config_shows_them_and_still_prints_the_plan(folder: Path) -> None:
    result = CliRunner().invoke(app, ["validate-config", "--config", "mine/run.toml", "--set", "warm_start.steps=0"])
    assert result.exit_code == 0, result.output
    assert "warning[W623]" in result.output


def test_a_data_file_of_a_preset_comes_with_the_command_that_makes_it(folder: Path) -> None:
    train, *_ = missing_files(compile_config("grpo-7b", [], [], {}))
    assert train.key == "data.train"
    assert train.fix == "make it with `tqppo data get gsm8k`"
